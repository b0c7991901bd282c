"""Command-line options that choose an engine, and the gateway's app with it.

The dependencies of an engine come with an extra, and are imported when a command runs.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

from trajkit.cli import BAD_USAGE
from trajkit.cli.options import add_options
from trajkit.errors import FormatError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from trajkit_shim.engines.base import Engine
    from trajkit_shim.engines.embedded import Policy
    from trajkit_shim.prompting.render import ChatRenderer
    from trajkit_shim.replies.parse import ReplyParser

ADMIN_TOKEN = "TRAJKIT_ADMIN_TOKEN"
"""Environment variable of the admin token."""

# maximum length of a request with images
_IMAGE_BODY = 64 << 20
# values of --tool-form that select an external parser
_OUTSIDE = ("sglang", "schema")
_INSTALLED = "sglang:"


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose an engine; `engine_app` reads them."""
    add_options(
        parser,
        f"""
--engine {{embedded,sglang,vllm}}  embedded: a small scripted engine, for trying things out
    (the default)
--engine-url URL...  of the server (not for embedded); repeat it for several servers of one
    model: each session stays on one of them
--launch MODEL  start an SGLang server of this model directory, and end it with the command.
    Arguments after -- are the server's. Its log is RUN/engine.log
--launch-python FILE  the Python that SGLang is installed for (default: the one of this
    command)
--launch-seconds SECONDS 1800  how long the server may take to start (default: %(default)s)
--launch-restarts N 3  how often the server is restarted within an hour if it ends (default:
    %(default)s)
--check-prompts  render every conversation completely, also where only new messages are
    needed; have the server return each prompt, and fail a call whose prompt differs
--routed-experts  log which experts each token was routed to; needs a server with
    --enable-return-routed-experts
--sampling-masks  log the ids that could have been drawn for each token; vLLM needs
    --return-sampling-mask, and top_k in every session
--train-side-calls  train the calls that a known agent makes for itself too, such as
    compactions and titles
--skip-retried  turns whose delivered reply is asked for again, by a request that is not
    marked as a retry, are context only
--model DIR  the model's config, tokenizer and chat template (not for embedded)
--tool-form NAME  how the model writes tool calls: hermes, qwen3-coder, glm or plain-json
    (default: detected from its chat template); sglang: that server's own parsers;
    sglang:CALLS,REASONING: the parsers of an installed SGLang by their names, of which one
    may be empty; schema: the tokenizer's response template
--images {{auto,refuse,omit}}  auto: accept images if the model takes them (only with
    SGLang), else reject requests with images (the default); refuse: reject them; omit:
    replace each image by a text
--fetch-images  fetch images that requests name by a URL, from public hosts
--image-bytes N {8 << 20}  maximum size of one image (default: %(default)s)
--images-per-prompt N 100  maximum number of images (default: %(default)s)
""",
    )
    parse = parser.parse_known_args

    def parse_known_args(
        args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        # argparse cannot tell them from positional arguments
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        parsed, unknown = parse(words[:end], namespace)
        parsed.server_arguments = words[end + 1 :]
        return parsed, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[assignment,method-assign]


@contextmanager
def engine_app(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    out: Path,
    log: Mapping[str, Any],
    *,
    policy: "Policy | None" = None,
    seed: int | None = None,
    **options: Any,
) -> "Iterator[tuple[ASGIApp, ChatRenderer]]":
    """Yield a gateway's app with the chosen engine, and its model's renderer.

    ``out``: directory of the turn log. ``log``, ``options``: further arguments of
    `TurnLog` and `Options`. A server that ``arguments`` launch runs while the ``with``
    block runs. ``policy`` and ``seed`` are for the embedded engine. Raises
    `FormatError`: the model cannot be read. `ConnectionError`: the engine does not work.
    """
    from trajkit_shim.app import create_app
    from trajkit_shim.call import Options
    from trajkit_shim.sessions.turn_log import TurnLog

    _check(parser, arguments)
    images = _image_options(arguments)
    with ExitStack() as stack:
        if arguments.engine != "embedded":
            engine, renderer = _served(arguments, stack)
        else:
            from trajkit_shim.engines import embedded
            from trajkit_shim.prompting.render import ChatRenderer

            engine = embedded.EmbeddedEngine(policy or embedded.converse, seed=seed)
            renderer = ChatRenderer(embedded.load_tokenizer())
        reply_parser = _reply_parser(arguments, renderer)
        payloads = {
            "routed_experts": arguments.routed_experts,
            "sampling_masks": arguments.sampling_masks,
        }
        app = create_app(
            engine,
            renderer,
            TurnLog(out, images="image_limits" in images, **payloads, **log),
            Options(
                check_prompts=arguments.check_prompts,
                train_side_calls=arguments.train_side_calls,
                train_retried=not arguments.skip_retried,
                reply_parser=reply_parser,
                **images,
                **options,
            ),
        )
        yield app, renderer


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with an error if options do not fit."""
    from trajkit_shim.engines.launch import check_arguments
    from trajkit_shim.replies.parsers import FORMS

    try:
        check_arguments(arguments.server_arguments)
    except ValueError as error:
        parser.error(f"argument after --: {error}")
    engine, url, model = arguments.engine, arguments.engine_url, arguments.model
    sglang, embedded = engine == "sglang", engine == "embedded"
    launch, given = arguments.launch, " ".join(arguments.server_arguments)
    form, forms = arguments.tool_form or "", (*FORMS, *_OUTSIDE)
    unknown = form and form not in forms and not form.startswith(_INSTALLED)
    no_setpriv = launch and which("setpriv") is None
    no_sglang = launch and not arguments.launch_python and find_spec("sglang") is None
    payloads = arguments.routed_experts or arguments.sampling_masks
    faults = {
        "--launch needs --engine sglang": launch and not sglang,
        "--tool-form sglang needs --engine sglang": form == "sglang" and not sglang,
        "--routed-experts and --sampling-masks need a server": payloads and embedded,
        "--engine-url does not apply to the embedded engine": embedded and url,
        "--model does not apply to the embedded engine": embedded and model,
        f"--engine {engine} needs --engine-url": not (embedded or url or launch),
        f"--engine {engine} needs --model": not (embedded or model or launch),
        f"--tool-form {form} is not one of {', '.join(forms)}": unknown,
        f"{given} after -- is for the server of --launch": given and not launch,
        "--launch starts a server of its own: leave out --engine-url": launch and url,
        "--launch needs setpriv (util-linux): install it, or use --engine-url": no_setpriv,
        "--launch needs --launch-python, or pip install 'trajkit[sglang]'": no_sglang,
    }
    for fault in faults:
        if faults[fault]:
            parser.error(fault)


def _image_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the app for images."""
    if arguments.images != "auto":
        return {"images": arguments.images}
    if arguments.engine != "sglang":
        return {}
    from trajkit_shim.chat.image_store import ImageLimits
    from trajkit_shim.prompting.image_places import load_image_model

    directory = arguments.model or arguments.launch
    try:
        model = load_image_model(directory)
    except (OSError, ValueError) as error:
        raise FormatError(f"{directory}: {error}") from error
    if model is None:
        return {}
    limits = ImageLimits(
        max_bytes=arguments.image_bytes,
        max_images=arguments.images_per_prompt,
        max_total_bytes=getattr(arguments, "log_bytes", None),
        fetch=arguments.fetch_images,
    )
    # a client sends the images of a conversation with every request
    return {"images": model, "image_limits": limits, "max_body_bytes": _IMAGE_BODY}


def _served(
    arguments: argparse.Namespace, stack: ExitStack
) -> "tuple[Engine, ChatRenderer]":
    """The engine of servers that return everything that is recorded."""
    from trajkit_shim.engines.checks import check_engine
    from trajkit_shim.engines.launch import running_server
    from trajkit_shim.engines.model_config import config_number, vocab_size
    from trajkit_shim.engines.sglang import SGLangEngine
    from trajkit_shim.engines.vllm import VLLMEngine
    from trajkit_shim.prompting.render import load_renderer

    model = arguments.model or arguments.launch
    try:
        renderer = load_renderer(model)
        n_vocab = vocab_size(model)
        per_token = None
        if arguments.routed_experts:
            per_token = config_number(model, "num_experts_per_tok")
    except ValueError as error:
        raise FormatError(f"{model}: {error}") from error

    engine: Callable[..., Engine] = partial(
        SGLangEngine if arguments.engine == "sglang" else VLLMEngine,
        vocab_size=n_vocab,
        check_prompts=arguments.check_prompts,
        experts_per_token=per_token,
        sampling_masks=arguments.sampling_masks,
    )
    if arguments.launch is not None:
        log = arguments.out / "engine.log"
        sys.stderr.write(f"trajkit: starting the engine's server; its log is {log}\n")
        experts = ["--enable-return-routed-experts"] if arguments.routed_experts else []
        launched = running_server(
            arguments.launch_python or sys.executable,
            arguments.launch,
            [*experts, *arguments.server_arguments],
            log,
            start_seconds=arguments.launch_seconds,
            restarts=arguments.launch_restarts,
        )
        arguments.engine_url = [stack.enter_context(launched)]
    # connections belong to the event loop that opened them
    served = {
        url: asyncio.run(check_engine(engine(url))) for url in arguments.engine_url
    }
    if len(set(served.values())) > 1:
        raise ConnectionError(f"the servers of --engine-url differ: {served}")
    return engine(*served), renderer


def _reply_parser(
    arguments: argparse.Namespace, renderer: "ChatRenderer"
) -> "ReplyParser | None":
    """The parser of replies that ``--tool-form`` names; None: it is not given."""
    from trajkit_shim.errors import EngineError
    from trajkit_shim.replies.external_parsers import (
        InstalledParser,
        SchemaParser,
        SGLangParser,
    )
    from trajkit_shim.replies.parse import FormParser
    from trajkit_shim.replies.parsers import FORMS

    form = arguments.tool_form or ""
    if form in FORMS:
        return FormParser(FORMS[form])
    try:
        if form == "schema":
            return SchemaParser(renderer)
        if form.startswith(_INSTALLED):
            names = form.removeprefix(_INSTALLED).partition(",")
            return InstalledParser(names[0] or None, names[2] or None)
    except (ModuleNotFoundError, ValueError) as error:
        raise FormatError(f"--tool-form {form}: {error}") from error
    if form != "sglang":
        return None
    url = arguments.engine_url[0]

    async def ask() -> None:
        parser = SGLangParser(url)
        try:
            await parser.names()
        except EngineError as error:
            raise ConnectionError(f"--tool-form sglang: {error}") from error
        finally:
            await parser.close()

    # connections belong to the event loop that opened them
    asyncio.run(ask())
    return SGLangParser(url)


@contextmanager
def terminable() -> Iterator[None]:
    """Treat SIGTERM as an interrupt, so that what runs for a command is ended."""

    # raises KeyboardInterrupt
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def needs_extra(parser: argparse.ArgumentParser, extra: str) -> Iterator[None]:
    """Exit with one line if an import in this context finds a package missing."""
    # otherwise transformers warns about missing PyTorch, which is not needed
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "trajkit").partition(".")[0]
        if missing.startswith("trajkit"):
            raise
        parser.exit(
            BAD_USAGE,
            f"{parser.prog}: {missing} is not installed: "
            f"pip install 'trajkit[{extra}]'\n",
        )
