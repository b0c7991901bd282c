"""Tiny models, and real SGLang servers of them on a CPU."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trajkit_shim.engines.embedded import load_tokenizer
from trajkit_shim.engines.launch import running_server, sglang_server

PYTHON = os.environ.get("TRAJKIT_SGLANG_PYTHON", "")
# without the second, it takes 15 GB for its cache; with the fourth, it uses no CPU if idle
ARGUMENTS = (
    *("--device", "cpu"),
    *("--max-total-tokens", "262144"),
    *("--max-running-requests", "16"),
    "--sleep-on-idle",
    *("--served-model-name", "tiny"),
    *("--tool-call-parser", "qwen"),
    *("--reasoning-parser", "qwen3"),
)


def write_tokenizer(directory: str) -> None:
    """Write the embedded engine's tokenizer."""
    load_tokenizer().save_pretrained(directory)


def make_model(
    directory: Path,
    script: str = "make_model.py",
    prepare: Callable[[str], None] = write_tokenizer,
) -> str:
    """Make a random model with a script of this folder; return its directory.

    ``prepare`` writes the tokenizer, for which the environment of SGLang lacks modules.
    """
    path = str(directory / "model")
    prepare(path)
    command = [PYTHON, str(Path(__file__).with_name(script)), path]
    subprocess.run(command, check=True, timeout=120)
    return path


@contextmanager
def served(model: str, directory: Path, *arguments: str) -> Iterator[str]:
    """The URL of a server of a model; its log is in the directory."""
    log = directory / "engine.log"
    command = sglang_server(PYTHON, model, [*ARGUMENTS, *arguments])
    with running_server(*command, log, start_seconds=300) as url:
        yield url
