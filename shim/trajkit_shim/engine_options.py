"""Command-line options that choose an engine, and the gateway's app with it.

The dependencies of an engine come with an extra, and are imported when a command runs.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from trajkit.errors import ArgumentError, FormatError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from trajkit_shim.engines.base import Engine
    from trajkit_shim.engines.embedded import Policy
    from trajkit_shim.prompting.render import ChatRenderer
    from trajkit_shim.replies import ReplyParser

Count = Annotated[int, Parameter(validator=Number(gte=1))]
"""A number of at least one."""

ADMIN_TOKEN = "TRAJKIT_ADMIN_TOKEN"
"""Environment variable of the admin token."""

# values of --parser besides the gateway's own: see the option
_ENGINE, _NONE = "engine", "none"


@Parameter(name="*")
@dataclass(kw_only=True)
class EngineOptions:
    """The options that choose an engine; `engine_app` reads them.

    Attributes
    ----------
    engine
        embedded: a small scripted engine, for trying things out.
    engine_url
        URL of the server (not for embedded); repeat it for several servers of one model:
        each session stays on one of them.
    launch
        Start an SGLang server of this model directory, and end it with the command.
        Arguments after -- are the server's. Its log is RUN/engine.log.
    launch_python
        The Python that SGLang is installed for (default: the one of this command).
    launch_seconds
        How long the server may take to start.
    check_prompts
        Have the server return each prompt, and fail a call whose prompt differs.
    routed_experts
        Log which experts each token was routed to; needs a server with
        --enable-return-routed-experts.
    sampling_masks
        Log the ids that could have been drawn for each token; vLLM needs
        --return-sampling-mask, and top_k in every session.
    train_side_calls
        Train the calls that a known agent makes for itself too, such as compactions and
        titles.
    model
        Directory of the model's config, tokenizer and chat template (not for embedded).
    chat_template
        A file to use instead of the model's own.
    chat_template_kwargs
        Variables of the chat template as JSON, such as '{"enable_thinking": false}'; a
        session or a request may set others.
    stop_token
        Also ends a reply, besides those that the tokenizer, generation_config.json and
        config.json name; may be repeated.
    late_system
        A system message after others, where the chat template refuses it: user: show it as
        a reminder by the user; refuse: reject the request.
    past_reasoning
        Replies that the chat template would rewrite, as by leaving out reasoning: auto:
        they stay as sampled after tool results, and the template decides at a user's
        message; sampled: they stay; template: the template decides always.
    trust_remote_code
        Run the Python code of the model directory to load its tokenizer.
    parser
        How the model writes tool calls (default: known from its chat template): gpt-oss,
        kimi, dsml, deepseek, minimax, seed-oss, qwen3-coder, glm, mistral-args, mistral,
        toolcall, phi, hermes, pythonic or plain-json; engine: the parsers of the SGLang
        server; none: calls stay text.
    images
        auto: accept images if the model takes them (only with SGLang), else reject requests
        with images; refuse: reject them; omit: replace each image by a text.
    """

    engine: Literal["embedded", "sglang", "vllm"] = "embedded"
    engine_url: list[str] | None = None
    launch: str | None = None
    launch_python: str | None = None
    launch_seconds: float = 1800
    check_prompts: bool = False
    routed_experts: bool = False
    sampling_masks: bool = False
    train_side_calls: bool = False
    model: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: str | None = None
    stop_token: list[str] | None = None
    late_system: Literal["user", "refuse"] = "user"
    past_reasoning: Literal["auto", "sampled", "template"] = "auto"
    trust_remote_code: bool = False
    parser: Annotated[str | None, Parameter(name=("--parser", "--tool-form"))] = None
    images: Literal["auto", "refuse", "omit"] = "auto"


ServerArguments = Annotated[str, Parameter(show=False)]
"""Arguments after ``--``: those of the server of ``--launch``."""


@contextmanager
def engine_app(
    arguments: SimpleNamespace,
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
    from trajkit_shim.engines import embedded
    from trajkit_shim.prompting.render import embedded_renderer, load_renderer
    from trajkit_shim.replies import FORMS, FormParser, ReplyParser, form_of, tags_of
    from trajkit_shim.sessions.turn_log import TurnLog

    check(arguments)
    images, name = _image_options(arguments), arguments.parser
    template, served = arguments.chat_template, arguments.engine != "embedded"
    reply_parser: ReplyParser | None = None
    with ExitStack() as stack:
        # all that depends on the model, before an engine is launched, which takes minutes
        with _reading(arguments):
            renderer = embedded_renderer()
            if served:
                renderer = load_renderer(
                    arguments.model or arguments.launch,
                    None if template is None else Path(template).read_text("utf-8"),
                    stop_tokens=arguments.stop_token or (),
                    trust_remote_code=arguments.trust_remote_code,
                    late_system=arguments.late_system,
                )
            if name != _ENGINE:
                form = form_of(renderer) if name is None else FORMS.get(name)
                reply_parser = FormParser(form, tags_of(renderer.chat_template))
        engine: Engine
        if served:
            engine = _served(arguments, stack)
        else:
            engine = embedded.EmbeddedEngine(policy or embedded.converse, seed=seed)
        payloads = {
            "routed_experts": arguments.routed_experts,
            "sampling_masks": arguments.sampling_masks,
        }
        app = create_app(
            engine,
            renderer,
            TurnLog(out, images="image_limits" in images, **payloads, **log),
            Options(
                past=arguments.past_reasoning,
                variables=_variables(arguments.chat_template_kwargs),
                train_side_calls=arguments.train_side_calls,
                reply_parser=reply_parser or _engine_parser(arguments.engine_url[0]),
                **images,
                **options,
            ),
        )
        yield app, renderer


def check(arguments: SimpleNamespace) -> None:
    """Raise `ArgumentError` if options do not fit."""
    from trajkit_shim.replies import FORMS

    engine, url, model = arguments.engine, arguments.engine_url, arguments.model
    sglang, embedded = engine == "sglang", engine == "embedded"
    launch, given = arguments.launch, " ".join(arguments.server_arguments)
    form, forms = arguments.parser or "", (*FORMS, _ENGINE, _NONE)
    unknown = form and form not in forms
    no_sglang = launch and not arguments.launch_python and find_spec("sglang") is None
    payloads = arguments.routed_experts or arguments.sampling_masks
    faults = {
        "--launch needs --engine sglang": launch and not sglang,
        f"--parser {form} needs --engine sglang": form == _ENGINE and not sglang,
        "--routed-experts and --sampling-masks need a server": payloads and embedded,
        "--engine-url does not apply to the embedded engine": embedded and url,
        "--model does not apply to the embedded engine": embedded and model,
        f"--engine {engine} needs --engine-url": not (embedded or url or launch),
        f"--engine {engine} needs --model": not (embedded or model or launch),
        f"--parser {form} is not one of {', '.join(forms)}": unknown,
        f"{given} after -- is for the server of --launch": given and not launch,
        "--launch starts a server of its own: leave out --engine-url": launch and url,
        "--launch needs --launch-python, or pip install 'trajkit[sglang]'": no_sglang,
    }
    for fault in faults:
        if faults[fault]:
            raise ArgumentError(fault)


def _image_options(arguments: SimpleNamespace) -> dict[str, Any]:
    """The options of the app for images."""
    if arguments.images != "auto":
        return {"images": arguments.images}
    if arguments.engine != "sglang":
        return {}
    from trajkit_shim.chat.images import ImageLimits, load_image_model

    directory = arguments.model or arguments.launch
    with needs_extra("images"):
        try:
            model = load_image_model(directory)
        except (OSError, ValueError) as error:
            raise FormatError(f"{directory}: {error}") from error
        if model is None:
            return {}
        import_module("PIL")
    limits = ImageLimits(max_total_bytes=getattr(arguments, "log_bytes", None))
    # a client sends the images of a conversation with every request
    return {"images": model, "image_limits": limits, "max_body_bytes": 64 << 20}


def launch_server(arguments: SimpleNamespace, stack: ExitStack) -> None:
    """Start the server of ``--launch``, if it is given; it ends with the stack.

    The arguments then name it by its address.
    """
    if arguments.launch is None:
        return
    from trajkit_shim.engines.launch import running_server, sglang_server

    log, python = arguments.out / "engine.log", arguments.launch_python
    sys.stderr.write(f"trajkit: starting the engine's server; its log is {log}\n")
    experts = ["--enable-return-routed-experts"] if arguments.routed_experts else []
    given = [*experts, *arguments.server_arguments]
    command = sglang_server(python or sys.executable, arguments.launch, given)
    server = running_server(*command, log, start_seconds=arguments.launch_seconds)
    arguments.engine_url = [stack.enter_context(server)]
    arguments.model = arguments.model or arguments.launch
    arguments.launch, arguments.server_arguments = None, []


def _served(arguments: SimpleNamespace, stack: ExitStack) -> "Engine":
    """The engine of servers that return everything that is recorded."""
    from trajkit_shim.engines.checks import check_engine
    from trajkit_shim.engines.http import SGLangEngine, VLLMEngine
    from trajkit_shim.engines.model_config import config_number, vocab_size

    launch_server(arguments, stack)
    model, per_token = arguments.model, None
    with _reading(arguments):
        n_vocab = vocab_size(model)
        if arguments.routed_experts:
            per_token = config_number(model, "num_experts_per_tok")
    engine = partial(
        {"sglang": SGLangEngine, "vllm": VLLMEngine}[arguments.engine],
        vocab_size=n_vocab,
        check_prompts=arguments.check_prompts,
        experts_per_token=per_token,
        sampling_masks=arguments.sampling_masks,
    )
    # connections belong to the event loop that opened them
    urls = arguments.engine_url
    served = {url: asyncio.run(check_engine(engine(url))) for url in urls}
    if len(set(served.values())) > 1:
        raise ConnectionError(f"the servers of --engine-url differ: {served}")
    return engine(*served)


def _variables(given: str | None) -> dict[str, Any]:
    """The value of ``--chat-template-kwargs``."""
    try:
        variables = json.loads(given or "{}")
    except ValueError as error:
        fault = f"not JSON: {error}"
    else:
        if isinstance(variables, dict):
            return variables
        fault = "not a JSON object"
    raise ArgumentError(f"--chat-template-kwargs {given}: {fault}")


def _engine_parser(url: str) -> "ReplyParser":
    """The parsers of the engine's server; raises `ConnectionError` if it has none."""
    from trajkit_shim.errors import EngineError
    from trajkit_shim.replies import SGLangParser

    async def ask() -> None:
        parser = SGLangParser(url)
        try:
            await parser.names()
        except EngineError as error:
            raise ConnectionError(f"--parser {_ENGINE}: {error}") from error
        finally:
            await parser.close()

    # connections belong to the event loop that opened them
    asyncio.run(ask())
    return SGLangParser(url)


@contextmanager
def _reading(arguments: SimpleNamespace) -> Iterator[None]:
    """Read files of the model; raises `FormatError` if they cannot be used."""
    try:
        yield
    except ValueError as error:
        model = arguments.model or arguments.launch
        raise FormatError(f"{model}: {error}") from error


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
def needs_extra(extra: str) -> Iterator[None]:
    """Raise `ArgumentError` if an import in this context finds a package missing."""
    # otherwise transformers warns about missing PyTorch, which is not needed
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "trajkit").partition(".")[0]
        if missing.startswith("trajkit"):
            raise
        raise ArgumentError(
            f"{missing} is not installed: pip install 'trajkit[{extra}]'"
        ) from None
