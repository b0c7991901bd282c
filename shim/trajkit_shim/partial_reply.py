"""A reply that is being sampled, and the connections that wait for more of it."""

import asyncio

from trajkit_shim.chat.reply import Reply


class PartialReply:
    """The known part of a reply.

    ``reply``: a prefix of every later value.
    """

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self._changed = asyncio.Event()

    def update(self, reply: Reply) -> None:
        """Set a longer reply and wake those who wait."""
        self.reply = reply
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_beyond(self, seen: Reply | None) -> None:
        """Return once there is more than ``seen``."""
        if self.reply is seen:
            await self._changed.wait()
