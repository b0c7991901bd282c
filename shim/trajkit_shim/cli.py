"""The shim's command ``trajkit serve``.

Its dependencies come with an extra, and are imported when it runs.
"""

import errno
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from trajkit.errors import ArgumentError
from trajkit_shim import engine_options as options
from trajkit_shim.engine_options import ADMIN_TOKEN

if TYPE_CHECKING:
    import socket

    from trajkit_shim.workers import Place


def serve(
    *server_arguments: options.ServerArguments,
    out: Annotated[Path, Parameter(name=("--out", "-o"))],
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 8765,
    log: Literal["full", "delta"] = "full",
    prompts: Literal["append", "render"] = "append",
    no_attribution: bool = False,
    admin_token: str | None = None,
    allow_host: list[str] | None = None,
    fsync: bool = False,
    file_bytes: options.Count = 1 << 30,
    log_bytes: options.Count | None = None,
    workers: options.Count = 1,
    drain_seconds: float = 30,
    engine: options.EngineOptions | None = None,
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
    no_attribution
        Do not record which message each prompt token belongs to. A log in full form is then
        half as large, one in delta form about 8 % smaller.
    admin_token
        Token for requests to /sessions and /admin; required if --host can be reached from
        other machines. Prefer the environment variable TRAJKIT_ADMIN_TOKEN, which other
        users of this machine cannot see.
    allow_host
        Name that clients use for this machine, besides addresses and names of private
        networks; may be repeated.
    fsync
        Write each turn to disk (fsync) before it is answered.
    file_bytes
        Maximum size of one file of the log.
    log_bytes
        Maximum size of all turns; calls beyond it are rejected.
    workers
        Gateways in processes of their own, on ports from --port on. POST /sessions, at any
        of them, answers with the base_url of the one that owns the session.
    drain_seconds
        How long running calls may take after a stop signal; a second signal ends them at
        once.
    json
        Print the addresses as a JSON object.
    """
    given = {**locals(), **vars(engine or options.EngineOptions())}
    given["admin_token"] = admin_token or os.environ.get(ADMIN_TOKEN)
    given["allow_host"] = allow_host or []
    return _serve(SimpleNamespace(**given))


def _serve(arguments: SimpleNamespace) -> int:
    with options.needs_extra("shim"):
        from trajkit_shim.serve import is_loopback

    if not is_loopback(arguments.host) and not arguments.admin_token:
        reached = f"--host {arguments.host} can be reached from other machines"
        raise ArgumentError(f"{reached}: give --admin-token")
    # before an engine is launched, which takes minutes
    for log in arguments.out.glob("turns-*.arrows"):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(log))
    with options.terminable():
        run = _serve_workers if arguments.workers > 1 else _serve_one
        run(arguments)
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _serve_one(
    arguments: SimpleNamespace,
    listener: "socket.socket | None" = None,
    place: "Place | None" = None,
    say: Callable[[str], object] = _say,
) -> None:
    """Run a gateway until a stop signal. ``place``: it is one of several workers."""
    attributed, limit = not arguments.no_attribution, arguments.log_bytes
    log = {
        "form": arguments.log,
        "fsync": arguments.fsync,
        "max_file_bytes": arguments.file_bytes,
        "max_total_bytes": limit and limit // arguments.workers,
        "attributed": attributed,
        "worker": None if place is None else place.index,
    }
    gateway = options.engine_app(
        arguments,
        arguments.out,
        log,
        attributed=attributed,
        prompts=arguments.prompts,
        admin_token=arguments.admin_token or None,
        hosts=arguments.allow_host,
    )
    with ExitStack() as stack:
        with options.needs_extra("shim"):
            from trajkit_shim.call import Options
            from trajkit_shim.prompting.prompts import Prompts
            from trajkit_shim.serve import serve as run_server
            from trajkit_shim.workers import Worker

            app, renderer = stack.enter_context(gateway)

        def say_where(url: str) -> None:
            where = {"url": url, "openai_base_url": f"{url}/v1"}
            where["turns"] = str(arguments.out)
            if place is not None:
                where["workers"] = " ".join(place.urls)
            built = Prompts(renderer, arguments.prompts)
            if arguments.json:
                say(json.dumps({**where, "prompts": built.describe()}) + "\n")
                return
            where["prompts"] = built.summary()
            say("".join(f"{name:<16}{value}\n" for name, value in where.items()))

        # a stop signal ends the server, which has answered all running calls by then
        with suppress(KeyboardInterrupt):
            run_server(
                app if place is None else Worker(app, place, Options()),
                arguments.host,
                arguments.port,
                on_listening=say_where,
                drain_seconds=arguments.drain_seconds,
                listener=listener,
            )


def _serve_workers(arguments: SimpleNamespace) -> None:
    """Run several gateways, each in a process and on a port of its own."""
    options.check(arguments)
    with options.needs_extra("shim"):
        from trajkit_shim.serve import listen
        from trajkit_shim.workers import run_workers

    with ExitStack() as stack:
        sockets, urls = list[Any](), list[str]()
        for number in range(arguments.workers):
            # 0 is any free port
            port = arguments.port and arguments.port + number
            listener, url = listen(arguments.host, port)
            sockets.append(stack.enter_context(listener))
            urls.append(url)
        options.launch_server(arguments, stack)
        run_workers(partial(_work, arguments), sockets, urls, _say)


def _work(
    arguments: SimpleNamespace,
    listener: "socket.socket",
    place: "Place",
    ready: Callable[[str], None],
) -> None:
    """Run one of several gateways. The parent has checked the arguments."""
    with options.terminable():
        _serve_one(arguments, listener, place, ready)
