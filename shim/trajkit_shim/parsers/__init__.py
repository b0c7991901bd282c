"""The forms in which models write tool calls."""

from trajkit_shim.parsers.form import ToolCall, ToolForm, Tools
from trajkit_shim.parsers.glm import GLM
from trajkit_shim.parsers.hermes import HERMES
from trajkit_shim.parsers.plain_json import PLAIN_JSON
from trajkit_shim.parsers.qwen3_coder import QWEN3_CODER

__all__ = ["FORMS", "ToolCall", "ToolForm", "Tools", "form_of"]

# of two that a template is known by, the first one holds
FORMS = {form.name: form for form in (QWEN3_CODER, GLM, HERMES, PLAIN_JSON)}


def form_of(chat_template: str) -> ToolForm:
    """The form in which a chat template has its model write calls.

    A template that no form is known by is taken for one of Hermes' form.
    """
    # in a template's text, quotes within a string may be escaped
    text = chat_template.replace('\\"', '"')
    known = (f for f in FORMS.values() if all(mark in text for mark in f.known_by))
    return next(known, HERMES)
