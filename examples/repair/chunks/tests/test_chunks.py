import unittest

from chunks import chunks


class Test(unittest.TestCase):
    def test_rest(self):
        self.assertEqual(chunks([1, 2, 3, 4, 5], 2), [[1, 2], [3, 4], [5]])

    def test_no_rest(self):
        self.assertEqual(chunks([1, 2, 3, 4], 2), [[1, 2], [3, 4]])

    def test_nothing(self):
        self.assertEqual(chunks([], 3), [])


if __name__ == "__main__":
    unittest.main()
