import unittest

from roman import roman


class Test(unittest.TestCase):
    def test_four_and_nine(self):
        self.assertEqual(roman(14), "XIV")
        self.assertEqual(roman(29), "XXIX")

    def test_others(self):
        self.assertEqual(roman(8), "VIII")
        self.assertEqual(roman(39), "XXXIX")


if __name__ == "__main__":
    unittest.main()
