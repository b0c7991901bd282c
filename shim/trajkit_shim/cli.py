"""The shim's command ``trajkit serve``.

Their dependencies come with an extra, and are imported when a command runs.
"""

import argparse
import errno
import json
import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from trajkit.cli.options import Commands, add_options
from trajkit_shim import engine_options as options
from trajkit_shim.engine_options import ADMIN_TOKEN


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
--out RUN  directory of the turn log; made if missing
--log {{full,delta}}  delta: store only what each prompt adds to an earlier turn, compressed
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
        from trajkit_shim.prompting.prompts import Prompts
        from trajkit_shim.serve import is_loopback, serve

        if not is_loopback(arguments.host) and not arguments.admin_token:
            parser.error(
                f"--host {arguments.host} can be reached from other machines: give "
                "--admin-token"
            )
    attributed = not arguments.no_attribution
    # before an engine is launched, which takes minutes
    for log in arguments.out.glob("turns-*.arrows"):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(log))
    with ExitStack() as stack:
        stack.enter_context(options.terminable())
        log = {
            "form": arguments.log,
            "fsync": arguments.fsync,
            "max_file_bytes": arguments.file_bytes,
            "max_total_bytes": arguments.log_bytes,
            "attributed": attributed,
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
            app, renderer = stack.enter_context(gateway)

        def say_where(url: str) -> None:
            where = {
                "url": url,
                "openai_base_url": f"{url}/v1",
                "turns": str(arguments.out),
            }
            built = Prompts(renderer, arguments.prompts)
            if arguments.json:
                text = json.dumps({**where, "prompts": built.describe()})
            else:
                where["prompts"] = built.summary()
                text = "\n".join(f"{name:<16}{value}" for name, value in where.items())
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

        drain = {"on_listening": say_where, "drain_seconds": arguments.drain_seconds}
        # a stop signal ends the server, which has answered all running calls by then
        with suppress(KeyboardInterrupt):
            serve(app, arguments.host, arguments.port, **drain)
    return 0
