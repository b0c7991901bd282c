"""Deprecations are no errors here, and other warnings are.

`pip install trajkit[torch]` pins no version, and what the newest torch or transformers
deprecates is no error of that day.
"""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/torch/" in item.path.as_posix():
            for kind in ("DeprecationWarning", "FutureWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"default::{kind}"))
