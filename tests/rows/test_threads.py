import threading
from concurrent.futures import ThreadPoolExecutor

from tests.made_tables import turns_table
from trajkit.turns.sessions import Forest, Sessions


def test_forests_of_parts_are_grown_side_by_side(monkeypatch):
    call = {"prompt_ids": [1, 2], "output_ids": [3]}
    whole = Sessions.of(turns_table([{"session_id": name, **call} for name in "ab"]))
    both_grow, grow = threading.Barrier(2, timeout=30.0), Forest.of

    def waits(*given):
        both_grow.wait()
        return grow(*given)

    monkeypatch.setattr(Forest, "of", waits)
    parts = [whole.part(0, 1), whole.part(1, 2)]
    with ThreadPoolExecutor(2) as pool:
        forests = list(pool.map(lambda part: part.forest, parts))
    # and each is kept
    assert [part.forest for part in parts] == forests
