import unittest

from cart import Cart


class Test(unittest.TestCase):
    def test_two_carts(self):
        Cart().add("tea")
        self.assertEqual(Cart().items, [])

    def test_given_items_stay_the_caller_s(self):
        given = ["tea"]
        Cart(given).add("milk")
        self.assertEqual(given, ["tea"])

    def test_add(self):
        cart = Cart(["tea"])
        cart.add("milk")
        self.assertEqual(cart.items, ["tea", "milk"])


if __name__ == "__main__":
    unittest.main()
