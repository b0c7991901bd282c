"""The demo's tasks: small repositories with one faulty function."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task, and how the scripted model handles it."""

    name: str
    module: str  # the faulty file
    source: str
    test: str  # ``test_<module>``, which fails until the bug is fixed
    issue: str  # the bug in a user's words
    wrong: str  # the text in ``source`` to replace, and its replacement
    right: str
    # the model's first attempt to run the test is not a valid tool call
    slips: bool = False
    reviews: bool = False  # the model has a second agent review the change
    # indices of the session's replies that never reach the agent
    loses: tuple[int, ...] = ()

    @property
    def fixed(self) -> str:
        """The source with the bug fixed."""
        return self.source.replace(self.wrong, self.right)


TASKS = (
    Task(
        name="median",
        module="stats.py",
        source='''"""Summary statistics."""


def median(values):
    """The middle value, or the mean of the two middle ones."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
''',
        test="""from stats import median

assert median([3, 1, 2]) == 2
assert median([4, 1, 3, 2]) == 2.5, median([4, 1, 3, 2])
print("ok")
""",
        issue="median([4, 1, 3, 2]) in stats.py gives 3; it should give 2.5.",
        wrong="    return ordered[len(ordered) // 2]\n",
        right="""    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2
""",
        slips=True,
        reviews=True,
        loses=(3,),
    ),
    Task(
        name="slug",
        module="slug.py",
        source='''"""Titles as parts of an address."""


def slugify(title):
    """The words of a title in lower case, with hyphens between them."""
    return "-".join(title.lower().split(" "))
''',
        test="""from slug import slugify

assert slugify("Hello World") == "hello-world"
assert slugify(" Hello   World ") == "hello-world", slugify(" Hello   World ")
print("ok")
""",
        issue='slugify(" Hello   World ") in slug.py gives "-hello---world-".',
        wrong='.split(" ")',
        right=".split()",
        loses=(1,),
    ),
    Task(
        name="roman",
        module="roman.py",
        source='''"""Roman numerals."""

SIGNS = ((10, "X"), (5, "V"), (1, "I"))


def roman(number):
    """A number from 1 to 39 in Roman numerals."""
    written = ""
    for value, sign in SIGNS:
        written += sign * (number // value)
        number %= value
    return written
''',
        test="""from roman import roman

assert roman(8) == "VIII"
assert roman(14) == "XIV", roman(14)
assert roman(29) == "XXIX", roman(29)
print("ok")
""",
        issue="roman(14) in roman.py gives XIIII, and roman(29) gives XXVIIII.",
        wrong='SIGNS = ((10, "X"), (5, "V"), (1, "I"))',
        right='SIGNS = ((10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))',
        slips=True,
    ),
)
