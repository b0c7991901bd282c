import unittest

from cart import Cart


class Test(unittest.TestCase):
    def test_two_carts(self):
        Cart().add("tea")
        self.assertEqual(Cart().items, [])


if __name__ == "__main__":
    unittest.main()
