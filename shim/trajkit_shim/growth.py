"""A reply that grows, and the connections that are told of it."""

import asyncio

from trajkit_shim.reply import Reply


class Growth:
    """The latest of a reply that is still being sampled.

    Attributes
    ----------
    reply : Reply or None
        What can be told of it: the beginning of every later one.
    """

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self._changed = asyncio.Event()

    def tell(self, reply: Reply) -> None:
        """It has grown."""
        self.reply = reply
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def beyond(self, seen: Reply | None) -> None:
        """Return once there is more than what was seen."""
        if self.reply is seen:
            await self._changed.wait()
