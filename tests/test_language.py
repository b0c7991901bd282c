"""The prose is plain English: words of the old dialect stay rare."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"

# Matches allowed per 10,000 words of the pages, and of pages and docstrings together.
BOUND = 12

DIALECT = re.compile(
    r"""\b(
    what\s+stands | stands | (?:is|are)\s+told | told | says(?:\s+of)? | held | behind
    | beside | (?:of\s+the\s+)?whole(?:\s+of)? | where\s+it(?:\s+says)? | anew
    | (?:goes|go|gone)\s+on(?:\s+from)? | (?:is|are)\s+none | so\s+many(?:\s+of)?
    | in\s+one\s+piece | set\s+aside | of\s+which\s+nothing | hands?\s+on
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)


def pages() -> Iterator[tuple[Path, str]]:
    for pattern in ("*.md", "docs/*.md", "_native/*.md", "benchmarks/*.md"):
        for path in sorted(ROOT.glob(pattern)):
            yield path, path.read_text(encoding="utf-8")


def docstrings() -> Iterator[tuple[Path, str]]:
    """Docstrings of Python and Cython sources, those of constants included."""
    for folder in (
        "trajkit",
        "shim/trajkit_shim",
        "examples/train/trajkit_train",
        "_native",
    ):
        for path in sorted((ROOT / folder).rglob("*.p*")):
            if path.suffix in {".py", ".pyi"}:
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    match node:
                        case ast.Expr(value=ast.Constant(value=str(text))):
                            yield path, text
            elif path.suffix in {".pyx", ".pxi", ".pxd"}:
                source = path.read_text(encoding="utf-8")
                for text in re.findall(r'"""(.*?)"""', source, re.DOTALL):
                    yield path, text


def check(texts: list[tuple[Path, str]], bound: int) -> None:
    words = sum(len(text.split()) for _, text in texts)
    found = Counter[str]()
    for path, text in texts:
        found[str(path.relative_to(ROOT))] += len(DIALECT.findall(text))
    rate = 10_000 * found.total() / words
    counts = "\n".join(f"{n:5} {path}" for path, n in found.most_common() if n)
    assert rate <= bound, f"{rate:.1f} per 10,000 of {words:,} words:\n{counts}"


def test_readme_has_no_word_of_the_dialect():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if DIALECT.search(line)] == []


def test_the_dialect_is_rare_in_the_pages():
    check(list(pages()), BOUND)


def test_the_dialect_is_rare_in_pages_and_docstrings():
    check([*pages(), *docstrings()], BOUND)


def test_every_phrase_is_found_over_a_line_break():
    text = (
        "What stands here goes\non from a whole one; it is\nnone, so many in one piece"
    )
    assert len(DIALECT.findall(text)) == 6
