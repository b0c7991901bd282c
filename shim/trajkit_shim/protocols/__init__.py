"""The gateway's protocols. A new one needs a module and a line here."""

from trajkit_shim.protocols.anthropic import ANTHROPIC
from trajkit_shim.protocols.base import WireProtocol
from trajkit_shim.protocols.gemini import GEMINI
from trajkit_shim.protocols.openai import OPENAI_CHAT, OPENAI_RESPONSES

PROTOCOLS: tuple[WireProtocol, ...] = (OPENAI_CHAT, ANTHROPIC, OPENAI_RESPONSES, GEMINI)
