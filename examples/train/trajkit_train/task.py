"""The task of the training demo: find a number by asking people and opening places.

A person names another person or a place, and a place holds a number. The agent has a
tool for each, and gets reward 1 if it answers with the number that its chain leads to.
"""

import json
import random
from dataclasses import dataclass

PEOPLE = (
    "anna ben cleo dan emma finn gina hugo ivy jan kim leo mia nils olga paul".split()
)
PLACES = (
    "attic barn cabin desk fort garden hall inn jar kiosk lab mill nook oven port shed"
).split()
NUMBERS = tuple(map(str, range(40, 72)))

MAX_TURNS = 6
"""Model calls of one rollout; a chain needs at most four."""

_NAME = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
}
TOOLS = [
    {"type": "function", "function": {"name": n, "description": d, "parameters": _NAME}}
    for n, d in (("ask", "Ask a person."), ("open", "Open a place."))
]
"""The tools of the agent, as OpenAI's clients write them."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task: where the agent begins, what it can find out, and the right answer."""

    task_id: str
    start: str
    facts: dict[str, str]
    answer: str

    def call(self, name: str, arguments: str) -> str:
        """The result of a tool call."""
        try:
            asked = json.loads(arguments)["name"]
        except (ValueError, LookupError, TypeError):
            return "error"
        known = {"ask": PEOPLE, "open": PLACES}.get(name, [])
        return self.facts[asked] if asked in known else "error"


def make_task(task_id: str) -> Task:
    """Return a random task: a chain of one or two people, a place and a number."""
    draw = random.Random(task_id)
    people, places = draw.sample(PEOPLE, len(PEOPLE)), draw.sample(PLACES, len(PLACES))
    facts = dict(zip(people, places, strict=True))
    facts |= dict(zip(places, draw.sample(NUMBERS, len(places)), strict=True))
    start, second = people[:2]
    place = facts[start]
    if draw.random() < 0.5:
        place = facts[second]
        facts[start] = second
    return Task(task_id, start, facts, facts[place])


def scripted_reply(last: str, draw: random.Random) -> str:
    """Return a reply to a message with the last word ``last``, by an agent that errs.

    Half of the replies begin with reasoning, and half of the tool calls lack the line
    break that the chat template writes at their end. The agent does something at random
    in 20 % of the replies with reasoning, and in 50 % of the others.
    """
    kinds = {"person": PEOPLE, "place": PLACES, "number": NUMBERS}
    kind = next((k for k, names in kinds.items() if last in names), None)
    thinks = draw.random() < 0.5
    if kind is None or draw.random() < (0.2 if thinks else 0.5):
        kind = draw.choice(list(kinds))
        last = draw.choice(kinds[kind])
    thought = f"<think>{last} is a {kind}</think>" if thinks else ""
    if kind == "number":
        return thought + last
    tool = {"person": "ask", "place": "open"}[kind]
    newline = draw.choice(["\n", ""])
    return (
        f'{thought}<tool_call>\n{{"name": "{tool}", "arguments": '
        f'{{"name": "{last}"}}}}{newline}</tool_call>'
    )
