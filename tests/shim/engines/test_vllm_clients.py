"""Real clients and the real vLLM server, which `.ci/vllm` makes possible."""

import pytest

from tests.shim.engines.real_clients import RealClients
from tests.shim.vllm_cpu.servers import make_model, served
from trajkit_shim.engines.http import VLLMEngine
from trajkit_shim.engines.model_config import vocab_size

pytestmark = [pytest.mark.clients, pytest.mark.vllm]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    with served(model, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture
def real(url, model):
    return VLLMEngine(url, vocab_size=vocab_size(model)), model


class TestVLLM(RealClients):
    @staticmethod
    def regex(pattern):
        return {"structured_outputs": {"regex": pattern}}
