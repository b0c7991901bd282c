"""Without torch and transformers, every module here is skipped.

Warnings are errors here, too, but for deprecations: `pip install trajkit[torch]` pins no
version, and what the newest torch or transformers deprecates is no error of that day.
"""

from importlib.util import find_spec

import pytest

MISSING = [name for name in ("torch", "transformers") if find_spec(name) is None]


class _Skipped(pytest.Module):
    def collect(self):
        pytest.skip(
            f"needs {' and '.join(MISSING)}: pip install trajkit[torch]",
            allow_module_level=True,
        )


def pytest_pycollect_makemodule(module_path, parent):
    return _Skipped.from_parent(parent, path=module_path) if MISSING else None


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/torch/" in item.path.as_posix():
            for kind in ("DeprecationWarning", "FutureWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"default::{kind}"))
