import unittest

from csvline import fields


class Test(unittest.TestCase):
    def test_quotes(self):
        self.assertEqual(fields('a,"b,c",d'), ["a", "b,c", "d"])


if __name__ == "__main__":
    unittest.main()
