"""An inference engine without a model: a scripted policy with exact probabilities.

It samples from a known distribution (`engines.embedded.engine`), so every logprob
can be checked. Its ids are drawn from all spellings of the reply, so they drift as a real
model's do. It needs numpy and tokenizers, but no torch and no download.
"""

from trajkit_shim.engines.embedded.engine import EmbeddedEngine
from trajkit_shim.engines.embedded.script import (
    Policy,
    Reply,
    Special,
    converse,
    tool_call,
)
from trajkit_shim.engines.embedded.vocabulary import END, chat_files, load_tokenizer

__all__ = [
    "END",
    "EmbeddedEngine",
    "Policy",
    "Reply",
    "Special",
    "chat_files",
    "converse",
    "load_tokenizer",
    "tool_call",
]
