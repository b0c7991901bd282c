"""Command-line options that choose an engine, and the objects built from them.

The dependencies of an engine come with an extra, and are imported when a command runs.
"""

import argparse
import asyncio
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trajkit.cli import BAD_USAGE
from trajkit.cli.options import count
from trajkit.errors import FormatError

if TYPE_CHECKING:
    from trajkit_shim.engines.base import Engine
    from trajkit_shim.engines.embedded import Policy
    from trajkit_shim.prompting.render import ChatRenderer
    from trajkit_shim.replies.external_parsers import ReplyParser

ADMIN_TOKEN = "TRAJKIT_ADMIN_TOKEN"
"""Environment variable of the admin token."""

# values of --tool-form that select an external parser
_OUTSIDE = ("sglang", "schema")


# types of values by their names; others are text
_TYPES: dict[str, Callable[[str], object]] = {
    "N": count,
    "SECONDS": float,
    "RATE": float,
    "PORT": int,
    "SEED": int,
    "RUN": Path,
    "DIR": Path,
}


def add_options(
    parser: argparse.ArgumentParser,
    helps: Mapping[str, str],
    required: Collection[str] = (),
) -> None:
    """Add options, described by their names, the name of the value, and the default.

    ``--json`` is a flag, ``--repeat N 1`` has a default, ``--path FOLDER...`` may be
    repeated, and ``--log {full,delta}`` has choices, of which the first is the default.
    """
    for option, text in helps.items():
        words = option.split()
        names = [word for word in words if word.startswith("-")]
        value = "".join(words[len(names) :][:1])
        default = "".join(words[len(names) + 1 :]) or None
        more: dict[str, Any] = {"metavar": value, "type": _TYPES.get(value, str)}
        if not value:
            more = {"action": "store_true"}
        elif value.startswith("{"):
            choices = value.strip("{}").split(",")
            more = {"choices": choices, "default": choices[0]}
        elif value.endswith("..."):
            more = {"metavar": value[:-3], "action": "append", "default": []}
        elif not set(required).isdisjoint(names):
            more["required"] = True
        else:
            more["default"] = default
        parser.add_argument(*names, help=text, **more)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose an engine; `built_engine` reads them."""
    helps = {
        "--engine {embedded,sglang,vllm}": "embedded: a small scripted engine, for "
        "trying things out (the default)",
        "--engine-url URL": "of the server (not for embedded)",
        "--check-prompts": "have the SGLang server return each prompt, and fail a call "
        "whose prompt differs",
        "--routed-experts": "log which experts each token was routed to; needs an SGLang "
        "server with --enable-return-routed-experts",
        "--train-side-calls": "train the calls that a known agent makes for itself too, "
        "such as compactions and titles",
        "--skip-retried": "turns whose delivered reply is asked for again, by a request "
        "that is not marked as a retry, are context only",
        "--model DIR": "the model's config, tokenizer and chat template (not for "
        "embedded)",
        "--tool-form NAME": "how the model writes tool calls: hermes, qwen3-coder, glm "
        "or plain-json (default: detected from its chat template); sglang: that "
        "server's own parsers; schema: the tokenizer's response template",
    }
    add_options(parser, helps)


def built_engine(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    *,
    policy: "Policy | None" = None,
    seed: int | None = None,
) -> "tuple[Engine, ChatRenderer]":
    """Return the chosen engine, and the renderer of its model.

    ``policy`` and ``seed`` are for the embedded engine. Raises `SystemExit`: options
    are missing, or do not apply to that engine. `FormatError`: the model cannot be
    read.
    """
    from trajkit_shim.replies.parsers import FORMS

    served = arguments.engine != "embedded"
    options = {"--engine-url": arguments.engine_url, "--model": arguments.model}
    for option, value in options.items():
        if served and value is None:
            parser.error(f"--engine {arguments.engine} needs {option}")
        if not served and value is not None:
            parser.error(f"{option} does not apply to the embedded engine")
    forms = (*FORMS, *_OUTSIDE)
    if arguments.tool_form not in (None, *forms):
        known = ", ".join(forms)
        parser.error(f"--tool-form {arguments.tool_form} is not one of {known}")
    for option, given in (
        ("--tool-form sglang", arguments.tool_form == "sglang"),
        ("--check-prompts", arguments.check_prompts),
        ("--routed-experts", arguments.routed_experts),
    ):
        if given and arguments.engine != "sglang":
            parser.error(f"{option} needs --engine sglang")
    return _served(arguments) if served else _embedded(policy, seed)


def built_parser(
    arguments: argparse.Namespace, renderer: "ChatRenderer"
) -> "ReplyParser | None":
    """Return the external parser of replies that ``--tool-form`` names, if any.

    Raises `FormatError`: the tokenizer has no response template. `ConnectionError`: the
    server has no parsers.
    """
    from trajkit_shim.errors import EngineError
    from trajkit_shim.replies.external_parsers import SchemaParser, SGLangParser

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
    from trajkit_shim.engines.embedded import EmbeddedEngine, converse, load_tokenizer
    from trajkit_shim.prompting.render import ChatRenderer

    engine = EmbeddedEngine(policy or converse, seed=seed)
    return engine, ChatRenderer(load_tokenizer())


def _served(arguments: argparse.Namespace) -> "tuple[Engine, ChatRenderer]":
    """The engine of a server that returns everything that is recorded."""
    from trajkit_shim.engines.checks import check_engine
    from trajkit_shim.engines.model_config import vocab_size
    from trajkit_shim.engines.routed_experts import experts_per_token
    from trajkit_shim.engines.sglang import SGLangEngine
    from trajkit_shim.engines.vllm import VLLMEngine
    from trajkit_shim.prompting.render import load_renderer

    try:
        renderer = load_renderer(arguments.model)
        n_vocab = vocab_size(arguments.model)
        per_token = None
        if arguments.routed_experts:
            per_token = experts_per_token(arguments.model)
    except ValueError as error:
        raise FormatError(f"{arguments.model}: {error}") from error

    def engine() -> "Engine":
        if arguments.engine == "vllm":
            return VLLMEngine(arguments.engine_url, vocab_size=n_vocab)
        return SGLangEngine(
            arguments.engine_url,
            vocab_size=n_vocab,
            check_prompts=arguments.check_prompts,
            experts_per_token=per_token,
        )

    # connections belong to the event loop that opened them
    asyncio.run(check_engine(engine()))
    return engine(), renderer


@contextmanager
def needs_extra(parser: argparse.ArgumentParser, extra: str) -> Iterator[None]:
    """Exit with one line if an import in this context finds a package missing."""
    # otherwise transformers warns about missing PyTorch, which is not needed
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
