"""How fast rows become packs, and random forests against brute force."""

import argparse
import random
import sys
import time

import trajkit as tk
from tests.reference_packs import (
    check_packed,
    random_choices,
    random_rows,
    rows_table,
)

_SESSIONS = 16


def fuzz(n_forests: int, seed: int) -> None:
    """Pack random forests, some sessions at a time, and compare with brute force."""
    started = time.perf_counter()
    for first in range(0, n_forests, _SESSIONS):
        draw = random.Random(f"{seed} {first}")
        n = min(_SESSIONS, n_forests - first)
        rows = random_rows(draw, n, group=draw.choice([None, "g"]))
        choices = random_choices(draw, rows)
        table = rows_table(rows)
        if draw.random() < 0.5:
            table = tk.suffix_rows(table)
        try:
            check_packed(tk.pack(table, **choices), rows, choices)
        except Exception as error:
            error.add_note(f"seed {seed}, forest {first}, {choices}")
            raise
    print(f"{n_forests:,} forests, no difference, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fuzz", type=int)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    fuzz(a.fuzz, a.seed)
