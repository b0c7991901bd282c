"""Real clients and the real SGLang server, which `.ci/sglang` makes possible."""

import pytest

from tests.shim.engines.real_clients import RealClients
from tests.shim.sglang_cpu.servers import served
from trajkit_shim.engines.http import SGLangEngine
from trajkit_shim.engines.model_config import vocab_size

pytestmark = [pytest.mark.clients, pytest.mark.sglang]


@pytest.fixture(scope="module")
def url(tiny_model, tmp_path_factory):
    with served(tiny_model, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture
def real(url, tiny_model):
    return SGLangEngine(url, vocab_size=vocab_size(tiny_model)), tiny_model


class TestSGLang(RealClients):
    @staticmethod
    def regex(pattern):
        return {"regex": pattern}
