"""The shim's commands: ``trajkit serve`` and ``trajkit demo``.

What they need comes with an extra, and is imported once a command runs.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trajkit.cli import BAD_USAGE
from trajkit.cli.options import Commands, count
from trajkit.errors import FormatError

if TYPE_CHECKING:
    from trajkit_shim.embedded import Policy
    from trajkit_shim.engine import Engine
    from trajkit_shim.render import ChatRenderer
    from trajkit_shim.reply_parsers import ReplyParser

# parsers of replies that are not the gateway's own
_OUTSIDE = ("sglang", "schema")

ADMIN_TOKEN = "TRAJKIT_ADMIN_TOKEN"
"""The environment's name for the admin token."""


def add_serve(commands: Commands) -> None:
    """Add ``serve`` to the command line."""
    parser = commands.add_parser(
        "serve",
        help="record the model calls of an unmodified agent",
        description="Run a gateway that speaks OpenAI Chat Completions and Responses, "
        "Anthropic Messages and Gemini generateContent, samples from an inference "
        "engine in token ids, and writes every call to the run's turn log before it is "
        "answered. POST /sessions opens a session; its id is the API key.",
    )
    add_engine(parser)
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
        "--log",
        choices=["full", "delta"],
        default="full",
        help="delta: write each prompt as what it adds to an earlier turn, compressed "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--images",
        choices=["refuse", "omit"],
        default="refuse",
        help="a request with an image is refused (the default), or a text stands for it",
    )
    parser.add_argument(
        "--prompts",
        choices=["append", "render"],
        default="append",
        help="append: build each prompt behind the ids of the turn before, where the "
        "chat template allows it (the default); render: render each one whole",
    )
    parser.add_argument(
        "--no-attribution",
        action="store_true",
        help="leave out which message each prompt token shows; the log is half as large",
    )
    parser.add_argument(
        "--admin-token",
        metavar="TOKEN",
        default=os.environ.get(ADMIN_TOKEN),
        help="what requests to /sessions and /admin must bring; needed where --host is "
        f"not this machine alone. Better given as the environment's {ADMIN_TOKEN}, "
        "which other users of this machine can't see",
    )
    parser.add_argument(
        "--fsync",
        action="store_true",
        help="wait until the disk has each turn, so that it outlives the machine",
    )
    parser.add_argument(
        "--file-bytes",
        metavar="N",
        type=count,
        default=1 << 30,
        help="where a file of the log ends and the next begins (default: %(default)s)",
    )
    parser.add_argument(
        "--log-bytes",
        metavar="N",
        type=count,
        help="the most that all turns may take; calls beyond it are refused",
    )
    parser.add_argument(
        "--drain-seconds",
        metavar="N",
        type=count,
        help="how long calls under way may take once it is stopped (default: as long "
        "as they want)",
    )
    parser.add_argument(
        "--json", action="store_true", help="say where it listens as a JSON object"
    )
    parser.set_defaults(run=lambda arguments: _serve(parser, arguments))


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options that name an engine; `built_engine` reads them."""
    parser.add_argument(
        "--engine",
        choices=["embedded", "sglang", "vllm"],
        default="embedded",
        help="embedded: a small scripted one, for trying things out (the default)",
    )
    parser.add_argument(
        "--engine-url", metavar="URL", help="of the server, with another engine"
    )
    parser.add_argument(
        "--check-prompts",
        action="store_true",
        help="have the SGLang server send each prompt back, and refuse one that is "
        "another",
    )
    parser.add_argument(
        "--routed-experts",
        action="store_true",
        help="log which experts each token was routed to, from an SGLang server with "
        "--enable-return-routed-experts",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="the model's config, tokenizer and chat template, with another engine",
    )
    parser.add_argument(
        "--tool-form",
        metavar="NAME",
        help="how the model writes its calls: hermes, qwen3-coder, glm or plain-json "
        "(default: as its chat template tells); sglang: ask that server's own parsers; "
        "schema: the tokenizer's response template",
    )


def add_demo(commands: Commands) -> None:
    """Add ``demo`` to the command line."""
    parser = commands.add_parser(
        "demo",
        help="watch real agents being recorded and turned into training rows",
        description="Run coding agents against the gateway on the embedded engine, "
        "each in a scratch git repository, write their turns and the rows of every "
        "policy, and print what drifted and what each policy trains, loses and costs. "
        "The exit code is 1 where an agent failed.",
    )
    parser.add_argument(
        "--out",
        metavar="RUN",
        type=Path,
        help="directory of the run (default: runs/demo, or the next one that is free)",
    )
    parser.add_argument(
        "--sessions",
        metavar="N",
        type=count,
        default=4,
        help="agents side by side (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, help="of the engine; the default differs"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    parser.set_defaults(run=lambda arguments: _demo(parser, arguments))


def _demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    with needs_extra(parser, "demo"):
        # the agent runs in processes of its own, where its absence would show late
        if find_spec("minisweagent") is None:
            raise ModuleNotFoundError(name="minisweagent")
        from trajkit_shim.demo import run_demo
    out = arguments.out or _free(Path("runs/demo"))
    return run_demo(
        out, sessions=arguments.sessions, seed=arguments.seed, json=arguments.json
    )


def _free(path: Path) -> Path:
    """The path, or it with the first number behind it that nothing has yet."""
    numbered = (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if not each.exists())


def _serve(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    with needs_extra(parser, "shim"):
        from trajkit_shim.app import create_app
        from trajkit_shim.log import TurnLog
        from trajkit_shim.parsers import FORMS
        from trajkit_shim.prompts import Prompts
        from trajkit_shim.serve import is_loopback, serve

        if not is_loopback(arguments.host) and not arguments.admin_token:
            parser.error(
                f"--host {arguments.host} can be reached from elsewhere: give "
                "--admin-token"
            )
        engine, renderer = built_engine(parser, arguments)
        reply_parser = built_parser(arguments, renderer)
    log = TurnLog(
        arguments.out,
        form=arguments.log,
        fsync=arguments.fsync,
        max_file_bytes=arguments.file_bytes,
        max_total_bytes=arguments.log_bytes,
        routed_experts=arguments.routed_experts,
        attributed=not arguments.no_attribution,
    )

    def say_where(url: str) -> None:
        where = {
            "url": url,
            "openai_base_url": f"{url}/v1",
            "turns": str(log.directory),
        }
        built = Prompts(renderer, arguments.prompts)
        if arguments.json:
            text = json.dumps({**where, "prompts": built.describe()})
        else:
            where["prompts"] = built.summary()
            text = "\n".join(f"{name:<16}{value}" for name, value in where.items())
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    app = create_app(
        engine,
        renderer,
        log,
        images=arguments.images,
        attributed=not arguments.no_attribution,
        tool_form=FORMS.get(arguments.tool_form),
        reply_parser=reply_parser,
        prompts=arguments.prompts,
        admin_token=arguments.admin_token or None,
    )
    # Ctrl-C is how it is stopped; the calls under way have been answered by then.
    with suppress(KeyboardInterrupt):
        serve(
            app,
            arguments.host,
            arguments.port,
            on_listening=say_where,
            drain_seconds=arguments.drain_seconds,
        )
    return 0


def built_engine(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    *,
    policy: "Policy | None" = None,
    seed: int | None = None,
) -> "tuple[Engine, ChatRenderer]":
    """The engine that the options name, and the renderer of its model.

    Parameters
    ----------
    parser : ArgumentParser
    arguments : Namespace
    policy : callable, optional
        What the embedded engine says, in place of small talk.
    seed : int, optional
        Of the embedded engine.

    Raises
    ------
    SystemExit
        Options are missing, or mean nothing to that engine.
    FormatError
        The model cannot be read.
    """
    from trajkit_shim.parsers import FORMS

    served = arguments.engine != "embedded"
    options = {"--engine-url": arguments.engine_url, "--model": arguments.model}
    for option, value in options.items():
        if served and value is None:
            parser.error(f"--engine {arguments.engine} needs {option}")
        if not served and value is not None:
            parser.error(f"{option} means nothing to the embedded engine")
    forms = (*FORMS, *_OUTSIDE)
    if arguments.tool_form not in (None, *forms):
        parser.error(f"--tool-form {arguments.tool_form} is none of {', '.join(forms)}")
    if arguments.tool_form == "sglang" and arguments.engine != "sglang":
        parser.error("--tool-form sglang means nothing to another engine than sglang")
    if arguments.check_prompts and arguments.engine != "sglang":
        parser.error("--check-prompts means nothing to another engine than sglang")
    if arguments.routed_experts and arguments.engine != "sglang":
        parser.error("--routed-experts means nothing to another engine than sglang")
    return _served(arguments) if served else _embedded(policy, seed)


def built_parser(
    arguments: argparse.Namespace, renderer: "ChatRenderer"
) -> "ReplyParser | None":
    """The parser of whole replies that ``--tool-form`` names, if it names one.

    Raises
    ------
    FormatError
        The tokenizer has no response template.
    ConnectionError
        The server has no parsers.
    """
    from trajkit_shim.engine import EngineError
    from trajkit_shim.reply_parsers import SchemaParser, SGLangParser

    if arguments.tool_form == "schema":
        try:
            return SchemaParser(renderer)
        except ValueError as error:
            raise FormatError(f"--tool-form schema: {error}") from error
    if arguments.tool_form != "sglang":
        return None

    async def ask() -> None:
        parser = SGLangParser(arguments.engine_url)
        try:
            await parser.names()
        except EngineError as error:
            raise ConnectionError(f"--tool-form sglang: {error}") from error
        finally:
            await parser.close()

    # connections belong to the event loop that opened them
    asyncio.run(ask())
    return SGLangParser(arguments.engine_url)


def _embedded(
    policy: "Policy | None", seed: int | None
) -> "tuple[Engine, ChatRenderer]":
    from trajkit_shim.embedded import EmbeddedEngine, converse, load_tokenizer
    from trajkit_shim.render import ChatRenderer

    engine = EmbeddedEngine(policy or converse, seed=seed)
    return engine, ChatRenderer(load_tokenizer())


def _served(arguments: argparse.Namespace) -> "tuple[Engine, ChatRenderer]":
    """The engine of a server that was found to give what is recorded."""
    from trajkit_shim.experts import experts_per_token
    from trajkit_shim.probe import probe
    from trajkit_shim.render import load_renderer
    from trajkit_shim.sglang_engine import SGLangEngine, model_vocab_size
    from trajkit_shim.vllm_engine import VLLMEngine

    try:
        renderer = load_renderer(arguments.model)
        vocab_size = model_vocab_size(arguments.model)
        per_token = None
        if arguments.routed_experts:
            per_token = experts_per_token(arguments.model)
    except ValueError as error:
        raise FormatError(f"{arguments.model}: {error}") from error

    def engine() -> "Engine":
        if arguments.engine == "vllm":
            return VLLMEngine(arguments.engine_url, vocab_size=vocab_size)
        return SGLangEngine(
            arguments.engine_url,
            vocab_size=vocab_size,
            check_prompts=arguments.check_prompts,
            experts_per_token=per_token,
        )

    # connections belong to the event loop that opened them
    asyncio.run(probe(engine()))
    return engine(), renderer


@contextmanager
def needs_extra(parser: argparse.ArgumentParser, extra: str) -> Iterator[None]:
    """End the run with one line where an import inside finds a package missing."""
    # transformers tells whoever imports it that there is no torch; none is needed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "trajkit").partition(".")[0]
        if missing in {"trajkit", "trajkit_shim"}:
            raise
        parser.exit(
            BAD_USAGE,
            f"{parser.prog}: {missing} is not installed: "
            f"pip install 'trajkit[{extra}]'\n",
        )
