"""An inference engine without a model: a scripted policy with true probabilities.

It sees token ids and sampling parameters and nothing else. What it draws has a known
law (`trajkit_shim.embedded.law`), so that every logprob can be checked, and its ids are
drawn from all spellings of the reply, so that they drift as a real model's do. It needs
numpy and tokenizers, no torch and no download.
"""

from trajkit_shim.embedded.engine import EmbeddedEngine
from trajkit_shim.embedded.faults import Fault, FaultyEngine
from trajkit_shim.embedded.policy import converse
from trajkit_shim.embedded.replies import Policy, Reply, Special, tool_call
from trajkit_shim.embedded.tokenizer import load_tokenizer

__all__ = [
    "EmbeddedEngine",
    "Fault",
    "FaultyEngine",
    "Policy",
    "Reply",
    "Special",
    "converse",
    "load_tokenizer",
    "tool_call",
]
