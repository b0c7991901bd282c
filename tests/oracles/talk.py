"""Slow, obvious twin of how a session numbers its messages and shares their lists."""

from tests.oracles import rows as reference
from trajkit.turns.messages import message_record


class Numbers:
    """Messages are one where their canonical JSON is; pairs of key and role stand alone."""

    def __init__(self):
        self.bodies = []
        # of each call: the numbers of its messages (None: no list), and of its reply
        self.lists = []
        self.replies = []

    def number(self, message):
        body = message_record(message)[1]
        if body not in self.bodies:
            self.bodies.append(body)
        return self.bodies.index(body)

    def read(self, messages, reply):
        """The numbers of a call's messages, and of its reply."""
        numbers = None if messages is None else [self.number(one) for one in messages]
        return numbers, None if reply is None else self.number(reply)

    def add(self, numbers, reply):
        self.lists.append(numbers)
        self.replies.append(reply)

    def shared(self, call, base):
        """How many messages a call and an earlier one have in common."""
        shown = None if base < 0 else self.lists[base]
        if shown is None or self.lists[call] is None:
            return 0
        reply = self.replies[base]
        shown = shown if reply is None else [*shown, reply]
        return reference.lcp(shown, self.lists[call])
