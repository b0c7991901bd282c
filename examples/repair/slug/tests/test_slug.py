import unittest

from slug import slugify


class Test(unittest.TestCase):
    def test_spaces(self):
        self.assertEqual(slugify(" Hello   World "), "hello-world")

    def test_tabs(self):
        self.assertEqual(slugify("a\tB"), "a-b")

    def test_nothing(self):
        self.assertEqual(slugify("  "), "")


if __name__ == "__main__":
    unittest.main()
