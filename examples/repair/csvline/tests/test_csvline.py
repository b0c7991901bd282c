import unittest

from csvline import fields


class Test(unittest.TestCase):
    def test_quotes(self):
        self.assertEqual(fields('a,"b,c",d'), ["a", "b,c", "d"])

    def test_no_quotes(self):
        self.assertEqual(fields("a,,b"), ["a", "", "b"])

    def test_empty_quotes(self):
        self.assertEqual(fields('"",a'), ["", "a"])


if __name__ == "__main__":
    unittest.main()
