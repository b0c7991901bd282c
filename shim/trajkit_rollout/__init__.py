"""``trajkit rollout``: a harness works on tasks in sandboxes, and is graded.

`run_task` runs one rollout in any process, `read_tasks` reads tasks, and `sessions_table`
makes a table of what ended. `Settings` and `HARNESSES` say how.
"""

from importlib import import_module

_NAMES = (
    "HARNESSES",
    "Rollout",
    "Settings",
    "read_tasks",
    "run_task",
    "sessions_table",
)


def __getattr__(name: str) -> object:
    # commands are listed without what they need to run
    if name in _NAMES:
        module = "tasks" if name == "read_tasks" else "rollout"
        return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
