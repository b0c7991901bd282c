"""The generated message nearest above a request in the message tree."""

from trajkit import _core
from trajkit._arrow.ragged import Records
from trajkit.pipeline.routes.links import empty_links
from trajkit.policies import TIE_BREAKS, Policy
from trajkit.turns.message_equality import with_equality
from trajkit.turns.sessions import Forest, Sessions


def by_messages(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues the nearest reply above its messages, as slime routes them.

    Tokens choose among equal replies (``tie_break``), and where a call has no messages.
    """
    links = empty_links(calls)
    keyed = with_equality(calls, policy.message_equality)
    _core.route_messages(
        forest.paths,
        keyed.requests,
        policy.merge_threshold,
        TIE_BREAKS[policy.tie_break],
        links,
    )
    return links
