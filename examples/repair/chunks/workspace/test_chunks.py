import unittest

from chunks import chunks


class Test(unittest.TestCase):
    def test_rest(self):
        self.assertEqual(chunks([1, 2, 3, 4, 5], 2), [[1, 2], [3, 4], [5]])


if __name__ == "__main__":
    unittest.main()
