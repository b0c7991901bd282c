"""The default policy of the embedded engine."""

from collections.abc import Sequence

from trajkit_shim.engines.embedded.script import Reply, messages, tool_call

_LOOK = (
    "Let me look at what is there.\n",
    "I will start with the files.\n",
    "First, the folder.\n\n",
)
_DONE = (
    "Done: that is what there is to see.",
    "That is all there is.",
    " That is all there is.",
    "Nothing else to do here.",
)


def converse(prompt: str) -> Sequence[Reply]:
    """Small talk, and one call of ``bash`` after each user message if it is offered."""
    read = messages(prompt)
    offered = any(m.role == "system" and '"name": "bash"' in m.text for m in read)
    answered = bool(read) and read[-1].text.startswith("<tool_response>")
    if offered and not answered:
        call = tool_call("bash", '{"command": "ls -la"}')
        return [Reply((text, *call)) for text in _LOOK]
    return [Reply((text,)) for text in _DONE]
