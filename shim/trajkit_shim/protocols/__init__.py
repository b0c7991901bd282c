"""The protocols that the gateway speaks. A new one is a module and a line here."""

from trajkit_shim.protocols.anthropic import ANTHROPIC
from trajkit_shim.protocols.gemini import GEMINI
from trajkit_shim.protocols.openai_chat import OPENAI_CHAT
from trajkit_shim.protocols.openai_responses import OPENAI_RESPONSES
from trajkit_shim.protocols.protocol import WireProtocol

PROTOCOLS: tuple[WireProtocol, ...] = (
    OPENAI_CHAT,
    ANTHROPIC,
    OPENAI_RESPONSES,
    GEMINI,
)
