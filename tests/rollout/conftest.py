"""The tests of real clients need the place where these are."""

import os

from tests.shim.conftest import no_half_closed_connections

__all__ = ["no_half_closed_connections"]

collect_ignore = [] if "TRAJKIT_CLIENTS" in os.environ else ["test_real_clients.py"]
