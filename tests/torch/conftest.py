"""Without torch and transformers, every module here is skipped."""

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
