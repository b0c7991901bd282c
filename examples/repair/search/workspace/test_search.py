import unittest

from search import find


class Test(unittest.TestCase):
    def test_last(self):
        self.assertEqual(find([1, 3, 5], 5), 2)


if __name__ == "__main__":
    unittest.main()
