"""Hypothesis profiles, and the build under test in pytest's header."""

import os

from hypothesis import settings

from trajkit import _core

settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("dev", deadline=None, max_examples=100)
settings.register_profile("ci", deadline=None, max_examples=300, print_blob=True)
settings.register_profile("thorough", deadline=None, max_examples=5000)
settings.load_profile(os.environ.get("TRAJKIT_HYPOTHESIS", "dev"))


def pytest_report_header() -> str:
    return f"trajkit: {_core.BUILD} build of {_core.__file__}"
