"""The shim's commands: ``trajkit serve`` and ``trajkit demo``.

What they need comes with an extra, and is imported once a command runs.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from trajkit.errors import FormatError

if TYPE_CHECKING:
    from trajkit_shim.engine import Engine
    from trajkit_shim.render import ChatRenderer

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

BAD_USAGE = 2


def add_serve(commands: Commands) -> None:
    """Add ``serve`` to the command line."""
    parser = commands.add_parser(
        "serve",
        help="record the model calls of an unmodified agent",
        description="Run a gateway that speaks OpenAI Chat Completions, samples from "
        "an inference engine in token ids, and writes every call to the run's turn log "
        "before it is answered. POST /sessions opens a session; its id is the API key.",
    )
    parser.add_argument(
        "--engine",
        choices=["embedded", "sglang"],
        default="embedded",
        help="embedded: a small scripted one, for trying things out (the default)",
    )
    parser.add_argument(
        "--engine-url", metavar="URL", help="of the SGLang server, with --engine sglang"
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="the model's config, tokenizer and chat template, with --engine sglang",
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument(
        "--port", type=int, default=8765, help="0: any free one (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        metavar="RUN",
        type=Path,
        required=True,
        help="directory of the turn log; made if missing",
    )
    parser.add_argument(
        "--json", action="store_true", help="say where it listens as a JSON object"
    )
    parser.set_defaults(run=lambda arguments: _serve(parser, arguments))


def add_demo(commands: Commands) -> None:
    parser = commands.add_parser("demo")


def _serve(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    sglang = arguments.engine == "sglang"
    options = {"--engine-url": arguments.engine_url, "--model": arguments.model}
    for option, value in options.items():
        if sglang and value is None:
            parser.error(f"--engine sglang needs {option}")
        if not sglang and value is not None:
            parser.error(f"{option} means nothing to the embedded engine")
    with _needs_extra(parser, "shim"):
        from trajkit_shim.app import create_app
        from trajkit_shim.log import TurnLog
        from trajkit_shim.serve import serve

        engine, renderer = _sglang(arguments) if sglang else _embedded()
    log = TurnLog(arguments.out)

    def say_where(url: str) -> None:
        where = {"url": url, "openai_base_url": f"{url}/v1", "turns": str(log.path)}
        if arguments.json:
            text = json.dumps(where)
        else:
            text = "\n".join(f"{name:<16}{value}" for name, value in where.items())
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    app = create_app(engine, renderer, log)
    serve(app, arguments.host, arguments.port, on_listening=say_where)
    return 0


def _embedded() -> "tuple[Engine, ChatRenderer]":
    from trajkit_shim.embedded import EmbeddedEngine, load_tokenizer
    from trajkit_shim.render import ChatRenderer

    return EmbeddedEngine(), ChatRenderer(load_tokenizer())


def _sglang(arguments: argparse.Namespace) -> "tuple[Engine, ChatRenderer]":
    from trajkit_shim.render import load_renderer
    from trajkit_shim.sglang_engine import SGLangEngine, model_vocab_size

    try:
        renderer = load_renderer(arguments.model)
        vocab_size = model_vocab_size(arguments.model)
    except ValueError as error:
        raise FormatError(f"{arguments.model}: {error}") from error
    return SGLangEngine(arguments.engine_url, vocab_size=vocab_size), renderer


@contextmanager
def _needs_extra(parser: argparse.ArgumentParser, extra: str) -> Iterator[None]:
    """End the run with one line where an import inside finds a package missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("trajkit"):
            raise
        parser.exit(
            BAD_USAGE,
            f"{parser.prog}: {error.name} is not installed: "
            f"pip install 'trajkit[{extra}]'\n",
        )
