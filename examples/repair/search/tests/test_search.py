import unittest

from search import find


class Test(unittest.TestCase):
    def test_last(self):
        self.assertEqual(find([1, 3, 5], 5), 2)

    def test_each(self):
        values = [1, 3, 5, 7]
        self.assertEqual([find(values, v) for v in values], [0, 1, 2, 3])

    def test_missing(self):
        self.assertIsNone(find([1, 3], 2))
        self.assertIsNone(find([], 2))


if __name__ == "__main__":
    unittest.main()
