"""Turns: reading them, checking them, their messages, their paths and their delta form."""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit.turns.amendments import untrain_stale as untrain_stale
    from trajkit.turns.images import content_ids as content_ids
    from trajkit.turns.images import engine_ids as engine_ids
    from trajkit.turns.messages import message_key as message_key
    from trajkit.turns.messages import message_record as message_record
    from trajkit.turns.messages import tools_key as tools_key
    from trajkit.turns.records import lcp as lcp
else:
    __getattr__, __dir__ = lazy_names(__name__)
