"""Tiny models, and real vLLM servers of them on a CPU."""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

from trajkit_shim.engines.embedded import load_tokenizer
from trajkit_shim.engines.launch import running_server

PYTHON = os.environ.get("TRAJKIT_VLLM_PYTHON", "")
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
    variables = _ENVIRONMENT | (_SECOND_RUNNER if second_runner else {})
    command = [str(Path(PYTHON).with_name("vllm")), "serve", model]
    with running_server(
        [*command, *ARGUMENTS, *arguments],
        variables,
        directory / "engine.log",
        start_seconds=300,
    ) as url:
        yield url
