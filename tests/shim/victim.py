"""A gateway in a process of its own, for tests that kill it.

python -m tests.shim.victim DIRECTORY prints its URL and serves.
"""

import sys
from itertools import count

from tests.shim.fakes import RENDERER, ScriptedEngine, sampled
from trajkit_shim.app import create_app
from trajkit_shim.serve import serve
from trajkit_shim.sessions.turn_log import TurnLog

numbers = count()


class Numbering(ScriptedEngine):
    """Says a new number every time."""

    async def generate(self, request):
        return sampled(f"reply {next(numbers)}")


if __name__ == "__main__":
    app = create_app(Numbering(), RENDERER, TurnLog(sys.argv[1]))
    serve(app, on_listening=lambda url: print(url, flush=True))  # noqa: T201
