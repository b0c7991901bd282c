"""What each model family samples, read by the format that its template asks for.

`tests/shim/models/families.json` has replies of 28 families, as public packages document
them, and what a client must get.
"""

import json
import re
from pathlib import Path

import pytest

from trajkit_shim.replies import END_THINK, FORMS, THINK, THOUGHTS, parse

DATA = json.loads((Path(__file__).parents[1] / "models/families.json").read_text())
# the format of each family
FORM_OF = {
    "deepseek-v3": "deepseek",
    "deepseek-v3.1": "deepseek",
    "deepseek-v3.2": "dsml",
    "deepseek-v4": "dsml",
    "glm-4.5": "glm",
    "glm-4.6": "glm",
    "glm-4.7": "glm",
    "glm-5": "glm",
    "gpt-oss": "gpt-oss",
    "kimi-k2": "kimi",
    "kimi-k2-thinking": "kimi",
    "llama-3.1": "plain-json",
    "llama-3.2": "plain-json",
    "llama-3.3": "plain-json",
    "llama-4": "pythonic",
    "mistral-nemo": "mistral",
    "mistral-small-3.2": "mistral-args",
    "nemotron-3-nano": "qwen3-coder",
    "nemotron-nano-v2": "toolcall",
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "qwen3-2507-instruct": "hermes",
    "qwen3-2507-thinking": "hermes",
    "qwen3-coder": "qwen3-coder",
    "qwen3.5": "qwen3-coder",
    "qwen3.6": "qwen3-coder",
    "seed-oss": "seed-oss",
}
REPLIES = [
    (name, reply)
    for name, family in DATA["families"].items()
    for reply in family["replies"]
]


def squeezed(text):
    return " ".join((text or "").split())


@pytest.mark.parametrize(
    ("name", "reply"), REPLIES, ids=[f"{name}-{reply['id']}" for name, reply in REPLIES]
)
def test_a_reply_of_a_family(name, reply):
    family = DATA["families"][name]
    ends = "|".join(map(re.escape, family["end_tokens"]["list"]))
    text = re.sub(f"(?:{ends})$", "", reply["sampled"])
    form = FORMS.get(FORM_OF.get(name))
    seed = name == "seed-oss"
    opened = not seed and END_THINK in text and THINK not in text
    tags = THOUGHTS[0] if seed else (THINK, END_THINK)
    found = parse(text, form, DATA["tools"], opened=opened, tags=tags)
    assert not found.ill_formed
    assert squeezed(found.reasoning) == squeezed(reply["reasoning"])
    assert squeezed(found.text) == squeezed(reply["text"])
    calls = [(call.name, json.loads(call.arguments)) for call in found.calls]
    assert calls == [(call["name"], call["arguments"]) for call in reply["calls"]]
    ids = [call.call_id for call in found.calls]
    assert ids == [call.get("id", "") for call in reply["calls"]]


@pytest.mark.parametrize("form", sorted(set(FORM_OF.values())))
def test_half_of_a_call_is_ill_formed_text(form):
    """Where a call of the family is cut, nothing is lost and nothing is guessed."""
    name = next(name for name, known in FORM_OF.items() if known == form)
    (reply, *_) = (r for n, r in REPLIES if n == name and len(r["calls"]) == 1)
    start = FORMS[form].starts.search(reply["sampled"])
    text = reply["sampled"].removesuffix(
        DATA["families"][name]["end_tokens"]["after_call"]
    )
    if form == "gpt-oss":
        # its calls are found once the messages of the reply are taken apart
        text = text[text.index("<|channel|>commentary to=") :]
        start = FORMS[form].starts.search(text)
    cut = text[start.start() : (start.end() + len(text)) // 2]
    found = parse(f"So: {cut}", FORMS[form], DATA["tools"], opened=False)
    assert found.calls == []
    if form not in ("pythonic", "plain-json"):
        assert found.ill_formed
    assert squeezed(found.text).startswith("So:")
