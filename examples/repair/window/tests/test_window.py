import unittest

from window import Window


class Test(unittest.TestCase):
    def test_old_values_leave(self):
        window = Window()
        for value in (10, 1, 1, 1):
            window.add(value)
        self.assertEqual(window.mean_of_last(3), 1)

    def test_fewer_values(self):
        window = Window()
        window.add(4)
        self.assertEqual(window.mean_of_last(3), 4)


if __name__ == "__main__":
    unittest.main()
