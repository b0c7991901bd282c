"""The shim's command ``trajkit serve``, and the options of commands that have a gateway.

Dependencies come with an extra, and are imported when a command runs.
"""

import asyncio
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
    import socket

    from starlette.applications import Starlette
    from starlette.types import ASGIApp

    from trajkit_shim.engines.base import Engine
    from trajkit_shim.engines.embedded import Policy
    from trajkit_shim.replies import ReplyParser

Count = Annotated[int, Parameter(validator=Number(gte=1))]
"""A number of at least one."""

ServerArguments = Annotated[str, Parameter(show=False)]
"""Arguments after ``--``: those of the server of ``--launch``."""

ADMIN_TOKEN = "TRAJKIT_ADMIN_TOKEN"
"""Environment variable of the admin token."""

# values of --parser besides the gateway's own: see the option
_ENGINE, _NONE = "engine", "none"
# options that the embedded engine does not have
_SERVED = "engine_url model chat_template stop_token trust_remote_code check_prompts"


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
    check_prompts
        Have the server return each prompt, and fail a call whose prompt differs.
    routed_experts
        Log which experts each token was routed to; needs a server with
        --enable-return-routed-experts.
    sampling_masks
        Log the ids that could have been drawn for each token; vLLM needs
        --return-sampling-mask, and top_k in every session.
    attribution
        Log which message each prompt token belongs to, as learning from tool output needs.
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
        toolcall, phi, hermes, gemma, function-gemma, lfm, pythonic or plain-json; engine:
        the parsers of the SGLang server; none: calls stay text.
    images
        auto: accept images if the model takes them (only with SGLang), else reject requests
        with images; refuse: reject them.
    """

    engine: Literal["embedded", "sglang", "vllm"] = "embedded"
    engine_url: list[str] | None = None
    launch: str | None = None
    launch_python: str | None = None
    check_prompts: bool = False
    routed_experts: bool = False
    sampling_masks: bool = False
    attribution: bool = False
    train_side_calls: bool = False
    model: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: str | None = None
    stop_token: list[str] | None = None
    late_system: Literal["user", "refuse"] = "user"
    past_reasoning: Literal["auto", "sampled", "template"] = "auto"
    trust_remote_code: bool = False
    parser: Annotated[str | None, Parameter(name=("--parser", "--tool-form"))] = None
    images: Literal["auto", "refuse"] = "auto"


# The command


def serve(
    *server_arguments: ServerArguments,
    out: Annotated[Path, Parameter(name=("--out", "-o"))],
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 8765,
    log: Literal["full", "delta"] = "full",
    prompts: Literal["append", "render"] = "append",
    admin_token: str | None = None,
    allow_host: list[str] | None = None,
    fsync: bool = False,
    workers: Count = 1,
    drain_seconds: float = 30,
    engine: EngineOptions | None = None,
    json: bool = False,
) -> int:
    """Record the model calls of an unmodified agent.

    Run a gateway that speaks OpenAI Chat Completions and Responses, Anthropic Messages and
    Gemini generateContent, samples from an inference engine in token ids, and writes every
    call to the run's turn log before it is answered. POST /sessions opens a session and
    returns its API key.

    Parameters
    ----------
    out
        Directory of the turn log; made if missing.
    host
        The address to listen at.
    port
        0: any free one.
    log
        delta: store only what each prompt adds to an earlier turn.
    prompts
        append: extend the token ids of an earlier turn if the chat template permits;
        render: render every prompt from its messages.
    admin_token
        Token for requests to /sessions and /engine; required if --host can be reached from
        other machines. Prefer the environment variable TRAJKIT_ADMIN_TOKEN, which other
        users of this machine cannot see.
    allow_host
        Name that clients use for this machine, besides addresses and names of private
        networks; may be repeated.
    fsync
        Write each turn to disk (fsync) before it is answered.
    workers
        Gateways in processes of their own, on ports from --port on. POST /sessions, at any
        of them, answers with the base_url of the one that owns the session.
    drain_seconds
        How long running calls may take after a stop signal; a second signal ends them at
        once.
    json
        Print the addresses as a JSON object.
    """
    given = SimpleNamespace(**{**locals(), **vars(engine or EngineOptions())})
    given.admin_token = admin_token or os.environ.get(ADMIN_TOKEN)
    with needs_extra("shim"):
        import_module("trajkit_shim.app")
        check(given)
        from trajkit_shim.serve import is_loopback, listen
        from trajkit_shim.sessions.turn_log import USED
        from trajkit_shim.workers import run_workers
    if not is_loopback(host) and not given.admin_token:
        reached = f"--host {host} can be reached from other machines"
        raise ArgumentError(f"{reached}: give --admin-token")
    # before an engine is launched, which takes minutes
    for old in out.glob("turns-*.arrows"):
        raise FileExistsError(errno.EEXIST, USED, str(old))
    with terminable(), ExitStack() as stack:
        # 0 is any free port
        ports = [port and port + number for number in range(workers)]
        sockets = [stack.enter_context(listen(host, each)) for each in ports]
        if workers == 1:
            _work(given, sockets[0])
        else:
            launch_server(given, stack)
            run_workers(partial(_work, given), sockets, _say)
    return 0


_say = partial(print, end="", flush=True)


def _work(
    arguments: SimpleNamespace,
    listener: "socket.socket",
    say: Callable[[str], object] = _say,
    worker: int | None = None,
    urls: Sequence[str] = (),
) -> None:
    """Run a gateway until a stop signal; one of several workers has a number."""
    from trajkit_shim.serve import serve as run_server
    from trajkit_shim.serve import url_of
    from trajkit_shim.workers import Worker

    token = arguments.admin_token or None
    log = {"form": arguments.log, "fsync": arguments.fsync, "worker": worker}
    made = engine_app(
        arguments,
        arguments.out,
        log,
        prompts=arguments.prompts,
        admin_token=token,
        hosts=arguments.allow_host or [],
    )
    with terminable(), made as gateway:
        app: ASGIApp = gateway
        where: dict[str, Any] = {"url": url_of(listener)}
        where |= {"openai_base_url": f"{where['url']}/v1", "turns": str(arguments.out)}
        if worker is not None:
            where["workers"] = " ".join(urls)
            app = Worker(app, worker, urls, token)
        prompts = gateway.state.prompts.describe()
        if arguments.json:
            say(json.dumps({**where, "prompts": prompts}) + "\n")
        else:
            where |= {"prompts": prompts.pop("mode"), **prompts}
            shown = {name: value for name, value in where.items() if value}
            say("".join(f"{name:<20}{value}\n" for name, value in shown.items()))
        # a stop signal ends the server, which has answered all running calls by then
        with suppress(KeyboardInterrupt):
            run_server(app, listener, arguments.drain_seconds)


# The gateway of a command


@contextmanager
def engine_app(
    arguments: SimpleNamespace,
    out: Path,
    log: Mapping[str, Any],
    *,
    policy: "Policy | None" = None,
    seed: int | None = None,
    **options: Any,
) -> "Iterator[Starlette]":
    """Yield a gateway's app with the chosen engine.

    The ``arguments`` have passed `check`; a server that they launch runs while the
    ``with`` block runs. ``out``: directory of the turn log. ``log``, ``options``: further
    arguments of `TurnLog` and `Options`. ``policy`` and ``seed`` are for the embedded
    engine. Raises `FormatError`: the model cannot be read. `ConnectionError`: the engine
    does not work.
    """
    from trajkit_shim.app import create_app
    from trajkit_shim.call import Options
    from trajkit_shim.engines import embedded
    from trajkit_shim.prompting.render import embedded_renderer, load_renderer
    from trajkit_shim.replies import parser_of, tags_of
    from trajkit_shim.sessions.turn_log import TurnLog

    model, name = arguments.model or arguments.launch, arguments.parser
    template = arguments.chat_template
    options["variables"] = _variables(arguments.chat_template_kwargs)
    engine: Engine = embedded.EmbeddedEngine(policy or embedded.converse, seed=seed)
    renderer, has_server = embedded_renderer(), arguments.engine != "embedded"
    with ExitStack() as stack:
        # all that depends on the model, before an engine is launched, which takes minutes
        try:
            if has_server:
                renderer = load_renderer(
                    model,
                    None if template is None else Path(template).read_text("utf-8"),
                    stop_tokens=arguments.stop_token or (),
                    trust_remote_code=arguments.trust_remote_code,
                    late_system=arguments.late_system,
                )
                make_engine = _engine_of(arguments, model)
            if name != _ENGINE:
                options["reply_parser"] = parser_of(renderer, name)
            options |= _image_options(arguments)
        except ArgumentError:
            raise
        except ValueError as error:
            raise FormatError(f"{model}: {error}") from error
        if has_server:
            launch_server(arguments, stack)
            engine = _checked(make_engine, arguments.engine_url)
        if name == _ENGINE:
            options["reply_parser"] = asyncio.run(_own_parser(arguments.engine_url[0]))
            options["reply_parser"].tags = tags_of(renderer)
        payloads = {n: vars(arguments)[n] for n in ("routed_experts", "sampling_masks")}
        columns = {"attributed": arguments.attribution, **payloads}
        turn_log = TurnLog(out, images="images" in options, **columns, **log)
        options["past"] = arguments.past_reasoning
        options["train_side_calls"] = arguments.train_side_calls
        yield create_app(engine, renderer, turn_log, Options(**options))


def _engine_of(arguments: SimpleNamespace, model: str) -> "Callable[..., Engine]":
    """What makes the engine of some servers; raises `ValueError`."""
    from trajkit_shim.engines import http
    from trajkit_shim.engines.model_config import config_number

    classes = {"vllm": http.VLLMEngine, "sglang": http.SGLangEngine}
    per_token = "num_experts_per_tok"
    experts = config_number(model, per_token) if arguments.routed_experts else None
    return partial(
        classes[arguments.engine],
        vocab_size=config_number(model, "vocab_size"),
        check_prompts=arguments.check_prompts,
        experts_per_token=experts,
        sampling_masks=arguments.sampling_masks,
    )


def _checked(make_engine: "Callable[..., Engine]", urls: Sequence[str]) -> "Engine":
    """The engine of these servers, each of which was tried; raises `ConnectionError`."""
    from trajkit_shim.engines.checks import check_engine

    # connections belong to the event loop that opened them
    served = {url: asyncio.run(check_engine(make_engine(url))) for url in urls}
    if len(set(served.values())) > 1:
        raise ConnectionError(f"the servers of --engine-url differ: {served}")
    return make_engine(*served)


def check(arguments: SimpleNamespace) -> None:
    """Raise `ArgumentError` if options do not fit."""
    from trajkit_shim.replies import FORMS

    engine, url, model = arguments.engine, arguments.engine_url, arguments.model
    sglang, embedded = engine == "sglang", engine == "embedded"
    launch, given = arguments.launch, " ".join(arguments.server_arguments)
    form, forms = arguments.parser or "", (*FORMS, _ENGINE, _NONE)
    no_sglang = launch and not arguments.launch_python and find_spec("sglang") is None
    payloads = arguments.routed_experts or arguments.sampling_masks
    names = (name for name in _SERVED.split() if vars(arguments)[name])
    unused = " --".join(names).replace("_", "-")
    faults = {
        "--launch needs --engine sglang": launch and not sglang,
        f"--parser {form} needs --engine sglang": form == _ENGINE and not sglang,
        "--routed-experts and --sampling-masks need a server": payloads and embedded,
        f"the embedded engine does not take --{unused}": embedded and unused,
        f"--engine {engine} needs --engine-url": not (embedded or url or launch),
        f"--engine {engine} needs --model": not (embedded or model or launch),
        f"--parser {form} is not one of {', '.join(forms)}": form not in ("", *forms),
        f"{given} after -- is for the server of --launch": given and not launch,
        "--launch starts a server of its own: leave out --engine-url": launch and url,
        "--launch needs --launch-python, or pip install 'trajkit[sglang]'": no_sglang,
    }
    for fault, present in faults.items():
        if present:
            raise ArgumentError(fault)


def _image_options(arguments: SimpleNamespace) -> dict[str, Any]:
    """The options of the app for images."""
    if arguments.images != "auto" or arguments.engine != "sglang":
        return {}
    from trajkit_shim.chat.images import load_image_model

    with needs_extra("images"):
        model = load_image_model(arguments.model or arguments.launch)
        if model is None:
            return {}
        import_module("PIL")
    # a client sends the images of a conversation with every request
    return {"images": model, "max_body_bytes": 64 << 20}


def launch_server(arguments: SimpleNamespace, stack: ExitStack) -> None:
    """Start the server of ``--launch``, if it is given; it ends with the stack.

    The arguments then name it by its address.
    """
    if arguments.launch is None:
        return
    from trajkit_shim.engines.launch import running_server, sglang_server

    log, python = arguments.out / "engine.log", arguments.launch_python
    sys.stderr.write(f"trajkit: starting the engine's server; its log is {log}\n")
    experts = ["--enable-return-routed-experts"] * arguments.routed_experts
    given = [*experts, *arguments.server_arguments]
    command = sglang_server(python or sys.executable, arguments.launch, given)
    server = running_server(*command, log)
    arguments.engine_url = [stack.enter_context(server)]
    arguments.model = arguments.model or arguments.launch
    arguments.launch, arguments.server_arguments = None, []


def _variables(given: str | None) -> dict[str, Any]:
    """The value of ``--chat-template-kwargs``."""
    try:
        variables = json.loads(given or "{}")
        fault = "not a JSON object"
    except ValueError as error:
        variables, fault = None, f"not JSON: {error}"
    if not isinstance(variables, dict):
        raise ArgumentError(f"--chat-template-kwargs {given}: {fault}")
    return variables


async def _own_parser(url: str) -> "ReplyParser":
    """The parsers of the engine's server; raises `ConnectionError` if it has none."""
    from trajkit_shim.engines.http import EngineClient
    from trajkit_shim.errors import EngineError
    from trajkit_shim.replies import SGLangParser

    where, server = f"--parser {_ENGINE}", EngineClient("SGLang", url)
    try:
        info = await server.get("/server_info")
    except EngineError as error:
        raise ConnectionError(f"{where}: {error}") from error
    finally:
        await server.close()
    names = info.get("tool_call_parser"), info.get("reasoning_parser")
    if not any(names):
        rule = "started with neither --tool-call-parser nor --reasoning-parser"
        raise ConnectionError(f"{where}: the SGLang server at {url} was {rule}")
    return SGLangParser(url, *names)


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
        rule = f"is not installed: pip install 'trajkit[{extra}]'"
        raise ArgumentError(f"{missing} {rule}") from None
