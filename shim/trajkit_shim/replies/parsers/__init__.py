"""The formats in which models write tool calls."""

from trajkit_shim.replies.parse import ToolForm
from trajkit_shim.replies.parsers.json_calls import HERMES, PLAIN_JSON
from trajkit_shim.replies.parsers.tagged_calls import GLM, QWEN3_CODER

# in order of precedence, if a template matches several
FORMS = {form.name: form for form in (QWEN3_CODER, GLM, HERMES, PLAIN_JSON)}


def form_of(chat_template: str) -> ToolForm:
    """Return the format of calls that a chat template asks for, by default Hermes'."""
    # quotes within a string of the template may be escaped
    text = chat_template.replace('\\"', '"')
    known = (f for f in FORMS.values() if all(mark in text for mark in f.known_by))
    return next(known, HERMES)
