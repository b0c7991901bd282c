"""Several threads make rows side by side."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import trajkit as tk
from trajkit.turns import sessions
from trajkit.turns.sessions import Forest, Sessions


def test_forests_of_parts_are_grown_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = {"prompt_ids": [1, 2], "output_ids": [3], "output_logprobs": [-0.5]}
    names = ("a", "b")
    turns = tk.from_records([{"session_id": name, **call} for name in names])
    whole = Sessions.of(turns)
    both_grow = threading.Barrier(2, timeout=30.0)
    grow = Forest.of

    def waits(*given: object) -> Forest:
        both_grow.wait()
        return grow(*given)

    monkeypatch.setattr(sessions.Forest, "of", waits)
    parts = [whole.part(0, 1), whole.part(1, 2)]
    with ThreadPoolExecutor(2) as pool:
        forests = list(pool.map(lambda part: part.forest, parts))
    assert [len(forest.ends) for forest in forests] == [1, 1]
    assert [part.forest for part in parts] == forests  # each is grown once
