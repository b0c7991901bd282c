"""Gateways beside rollouts start fast, and the tests of real clients need their place."""

import multiprocessing
import os

import pytest

from tests.shim.conftest import no_half_closed_connections
from trajkit_shim import workers

__all__ = ["no_half_closed_connections"]

collect_ignore = [] if "TRAJKIT_CLIENTS" in os.environ else ["test_real_clients.py"]

_FORKS = multiprocessing.get_context("forkserver")
# what takes most of the time of a gateway's start
_FORKS.set_forkserver_preload(["trajkit_rollout.command", "trajkit_shim.app"])


@pytest.fixture(autouse=True)
def forked_gateways(monkeypatch):
    """A process starts as a fork of one that has imported its modules.

    Runs that tests start in processes of their own start their gateways as users do.
    """
    monkeypatch.setattr(workers.multiprocessing, "get_context", lambda _: _FORKS)
