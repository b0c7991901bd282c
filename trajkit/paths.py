"""The token ids of single calls, in one piece, from turns in either form."""

import numpy as np

from trajkit import _core
from trajkit.calls import Calls, Ints
from trajkit.forest import Forest


class Paths:
    """Prompt and output of each call, copied when they are asked for."""

    def __init__(self, calls: Calls, forest: Forest) -> None:
        self._calls = calls
        self._forest = forest

    def held(self, call: int) -> Ints:
        """Prompt, then output."""
        return self._ids(call, 0, int(self._calls.held[call]))

    def prompt(self, call: int) -> Ints:
        """What the engine consumed."""
        return self._ids(call, 0, int(self._calls.calls["prompt_len"][call]))

    def output(self, call: int) -> Ints:
        """What it sampled."""
        start = int(self._calls.calls["prompt_len"][call])
        return self._ids(call, start, int(self._calls.held[call]))

    def _ids(self, call: int, start: int, stop: int) -> Ints:
        ids = np.empty(stop - start, np.int32)
        _core.copy_path(
            self._calls.calls, self._forest.nodes, self._forest.ends, call, start, ids
        )
        return ids
