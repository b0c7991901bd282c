"""What does a gateway spend on a prompt, from the wire's bytes to the ids?

    python -m benchmarks.prompts

has a coding agent's conversation grow, and at some lengths of history times one more
turn in three ways, in one process, taking turns: with the template and the tokenizer run
over all of it and nothing remembered (*full*), rendered whole with every piece that was
met before remembered (*render*), and built behind the ids that the engine consumed and
sampled (*append*). All three read the same body and put the same replies back; the
template runs over the whole conversation in each. Every measured request ends in a
message that nobody saw before. The second table has what each prompt token shows too.

Before anything is timed the answers are compared: the ids of *render* are those of
*full*, those of *append* begin with what was held, and all decode to the template's text.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.compare import commit, machine
from trajkit_shim import json_input
from trajkit_shim.chat.logged_message import logged_message
from trajkit_shim.chat.request import DEFAULT_OPTIONS, ChatRequest
from trajkit_shim.engines.embedded import load_tokenizer
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.attribution import Ids
from trajkit_shim.prompting.prompts import Mode, Prompt, Prompts
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.prompting.reply_matching import (
    ReplyIndex,
    RestoredRequest,
    next_position,
)
from trajkit_shim.prompting.token_cache import CacheBudget, TokenCache
from trajkit_shim.protocols import openai_chat

ROOT = Path(__file__).parents[1]
SIZES = (4_000, 16_000, 69_000)
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


class Talk:
    """A coding agent's messages: what it runs, and the sources that it gets to see."""

    def __init__(self) -> None:
        paths = sorted((ROOT / "trajkit").glob("*.py"))
        self._sources = "".join(path.read_text("utf-8") for path in paths)
        self._at = 0
        self.messages: list[Json] = [
            {"role": "system", "content": self._next(4_000)},
            {"role": "user", "content": "The tests fail: find out why."},
        ]

    def _next(self, n_characters: int) -> str:
        text = self._sources[self._at : self._at + n_characters]
        self._at = (self._at + n_characters) % (len(self._sources) - 4_000)
        return text

    def ends_with(self, number: int) -> list[Json]:
        """The messages, the last of them as nobody has seen it before."""
        *before, last = self.messages
        return [*before, {**last, "content": f"{number}\n{last['content']}"}]

    def turn(self) -> tuple[Json, Json]:
        """A reply and the output of the tool that it calls."""
        call_id = f"call_{len(self.messages)}"
        call = {
            "id": call_id,
            "type": "function",
            "function": {
                "name": "bash",
                "arguments": json.dumps({"command": self._next(300)}),
            },
        }
        said = f"Step {len(self.messages)}: let me look."
        reply: Json = {"role": "assistant", "content": said, "tool_calls": [call]}
        result: Json = {
            "role": "tool",
            "content": self._next(1_500),
            "tool_call_id": call_id,
        }
        return reply, result


class Way:
    """One way to come from a body to the ids, with the books of its own session."""

    def __init__(self, renderer: ChatRenderer, mode: Mode) -> None:
        self.renderer = renderer
        self.prompts = Prompts(renderer, mode)
        # once per template, when a gateway starts
        self.prompts.probe(tools=True)
        self._echo, self._held = ReplyIndex(), TokenCache()
        self._budget = CacheBudget(1 << 30)

    def build(
        self, body: bytes, *, attributed: bool = False
    ) -> tuple[ChatRequest, RestoredRequest, Prompt]:
        """The prompt of a request; what its tokens show is computed where asked for."""
        asked = openai_chat.read(json_input.parse_object(body), DEFAULT_OPTIONS)
        restored = self._echo.restore(asked.messages)
        prompt = self.prompts.build(
            restored, asked.tools, self._echo, self._held, attributed=attributed
        )
        if attributed:
            self.prompts.attribution(prompt, restored.messages, asked.tools)
        return asked, restored, prompt

    def sampled(self, body: bytes, reply: Json, output_ids: Ids) -> None:
        """Take a reply to a request into the session, as the gateway does."""
        asked, restored, prompt = self.build(body, attributed=True)
        path = self.prompts.cacheable_path(
            prompt,
            self.prompts.attribution(prompt, restored.messages, asked.tools),
            output_ids,
            position=next_position(restored.position, logged_message(reply).key),
            message=len(restored.messages),
        )
        assert path is not None
        self._held.remember(path, self._budget)
        self.said(restored, reply)

    def said(self, restored: RestoredRequest, reply: Json) -> None:
        """Know a reply again."""
        self._echo.remember(restored.position, reply)


