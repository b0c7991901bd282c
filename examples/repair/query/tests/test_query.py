import unittest

from query import parse_query


class Test(unittest.TestCase):
    def test_a_sign_in_the_value(self):
        self.assertEqual(parse_query("a=1&b=x=y"), {"a": "1", "b": "x=y"})

    def test_no_value(self):
        self.assertEqual(parse_query("a&b=2"), {"a": "", "b": "2"})

    def test_nothing(self):
        self.assertEqual(parse_query(""), {})


if __name__ == "__main__":
    unittest.main()
