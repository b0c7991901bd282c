"""A stand-in for ``python -m sglang.launch_server``, as a program of its own.

It takes SGLang's arguments and samples the same two ids for every prompt. ``--fake WORD``
makes it misbehave: `mute` never becomes healthy, `broken` ends at once with a line without
newline, `stubborn` ignores SIGTERM and its worker does not end with it. ``--pids FILE``
gets a line per process.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--served-model-name", default="fake")
parser.add_argument("--fake")
parser.add_argument("--pids")
options, _ = parser.parse_known_args()
if options.fake == "broken":
    sys.exit(os.write(2, b"loading\n\x1b[31mthere is no GPU"))
state = {"weight_version": "default", "paused": False, "updates": []}
name = {"served_model_name": options.served_model_name}
models = [{"id": options.served_model_name, "max_model_len": 65536}]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        status = 503 if options.fake == "mute" else 200
        self.answer({"data": models, **name, **state}, status)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/generate":
            self.answer(self.sampled(body))
            return
        if "weight_version" in body:
            state["updates"].append([self.path, body])
            state["weight_version"] = body["weight_version"]
        elif self.path.endswith("_generation"):
            state["paused"] = self.path == "/pause_generation"
        self.answer({"success": True})

    def sampled(self, body):
        ids = [104, 105][: body["sampling_params"]["max_new_tokens"]]
        version = {"version": state["weight_version"], "start": 0, "end": len(ids)}
        meta = {
            "id": body["rid"],
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "finish_reason": {"type": "stop"},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_versions": [version],
        }
        return {"output_ids": ids, "meta_info": meta}

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if options.fake == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
if options.pids:
    # SGLang's own processes ask the kernel to end them with their parent
    asks = ["setpriv", "--pdeathsig", "KILL"] if options.fake != "stubborn" else []
    worker = subprocess.Popen([*asks, "sleep", "600"])
    with open(options.pids, "a") as pids:
        pids.write(f"{os.getpid()}\n{worker.pid}\n")
server.serve_forever()