def body_of(messages: list[Json]) -> bytes:
    """A request as a client sends it."""
    return json.dumps({"model": "any", "messages": messages, "tools": [TOOL]}).encode()


def odd_ids(renderer: ChatRenderer, messages: list[Json], reply: Json) -> Ids:
    """The ids of a reply, as no tokenizer would choose them, with its end."""
    before = renderer.text(messages, [TOOL])
    behind = renderer.text([*messages, reply], [TOOL]).removeprefix(before)
    end = renderer.end_of_message(behind, 0)
    assert end is not None
    pieces = [renderer.ids_of(part) for part in (behind[:7], behind[7 : end[0]])]
    return np.concatenate([*pieces, np.array(renderer.end_ids, np.int32)])


def check(ways: dict[str, Way], body: bytes, held: Ids) -> None:
    """Compare what the ways give for a request.

    Raises
    ------
    ValueError
        They differ where they may not.
    """
    prompts = {}
    for name, way in ways.items():
        asked, restored, prompt = way.build(body)
        prompts[name] = prompt
        text = way.renderer.text(restored.messages, asked.tools)
        if way.renderer.decode(prompt.ids, ended=False) != text:
            raise ValueError(f"{name}: the ids do not decode to the template's text")
    if prompts["full"].ids.tolist() != prompts["render"].ids.tolist():
        raise ValueError("render: other ids than those of full rendering")
    append = prompts["append"]
    if append.built != "append" or append.ids[: len(held)].tolist() != held.tolist():
        raise ValueError("append: the prompt does not begin with what was held")


def measure(
    renderers: dict[str, ChatRenderer], sizes: list[int], repeats: int
) -> Iterator[tuple[int, int, dict[bool, list[float]]]]:
    """Grow a conversation to each size.

    Yields
    ------
    tuple of int, int and dict
        Tokens and turns of the history, and the median milliseconds of each way, without
        and with what each token shows.
    """
    ways = {
        name: Way(renderer, "append" if name == "append" else "render")
        for name, renderer in renderers.items()
    }
    append = ways["append"]
    talk, held, number = Talk(), np.empty(0, np.int32), 0
    for turns in itertools.count():
        body = body_of(talk.messages)
        _, restored, prompt = append.build(body)
        while sizes and len(prompt.ids) >= sizes[0]:
            del sizes[0]
            check(ways, body, held)
            medians = {}
            for attributed in (False, True):
                spent: dict[str, list[float]] = {name: [] for name in ways}
                for _ in range(repeats):
                    number += 1
                    body = body_of(talk.ends_with(number))
                    for name, way in ways.items():
                        spent[name].append(seconds(way, body, attributed=attributed))
                medians[attributed] = [
                    1e3 * statistics.median(each) for each in spent.values()
                ]
            yield len(prompt.ids), turns, medians
        if not sizes:
            return
        reply, result = talk.turn()
        ids = odd_ids(append.renderer, talk.messages, reply)
        held = np.concatenate([prompt.ids, ids])
        for way in ways.values():
            if way is append:
                way.sampled(body_of(talk.messages), reply, ids)
            else:
                way.said(restored, reply)
        talk.messages += [reply, result]


def seconds(way: Way, body: bytes, *, attributed: bool) -> float:
    """How long a prompt takes."""
    start = time.perf_counter()
    way.build(body, attributed=attributed)
    return time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(argv)

    tokenizer = load_tokenizer()
    renderers = {
        "full": ChatRenderer(tokenizer, cache_bytes=0),
        "render": ChatRenderer(tokenizer),
        "append": ChatRenderer(tokenizer),
    }
    sys.stdout.write(f"{machine()}; {commit()}\n")
    sys.stdout.write(
        "median milliseconds of a prompt, from the wire's bytes to ids\n\n"
    )
    sys.stdout.write(
        f"{'':14} {'tokens':>7} {'turns':>5} {'full':>8} {'render':>8} {'append':>8}"
        f" {'full/append':>12}\n"
    )
    for tokens, turns, medians in measure(
        renderers, sorted(options.sizes), options.repeats
    ):
        for attributed, times in medians.items():
            label = "and what shows" if attributed else "ids"
            cells = " ".join(f"{each:8.2f}" for each in times)
            ratio = times[0] / times[2]
            sys.stdout.write(
                f"{label:14} {tokens:7,} {turns:5} {cells} {ratio:12.1f}\n"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
