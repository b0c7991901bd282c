import unittest

from slug import slugify


class Test(unittest.TestCase):
    def test_spaces(self):
        self.assertEqual(slugify(" Hello   World "), "hello-world")


if __name__ == "__main__":
    unittest.main()
