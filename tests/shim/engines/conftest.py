"""Models that several modules use."""

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The directory of a model for SGLang on a CPU."""
    from tests.shim.sglang_cpu.servers import make_model

    return make_model(tmp_path_factory.mktemp("tiny"))
