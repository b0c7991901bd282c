import unittest

from leap import is_leap


class Test(unittest.TestCase):
    def test_centuries(self):
        self.assertFalse(is_leap(1900))


if __name__ == "__main__":
    unittest.main()
