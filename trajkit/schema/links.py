"""Links: the turn that each turn continues, and how its prompt departs from it."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from trajkit.schema import engine
from trajkit.schema.engine import TURN, Fault, columns, defined, table

LINK_REASONS = defined("""How the parent of a turn was found, or why the turn is in no row.

root: No parent: no earlier turn matches.
messages: The generated message nearest above it in the message tree.
rewrite: As ``messages``. Its prompt also replaced a short reply, which is now rewritten.
tokens: The longest path at the end of a row (of any turn under ``parent_by="prefix"``)
    that is a prefix of its prompt. For turns without messages under a route by messages:
    the turn whose prompt is a proper prefix of its prompt and whose path it repeats for
    longest.
previous: The previous call of the session.
unrouted: It has an empty list of messages: no parent, in no row.
history_replaced: No parent: the same agent spoke earlier, but this request does not
    extend its history.
prompts: The chain whose last prompt is the longest prefix of its prompt.

Only under ``parent_by="prefix"``, with the parent as for ``tokens`` or ``recorded``:

ambiguous: Quarantined: several turns match with the same tokens. The parent is the first.
superseded: Quarantined: a retry that nothing continues; another retry was continued. If a
    turn of the session was scored: any retry but one that its chain has, or that was
    continued, or else the first.
unresolved_kept, unresolved: A retry; no turn with its prompt was continued. The first is
    kept, the others are quarantined.
unresolved_ambiguous: Quarantined as ``ambiguous``, and also an unresolved retry.
chain_quarantined: Not quarantined itself, but every chain with it contains a quarantined
    turn, or it continues the turn that was scored.
empty: It sampled nothing: nothing continues it, and it is in no row.
recorded: The parent that the source recorded (`ROUTING`).
no_parent: No parent: the recorded one is unresolved or missing, its path does not begin
    the prompt, or nothing is recorded, though it is of other turns of the session.

Only under ``parent_by="generations"``, where ``messages`` names the last turn whose
messages and reply are the longest such beginning of the request:

refused_tokens: Its prompt does not begin with its parent's path: in no row.
refused_truncated: Its parent stopped for its length: in no row.
retried: Nothing continues it, and a later turn has the same parent: in no row.
""")

SEGMENT_KINDS = defined("""How a segment ended.

history_replaced: The agent's next request does not extend its history.
subagent: A sub-agent's segment: its tool call was answered, or the session ended.
final: The main agent's last segment.
""")

_IN_ORDER = columns("""
    session_id text (contiguous)
    turn_index int32 (ascending)
""")
_ANOTHER = engine.refers("turn_index", np.not_equal, "another turn_index")
_LATER = engine.refers("turn_index", np.greater, "a later turn")


def parents_first(table: pa.Table) -> Iterator[Fault]:
    """The parent of a turn with an order has an order as well.

    In each session, parents precede their children, either by turn_index or by order.
    """
    order = table.column("order").fill_null(-1).to_numpy()
    at, found = engine.lookup(table, "turn_index", table.column("parent"))
    followed = found & (order >= 0)
    before = np.where(followed, order[at], -1)
    session = engine.session_numbers(table)
    later = np.unique(session[followed & (at > np.arange(len(table)))])
    rule = "order {}, but its parent has no order, so it is in no row"
    yield engine.broken(followed & (before < 0), rule, order)
    yield engine.broken(
        followed & (before >= order) & np.isin(session, later),
        "order {} does not come after its parent's, {}, in a session with a parent that "
        "is a later turn",
        order,
        before,
    )


def differ(name: str, table: pa.Table) -> Iterator[Fault]:
    """Ranks are unique in each session."""
    column = table.column(name)
    values = (engine.session_numbers(table) << 32) + column.fill_null(0).to_numpy()
    again = ~engine.nulls(column)
    again[again] = engine.repeated(values[again])
    yield engine.broken(again, f"{name} {{}} is repeated within the session", column)


LINKS = table(
    "links",
    *_IN_ORDER,
    *columns(
        """
    parent int32? (another, turn_exists): turn_index of the parent. null: none
    link_reason name? (reasons)
    order int32? (not_negative, differ): rank in the policy's traversal of the session,
        from 0
    rewritten_by int32? (turn_exists, later): the turn that replaced this one's reply, so
        that it does not train. null: none
    segment_kind name?: how its segment ended (SEGMENT_KINDS). null: the route has no
        segments
    """,
        another=_ANOTHER,
        later=_LATER,
        differ=differ,
        reasons=engine.one_of(LINK_REASONS),
    ),
    rules=(parents_first,),
)
"""One row per turn: the turn that it continues."""

REGIONS = ("none", "last_reply", "earlier_reply", "prompt")
"""Where drift starts in the parent's path: nowhere, in the parent's output, in an
earlier output, or in other tokens."""

CAUSES = (
    "clean",
    "truncated",
    "head_dropped",
    "middle_edited",
    "tail_changed",
    "diverged",
)
"""Causes of drift that token ids show (see `trajkit.classify_drift`)."""

TEXT_CAUSES = defined("""Causes of a finding, from the text of both sides.

