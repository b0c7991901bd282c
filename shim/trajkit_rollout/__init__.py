"""``trajkit rollout``: a harness works on tasks in sandboxes, and is graded.

`run_task` runs one rollout in any process, `read_tasks` reads tasks, and `sessions_table`
makes a table of what ended. `Settings` and `HARNESSES` say how.
"""

from importlib import import_module

_NAMES = {
    **dict.fromkeys(("HARNESSES", "Settings"), "settings"),
    **dict.fromkeys(("Rollout", "run_task", "sessions_table"), "rollout"),
    "read_tasks": "tasks",
}


def __getattr__(name: str) -> object:
    # commands are listed without what they need to run
    if name in _NAMES:
        return getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
