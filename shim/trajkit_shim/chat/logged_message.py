"""A canonical message with its key and body, as the turn log stores it."""

from dataclasses import dataclass

from trajkit.turns.messages import message_record
from trajkit_shim.json_input import Json


@dataclass(frozen=True, slots=True)
class LoggedMessage:
    """One chat message in the form of the log: see `trajkit.schema.MESSAGE`."""

    key: bytes
    role: str
    body: str


def logged_message(message: Json) -> LoggedMessage:
    """Return a canonical chat message with its key and body."""
    key, body = message_record(message)
    return LoggedMessage(key, str(message["role"]), body)
