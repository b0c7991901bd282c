"""Enums of the kernels list the same names, in the same order, as the Python lists."""

import re
from pathlib import Path

import pytest

from trajkit import policies, schema
from trajkit.analysis.drift import DESCRIBED
from trajkit.analysis.drift_text import Stretch
from trajkit.pipeline import row_scalars
from trajkit.pipeline.plan import COUNTS
from trajkit.turns.structs import STOPS

NATIVE = Path(__file__).parents[2] / "_native"

# file, prefix of the members, the list in Python
MIRRORED = [
    ("structs.pxd", "STOP", STOPS),
    ("route/route.pxi", "REASON", schema.LINK_REASONS),
    ("route/route.pxi", "TIE_BREAK", policies.NAMED_CHOICES["tie_break"]),
    ("route/by_agents.pxi", "SEGMENT", ("none", *schema.SEGMENT_KINDS)),
    ("plan/plan.pxi", "ON_DRIFT", policies.NAMED_CHOICES["on_drift"]),
    ("plan/plan.pxi", "TRAIN_IN", policies.NAMED_CHOICES["train_in"]),
    ("plan/plan.pxi", "SPAN", schema.SPAN_KINDS),
    ("plan/plan.pxi", "REPORT", COUNTS),
    ("fill/fill.pxi", "LINE", [field.name for field in schema.SPAN][:-1]),
    ("fill/row_scalars.pxi", "INT", row_scalars._INTS),
    ("fill/row_scalars.pxi", "BIT", row_scalars._NULLABLE + row_scalars._FLAGS),
    ("drift/drift.pxi", "REGION", schema.REGIONS),
    ("drift/drift.pxi", "CAUSE", schema.CAUSES),
    ("drift/drift.pxi", "DRIFT", DESCRIBED),
    ("drift/align.pxi", "DIFFERENCE", Stretch._fields),
]


def members(source, prefix):
    """The enum whose members start so, without counts (N_*, *_WIDTH), in lower case."""
    for body in re.findall(r"^cdef enum:[^\n]*\n((?:    .*\n|\n)+)", source, re.M):
        names = re.findall(r"\b([A-Z][A-Z_]*)\b", re.sub(r"#.*", "", body))
        if names[0].startswith(f"{prefix}_"):
            assert "=" not in re.sub(r"#.*", "", body)
            names = [name for name in names if not re.match(r"N_|.*_WIDTH$", name)]
            return [name.removeprefix(f"{prefix}_").lower() for name in names]
    raise AssertionError(f"no enum {prefix}_*")


@pytest.mark.parametrize(
    ("file", "prefix", "expected"), MIRRORED, ids=[prefix for _, prefix, _ in MIRRORED]
)
def test_enums_of_kernels_are_the_lists_of_python(file, prefix, expected):
    assert members((NATIVE / file).read_text(), prefix) == list(expected)
