import unittest

from leap import is_leap


class Test(unittest.TestCase):
    def test_centuries(self):
        self.assertFalse(is_leap(1900))

    def test_others(self):
        self.assertTrue(is_leap(2000))
        self.assertTrue(is_leap(2024))
        self.assertFalse(is_leap(2023))


if __name__ == "__main__":
    unittest.main()
