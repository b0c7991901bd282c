"""Which call each call continues: a function per rule, by the value of ``parent_by``.

Each takes the calls, the forest of their token paths and the policy, and returns a record
of dtype LINK for every call.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from trajkit.policies import ParentBy, Policy
from trajkit.rows.routes.agents import by_agents
from trajkit.rows.routes.generations import by_generations
from trajkit.rows.routes.prefix import by_prefix
from trajkit.rows.routes.simple import (
    by_messages,
    by_none,
    by_previous,
    by_prompts,
    by_tokens,
)
from trajkit.tables.ragged import Records
from trajkit.turns.sessions import Forest, Sessions

Route: TypeAlias = Callable[[Sessions, Forest, Policy], Records]

ROUTES: Mapping[ParentBy, Route] = {
    "messages": by_messages,
    "agents": by_agents,
    "tokens": by_tokens,
    "previous": by_previous,
    "none": by_none,
    "prompts": by_prompts,
    "prefix": by_prefix,
    "generations": by_generations,
}
