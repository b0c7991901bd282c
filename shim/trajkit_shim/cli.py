"""The shim's command ``trajkit serve``.

Its dependencies come with an extra, and are imported when it runs.
"""

import argparse
import errno
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trajkit.cli.options import Commands, add_options
from trajkit_shim import engine_options as options
from trajkit_shim.engine_options import ADMIN_TOKEN

if TYPE_CHECKING:
    import socket

    from trajkit_shim.workers import Place


def add_serve(commands: Commands) -> None:
    """Add ``serve`` to the command line."""
    parser = commands.add_parser(
        "serve",
        help="record the model calls of an unmodified agent",
        description="Run a gateway that speaks OpenAI Chat Completions and Responses, "
        "Anthropic Messages and Gemini generateContent, samples from an inference "
        "engine in token ids, and writes every call to the run's turn log before it is "
        "answered. POST /sessions opens a session and returns its API key.",
    )
    options.add_engine(parser)
    add_options(
        parser,
        f"""
--host ADDRESS 127.0.0.1  default: %(default)s
--port PORT 8765  0: any free one (default: %(default)s)
-o --out RUN  directory of the turn log; made if missing
--log {{full,delta}}  delta: store only what each prompt adds to an earlier turn
    (default: %(default)s)
--prompts {{append,render}}  append: extend the token ids of an earlier turn if the chat
    template permits (the default); render: render every prompt from its messages
--no-attribution  do not record which message each prompt token belongs to. A log in full
    form is then half as large, one in delta form about 8 %% smaller
--admin-token TOKEN  token for requests to /sessions and /admin; required if --host can be
    reached from other machines. Prefer the environment variable {ADMIN_TOKEN}, which other
    users of this machine cannot see
--allow-host NAME...  name that clients use for this machine, besides addresses and names of
    private networks; may be repeated
--fsync  write each turn to disk (fsync) before it is answered
--file-bytes N {1 << 30}  maximum size of one file of the log (default: %(default)s)
--log-bytes N  maximum size of all turns; calls beyond it are rejected
--workers N 1  gateways in processes of their own, on ports from --port on. POST /sessions,
    at any of them, answers with the base_url of the one that owns the session (default:
    %(default)s)
--drain-seconds SECONDS 30  how long running calls may take after a stop signal; a second
    signal ends them at once (default: %(default)s)
--json  print the addresses as a JSON object
""",
        out={"type": Path, "required": True},
    )
    parser.set_defaults(admin_token=os.environ.get(ADMIN_TOKEN))
    parser.set_defaults(run=lambda arguments: _serve(parser, arguments))


def _serve(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    with options.needs_extra(parser, "shim"):
        from trajkit_shim.serve import is_loopback

        if not is_loopback(arguments.host) and not arguments.admin_token:
            parser.error(
                f"--host {arguments.host} can be reached from other machines: give "
                "--admin-token"
            )
    # before an engine is launched, which takes minutes
    for log in arguments.out.glob("turns-*.arrows"):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(log))
    with options.terminable():
        if arguments.workers > 1:
            _serve_workers(parser, arguments)
        else:
            _serve_one(parser, arguments)
    return 0


def _serve_one(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    listener: "socket.socket | None" = None,
    place: "Place | None" = None,
    say: Callable[[str], object] = sys.stdout.write,
) -> None:
    """Run a gateway until a stop signal. ``place``: it is one of several workers."""
    attributed = not arguments.no_attribution
    limit = arguments.log_bytes
    with ExitStack() as stack:
        log = {
            "form": arguments.log,
            "fsync": arguments.fsync,
            "max_file_bytes": arguments.file_bytes,
            "max_total_bytes": limit and limit // arguments.workers,
            "attributed": attributed,
            "worker": None if place is None else place.index,
        }
        gateway = options.engine_app(
            parser,
            arguments,
            arguments.out,
            log,
            attributed=attributed,
            prompts=arguments.prompts,
            admin_token=arguments.admin_token or None,
            hosts=arguments.allow_host,
        )
        with options.needs_extra(parser, "shim"):
            from trajkit_shim.call import Options
            from trajkit_shim.prompting.prompts import Prompts
            from trajkit_shim.serve import serve
            from trajkit_shim.workers import Worker

            app, renderer = stack.enter_context(gateway)

        def say_where(url: str) -> None:
            where = {"url": url, "openai_base_url": f"{url}/v1"}
            where["turns"] = str(arguments.out)
            if place is not None:
                where["workers"] = " ".join(place.urls)
            built = Prompts(renderer, arguments.prompts)
            if arguments.json:
                text = json.dumps({**where, "prompts": built.describe()})
            else:
                where["prompts"] = built.summary()
                text = "\n".join(f"{name:<16}{value}" for name, value in where.items())
            say(text + "\n")
            sys.stdout.flush()

        # a stop signal ends the server, which has answered all running calls by then
        with suppress(KeyboardInterrupt):
            serve(
                app if place is None else Worker(app, place, Options()),
                arguments.host,
                arguments.port,
                on_listening=say_where,
                drain_seconds=arguments.drain_seconds,
                listener=listener,
            )


def _serve_workers(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> None:
    """Run several gateways, each in a process and on a port of its own."""
    options.check(parser, arguments)
    with options.needs_extra(parser, "shim"):
        from trajkit_shim.serve import listen
        from trajkit_shim.workers import run_workers

    with ExitStack() as stack:
        first, listeners = arguments.port, list[Any]()
        for number in range(arguments.workers):
            # 0 is any free port
            port = first + number if first else 0
            listeners.append(listen(arguments.host, port))
        for listener, _ in listeners:
            stack.enter_context(listener)
        options.launch_server(arguments, stack)
        # the parser's own function cannot be sent to another process
        sent = argparse.Namespace(**{**vars(arguments), "run": None})
        sockets, urls = zip(*listeners, strict=True)

        def say(text: str) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()

        run_workers(partial(_work, sent), sockets, urls, say)


def _work(
    arguments: argparse.Namespace,
    listener: "socket.socket",
    place: "Place",
    ready: Callable[[str], None],
) -> None:
    """Run one of several gateways. The parent has checked the arguments."""
    with options.terminable():
        _serve_one(argparse.ArgumentParser(), arguments, listener, place, ready)