The first that applies counts.

truncated: The prompt ends here. If no other cause applies: its message ends here, while
    the path's continues.
same_text: The text is equal, the tokens differ.
special_tokens: Equal except for special tokens (or their text in ordinary tokens) and
    white space around them.
boolean: Equal once ``True``, ``False`` and ``None`` are ``true``, ``false`` and ``null``.
tool_arguments: Part of a JSON object with the same value in another notation.
white_space: Equal except for white space.
reasoning_dropped: Equal without the path's reasoning; the prompt has none.
template: Different text, but the request repeats every earlier message and the reply
    unchanged, so the chat template made the difference. Also an empty frame for reasoning
    on one side.
rewritten: Different text, and the request drops or changes an earlier message.
other_text: Different text, and no messages that show who changed it.
""")


def drift_agrees(table: pa.Table) -> Iterator[Fault]:
    """The columns of a drift table agree."""
    size = table.column("size").to_numpy()
    after = table.column("tokens_after_drift").to_numpy()
    rule = "tokens_after_drift {} exceeds the size {}"
    yield engine.broken(after > size, rule, after, size)
    for name, word in (("region", "none"), ("cause", "clean")):
        text = table.column(name).cast(pa.string())
        equal = np.array([value == word for value in text.to_pylist()], np.bool_)
        rule = f"{name} is {{!r}} with a size of {{}}: expected {word!r} exactly for size 0"
        yield engine.broken(
            ~engine.nulls(text) & (equal != (size == 0)), rule, text, size
        )
    names = ("resync_path", "resync_prompt", "resync_length")
    path, prompt, length = (engine.nulls(table.column(name)) for name in names)
    rule = "the three resync columns are null together"
    yield engine.broken((path != prompt) | (path != length), rule)


DRIFT = table(
    "drift",
    *_IN_ORDER,
    *columns(
        """
    parent int32 (another)
    lcp int32 (not_negative): tokens shared by the parent's path and this prompt, from the
        start
    size int32 (not_negative): tokens of the path beyond lcp; 0: clean
    region name? (regions)
    resync_path, resync_prompt, resync_length int32? (not_negative): where path and prompt
        agree again: path[resync_path:][:resync_length] ==
        prompt[resync_prompt:][:resync_length]. null: nowhere
    tokens_after_drift int32 (not_negative): sampled tokens of the path at or beyond lcp
    cause name? (causes)
    """,
        another=_ANOTHER,
        regions=engine.one_of(REGIONS),
        causes=engine.one_of((*CAUSES, *TEXT_CAUSES)),
    ),
    rules=(drift_agrees,),
)
"""One row per turn with a parent: how its prompt departs from the parent's path."""

FINDINGS = table(
    "findings",
    *TURN,
    *columns("""
    parent int32
    finding int32: counts the findings of the turn from 0, in the order of the prompt
    cause name
    path_start, path_stop int32: tokens of the parent's path ...
    prompt_start, prompt_stop int32: ... and the prompt's tokens in their place. Between
        findings, and from the last finding to the end of the path, both have the same
        tokens
    path_text, prompt_text text: decoded text, with special tokens
    """),
)
"""Each span where a prompt departs from the parent's path, with its cause."""

LABELS = ("sub_agent", "retry", "rollback", "compaction", "rewrite")
"""Kinds of branches (see `analysis.label_branches`)."""

BRANCHES = table(
    "branches",
    *TURN,
    *columns("""
    label name
    other int32: the earlier turn that it is compared with
    evidence text: the reason for the label, in words
    """),
)
"""One row per turn that opens a branch."""
