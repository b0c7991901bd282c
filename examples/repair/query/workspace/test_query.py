import unittest

from query import parse_query


class Test(unittest.TestCase):
    def test_a_sign_in_the_value(self):
        self.assertEqual(parse_query("a=1&b=x=y"), {"a": "1", "b": "x=y"})


if __name__ == "__main__":
    unittest.main()
