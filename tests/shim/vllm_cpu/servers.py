"""Tiny models, and real vLLM servers of them on a CPU."""

import os
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from trajkit_shim.engines.embedded import load_tokenizer
from trajkit_shim.engines.launch import reserved_port

PYTHON = os.environ["TRAJKIT_VLLM_PYTHON"]
HERE = Path(__file__).parent
DENSE = HERE.parent / "sglang_cpu" / "make_model.py"
EXPERTS = HERE / "make_experts.py"
ARGUMENTS = (
    *("--served-model-name", "tiny"),
    "--enable-scale-out",
    *("--logprobs-mode", "processed_logprobs"),
    "--enable-prompt-tokens-details",
    *("--dtype", "bfloat16"),
    # a prompt that is read in parts ends the engine on a CPU, if its call has a seed
    *("--max-model-len", "32768"),
    *("--max-num-batched-tokens", "65536"),
    *("--max-num-seqs", "8"),
    "--enforce-eager",
)
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
# vLLM's second model runner, which has routed experts and sampling masks
_SECOND_RUNNER = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": str(HERE / "runner2"),
}


def make_model(directory: Path, script: Path = DENSE, seed: int = 0) -> str:
    """Make a random model with a script; return its directory."""
    path = str(directory / "model")
    load_tokenizer().save_pretrained(path)
    command = [PYTHON, str(script), path, str(seed)]
    subprocess.run(command, check=True, timeout=120)
    return path


@contextmanager
def served(model: str, directory: Path, *arguments: str, second_runner: bool = False):
    """The URL of a server of a model; its log is in the directory."""
    environment = {**os.environ, **_ENVIRONMENT}
    if second_runner:
        environment |= _SECOND_RUNNER
    log = directory / "engine.log"
    with reserved_port() as port, log.open("wb") as output:
        command = [str(Path(PYTHON).with_name("vllm")), "serve", model, *ARGUMENTS]
        command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment
        )
        url = f"http://127.0.0.1:{port}"
        try:
            until = time.monotonic() + 300
            while not _answers(url):
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < until, log.read_text()[-4000:]
                time.sleep(0.5)
            yield url
        finally:
            # its engine's processes end with it
            process.terminate()
            process.wait(60)


def _answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", trust_env=False).is_success
    return False
