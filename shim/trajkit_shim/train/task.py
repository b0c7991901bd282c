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

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
            },
        },
    }
    for name, description in (("ask", "Ask a person."), ("open", "Open a place."))
]
"""The tools of the agent, as OpenAI's clients write them."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task: where the agent begins, what it can find out, and the right answer."""

    task_id: str
    start: str
    facts: dict[str, str]
    answer: str

    @property
    def prompt(self) -> str:
        """What the user says."""
        return f"find {self.start}"

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
