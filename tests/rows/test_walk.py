"""The way of `tk.linearize(turns)` through the modules, followed call by call.

    python -m tests.rows.test_walk

prints it, as ARCHITECTURE.md shows it.
"""

import sys
from collections import Counter
from pathlib import Path

import trajkit as tk

ROOT = Path(tk.__file__).parent


def walk(function, *arguments):
    """(depth, module, function) of each entry into a module.

    A function enters another module once, however many of its functions it calls there.
    Comprehensions belong to the function around them.
    """
    entries, seen, frames = [], set(), []

    def module(frame):
        path = Path(frame.f_code.co_filename)
        if frame.f_code.co_name.endswith("comp>") or not path.is_relative_to(ROOT):
            return None
        if frame.f_code.co_name == "<genexpr>":
            return None
        return ".".join(path.relative_to(ROOT).with_suffix("").parts)

    def caller(frame):
        while frame is not None and module(frame) is None:
            frame = frame.f_back
        return frame

    def depth(frame):
        n, inside = 0, module(frame)
        while (frame := caller(frame.f_back)) is not None:
            n, inside = n + (module(frame) != inside), module(frame)
        return n

    def follow(frame, event, _):
        name = module(frame)
        if event != "call" or name is None:
            return
        before = caller(frame.f_back)
        key = id(before), name
        if (before and module(before) == name) or key in seen:
            return
        frames.append(before)  # or another frame may get its id
        seen.add(key)
        entries.append((depth(frame), name, frame.f_code.co_name))

    function(*arguments)  # what is imported or read once, is
    sys.setprofile(follow)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return entries


def printed(entries):
    width = max(2 * depth + len(name) for depth, name, _ in entries)
    return "\n".join(
        f"{'  ' * depth + name:{width}}  {function}"
        for depth, name, function in entries
    )


def the_walk():
    said = [{"role": "user", "content": "2 + 2?"}]
    first = {
        "session_id": "a",
        "prompt_ids": [1, 2],
        "output_ids": [3, 4],
        "output_logprobs": [-0.5, -1.0],
    }
    reply = {"role": "assistant", "content": "4"}
    records = [
        {**first, "prompt_messages": said, "response_message": reply},
        {
            "session_id": "a",
            "prompt_ids": [1, 2, 3, 4, 5],
            "output_ids": [6],
            "output_logprobs": [-0.25],
            "prompt_messages": [*said, reply, {"role": "user", "content": "sure?"}],
            "response_message": reply,
        },
    ]
    return walk(tk.linearize, tk.from_records(records))


def test_linearize_enters_at_most_12_modules():
    entries = the_walk()
    sys.stdout.write(printed(entries) + "\n")
    times = Counter(name for _, name, _ in entries)
    assert len(times) <= 12
    assert max(times.values()) <= 3


if __name__ == "__main__":
    sys.stdout.write(printed(the_walk()) + "\n")
