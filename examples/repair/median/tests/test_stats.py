import unittest

from stats import median


class Test(unittest.TestCase):
    def test_even(self):
        self.assertEqual(median([4, 1, 3, 2]), 2.5)

    def test_odd(self):
        self.assertEqual(median([3, 1, 2]), 2)

    def test_input_is_left_alone(self):
        values = [2, 1]
        median(values)
        self.assertEqual(values, [2, 1])


if __name__ == "__main__":
    unittest.main()
