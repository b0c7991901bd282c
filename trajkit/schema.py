"""The Arrow schema of every table, column by column, with unit and null rule.

Token ids are int32. Positions and lengths count tokens. Unknown is null, never 0.0 or
-1; a null logprob has 0.0 in its bytes, so that a consumer of the raw buffer gets a
finite number. Lists are ``large_list``; small sets of names are dictionary-encoded.

The schema version travels in the table metadata under ``trajkit.version``; a table that
lost its metadata is read as the current version. Turns of version 2 have other message
keys, which are computed again from the bodies (`trajkit.turns.old_keys`).
"""

import re

import pyarrow as pa

SCHEMA_VERSION = 3
# versions that are read
SCHEMA_VERSIONS = (2, 3)
KEY_BYTES = 16

_names = pa.dictionary(pa.int8(), pa.string())


def _schema(kind: str, *fields: pa.Field) -> pa.Schema:
    return pa.schema(
        fields,
        metadata={"trajkit.table": kind, "trajkit.version": str(SCHEMA_VERSION)},
    )


def _defined(text: str) -> tuple[str, ...]:
    """The names that a text defines: those in the lines above its indented ones."""
    lines = re.findall(r"^([a-z_]+(?:, [a-z_]+)*)\n +\S", text, re.MULTILINE)
    return tuple(name for line in lines for name in line.split(", "))


def _required(name: str, type_: pa.DataType) -> pa.Field:
    return pa.field(name, type_, nullable=False)


def _all_required(type_: pa.DataType, names: str) -> tuple[pa.Field, ...]:
    return tuple(_required(name, type_) for name in names.split())


# which turn a line is about
_TURN = (_required("session_id", pa.string()), _required("turn_index", pa.int32()))

MESSAGE = pa.struct(
    [
        # digest of the message: the same for messages that are == (trajkit.turns.messages)
        pa.field("key", pa.binary(KEY_BYTES)),
        pa.field("role", pa.string()),
        # JSON with sorted keys; null: the last body that the session has of this key
        pa.field("body", pa.string()),
    ]
)
"""One chat message. A repeated message has its key and a null ``body``."""

WEIGHT_VERSION = pa.struct(
    [
        pa.field("version", pa.string()),
        pa.field("start", pa.int32()),
        pa.field("stop", pa.int32()),
    ]
)
"""Output tokens ``start:stop`` were sampled with the weights ``version``."""

MM_ITEM = pa.struct(
    [
        # what it is: image
        pa.field("kind", pa.string()),
        # SHA-256 of the original bytes, 64 hexadecimal digits; a log has them in a file
        # of this name in its folder images
        pa.field("hash", pa.string()),
        # the id that the engine has at each of its tokens
        pa.field("token_id", pa.int32()),
        # its tokens are start:stop of the prompt or row
        pa.field("start", pa.int32()),
        pa.field("stop", pa.int32()),
    ]
)
"""An image in a prompt.

Its tokens are content ids: ids beyond every vocabulary that depend on kind, hash and
number of tokens (`trajkit.turns.images.content_ids`). Hence prompts with different
images differ in their ids, and every stage that compares tokens compares images too.
`trajkit.turns.engine_ids` gives the ids that the engine consumed.
"""

SPAN_KINDS = _defined("""What a row does with a range of a turn's output.

trained
    The row trains it.
duplicate
    The row contains it as context; another row trains it.
absorbed
    The row lost it to drift; the span is empty.
cut
    It is beyond ``max_row_tokens``; the span is empty.
untrainable
    The row contains it as context, since it may not be trained (`LOSSES`: untrainable,
    aborted, masked, no_logprob).
no_splice_point
    The row ended before it could continue with it; the span is empty.
""")

SPAN = pa.struct(
    [
        pa.field("start", pa.int32()),
        pa.field("stop", pa.int32()),
        pa.field("turn_index", pa.int32()),
        pa.field("output_start", pa.int32()),
        pa.field("output_stop", pa.int32()),
        pa.field("kind", _names),
    ]
)
"""Row tokens ``start:stop`` are ``output_start:output_stop`` of the turn's output.

``trained``, ``duplicate`` and ``untrainable`` spans have ``stop - start == output_stop
- output_start``. ``absorbed``, ``cut`` and ``no_splice_point`` spans are empty (``start ==
stop``): the output range was lost. Their ``start`` is its position in the row, or the
position where the row was replaced or ended if that is smaller.
"""

EMPTY_KINDS = ("absorbed", "cut", "no_splice_point")
"""Kinds of spans whose tokens the row lost."""

TURNS = _schema(
    "turns",
    # one agent run; a rollout of a task
    _required("session_id", pa.string()),
    # commit order within the session; ascending, gaps allowed
    _required("turn_index", pa.int32()),
    # the ids that the engine consumed, unchanged; content ids for images (MM_ITEM)
    _required("prompt_ids", pa.large_list(pa.int32())),
    # the ids that the engine sampled, unchanged
    _required("output_ids", pa.large_list(pa.int32())),
    # one per output id. null: the engine returned none, for the output or for the token
    pa.field("output_logprobs", pa.large_list(pa.float32())),
    # as the engine names it: stop, length, abort, ...
    pa.field("finish_reason", pa.string()),
    # the request's chat messages in order. null list: route by tokens
    pa.field("messages", pa.large_list(MESSAGE)),
    # the reply as the next request is expected to repeat it. null: unknown
    pa.field("response", MESSAGE),
    # the reply calls a tool; null: unknown, taken as false
    pa.field("use_tool", pa.bool_()),
    # the reply's tool call did not parse; null: unknown, taken as false
    pa.field("ill_formed", pa.bool_()),
    # false: context only. null: true
    pa.field("trainable", pa.bool_()),
    # one per output id; false: the token is context only. null: all true
    pa.field("output_mask", pa.large_list(pa.bool_())),
    # the weights that sampled each range of output tokens
    pa.field("weight_versions", pa.large_list(WEIGHT_VERSION)),
    # the images of the prompt, in order, also in delta form. null: none
    pa.field("mm_items", pa.large_list(MM_ITEM)),
)
"""One row per model call. Only the not-null columns are required; others may be absent,
and unknown extra columns pass through."""

DELTA_FIELDS = (
    # the earlier turn of the session that shares a prefix with this prompt. null: none
    pa.field("base_turn", pa.int32()),
    # prompt[:shared_length] == (base prompt ++ base output)[:shared_length]
    _required("shared_length", pa.int32()),
    # prompt[shared_length:]
    _required("suffix_ids", pa.large_list(pa.int32())),
    # messages[:shared_messages] == (base messages ++ base response)[:shared_messages]
    pa.field("shared_messages", pa.int32()),
    # messages[shared_messages:]. null list: the turn has no messages
    pa.field("suffix_messages", pa.large_list(MESSAGE)),
)
"""Columns of the delta form. The first three replace ``prompt_ids``, the last two
replace ``messages``; all use the same base turn."""

_DELTA = {"prompt_ids": DELTA_FIELDS[:3], "messages": DELTA_FIELDS[3:]}

TURNS_DELTA = _schema(
    "turns", *(new for old in TURNS for new in _DELTA.get(old.name, (old,)))
)
"""``turns`` in delta form: its size is linear in the context, not quadratic."""

SESSIONS = _schema(
    "sessions",
    _required("session_id", pa.string()),
    # null: unscorable, never 0
    pa.field("reward", pa.float64()),
    # the task that several rollouts share
    pa.field("group_id", pa.string()),
    # null: the rollout ended without an error
    pa.field("error", pa.string()),
)
"""Metadata of sessions that the caller knows, one row per session."""

AMENDMENT_REASONS = _defined("""Reasons to amend a recorded turn.

undelivered
    Its answer reached no client: it is context only.
delivered
    A client asked again and received the answer: the turn's own ``trainable`` counts.
retried
    Its request came again although it was answered, and the gateway was asked to make
    such turns context only.
continued
    A later request contains its answer, so it was not retried: the turn's own
    ``trainable`` counts.
dropped
    Its session was dropped: it is context only.
""")

AMENDMENTS = _schema(
    "amendments",
    *_TURN,
    # one of AMENDMENT_REASONS
    _required("reason", pa.string()),
    # false: the turn is context only. null: the turn's own value counts
    pa.field("trainable", pa.bool_()),
)
"""Facts about turns that became known after they were recorded. The last line of a turn
counts. The file is in the folder of the turns, and `trajkit.read_turns` applies it."""

TURN_REWARDS = _schema(
    "turn_rewards",
    *_TURN,
    # null: unscorable, never 0
    pa.field("reward", pa.float64()),
)
"""A reward per turn, as `trajkit.learn.spread_rewards` takes it."""

SEGMENT_REWARDS = _schema(
    "segment_rewards",
    _required("session_id", pa.string()),
    # the row of the segment: under the policy segments, each row is one
    _required("row_index", pa.int32()),
    # null: unscorable, never 0
    pa.field("reward", pa.float64()),
)
"""A reward per segment, as `trajkit.learn.spread_rewards` takes it."""

ATTRIBUTION = _schema(
    "turns",
    *_TURN,
    # one per prompt token: index of the message that it renders, in the request (or in
    # its last messages, see message_tool_names). negative: structure, such as the
    # generation prompt, or a token of an earlier call. In delta form the tokens that are
    # shared with the base may be left out if their index is -1. null list: unknown
    pa.field("prompt_message_index", pa.large_list(pa.int32())),
    # one per prompt token: true for the message's text, false for the template's tokens
    # around it. In delta form shared tokens may be left out if false. null list: unknown
    pa.field("prompt_is_content", pa.large_list(pa.bool_())),
    # one per message: the tool whose output it is; null element: no tool, or unknown. A
    # list shorter than the request's messages covers the last ones, and so does
    # prompt_message_index. null list: joined by tool_call_id from the message bodies
    pa.field("message_tool_names", pa.large_list(pa.string())),
)
"""Optional columns of ``turns`` that attribute prompt tokens to messages. They are read
by `trajkit.learn.observation_weights`."""

PAYLOADS = _defined("""Extra columns of turns that have a rule of their own.

    `trajkit.validate` checks it, and `trajkit.linearize` carries them as its ``payloads``.

routed_experts
    Per token of prompt and output, or of all but the last: the experts that it was sent
    to, a list per layer. A list that could be of the output ids alone as well is of all
    ids but the last, as engines return it.
sampling_mask
    Per output id: the ids that it was drawn from after top-p and top-k, itself among
    them. Null or empty: nothing was cut off, or it is not known.
ref_logprobs, teacher_logprobs
    Log-probabilities under another model, per output id, or per token of prompt and
    output.
""")

LOSSES = _defined("""Reasons why no row trains a sampled token.

absorbed
    Its row continued after drift with the next prompt's ids in its place.
rewritten
    A later request showed another message in its place, and the turn left the tree.
cut
    It is beyond ``max_row_tokens`` of its row.
untrainable
    The turn has ``trainable = false``, or its session ended in an error.
unrouted
    The turn has an empty list of messages, which message routing skips (unless
    ``tie_break="tokens"``, as in ``faithful``).
restarted
    A later prompt of the row departs inside the prompt that opened the row. The row
    restarts there and loses what it had.
over_max_rows
    Its row exceeds the policy's ``max_rows``.
aborted
    The turn's finish_reason is ``abort``, and the policy does not train such turns.
masked
    The turn's ``output_mask`` is false for it.
no_logprob
    It has no logprob, and the policy trains no token without one.
no_splice_point
    The prompt of its turn, or of an earlier turn in the chain, has no end of turn at
    which a spliced row could continue; the row ended there.
quarantined
    Every chain with its turn contains a quarantined turn (see `LINK_REASONS`).
not_selected
    It is only in chains that the policy's ``row_selection`` omits.
refused
    Its messages continue a turn whose tokens its prompt does not continue (see
    `LINK_REASONS`).
retried
    Nothing continues its turn, and a later turn has the same parent.

A token that may not be trained at all counts as untrainable, aborted, masked or
no_logprob, in this order, before any other reason.
""")

REPORT = _schema(
    "report",
    *SESSIONS,
    _required("turns", pa.int32()),
    _required("rows", pa.int32()),
    # rows omitted because nothing in them was trained, or they had no response
    _required("rows_untrained", pa.int32()),
    # rows omitted because max_row_tokens left no response token
    _required("rows_cut", pa.int32()),
    # rows omitted because the policy's max_rows was reached
    _required("rows_over_max_rows", pa.int32()),
    # tokens that the model sampled; equals trained plus all lost_*
    _required("tokens_sampled", pa.int64()),
    # sampled tokens under the loss mask of some row, each counted once
    _required("tokens_trained", pa.int64()),
    # occurrences of sampled tokens in additional rows, as context or trained again
    _required("tokens_duplicated", pa.int64()),
    # tokens of all rows, which a forward pass computes
    _required("tokens_forward", pa.int64()),
    # the same with each shared prefix counted once
    _required("tokens_forward_shared", pa.int64()),
    *(_required(f"lost_{reason}", pa.int64()) for reason in LOSSES),
    # rows that ended before their chain did (see LOSSES), omitted rows included
    _required("rows_no_splice_point", pa.int32()),
    # turns that are in no row for that reason, also those with nothing to train
    _required("turns_no_splice_point", pa.int32()),
    # turns without messages, linked by tokens although the policy links by messages
    _required("turns_by_tokens", pa.int32()),
    # turns without a parent, except unrouted and empty ones (LINK_REASONS)
    _required("roots", pa.int32()),
    # turns that parent_by="prefix" quarantined (see LINK_REASONS)
    _required("turns_quarantined", pa.int32()),
    # retries of prompts for which no retry was continued, including the kept one
    _required("turns_unresolved", pa.int32()),
)
"""Counts per session, one row per session, also for sessions without rows."""

OBSERVATIONS = _schema(
    "observations",
    _required("session_id", pa.string()),
    # tokens with a weight, over all rows
    _required("tokens_observed", pa.int64()),
    # tokens without a weight because an earlier row has it
    _required("tokens_repeated", pa.int64()),
    # tool messages skipped because tool_names requires a name and none is known
    _required("messages_unnamed", pa.int32()),
    # turns without usable attribution
    _required("turns_skipped", pa.int32()),
    # turns whose messages were taken in full
    _required("turns_whole", pa.int32()),
)
"""Counts of `observations.observation_weights`, one row per session."""

LINK_REASONS = _defined("""How the parent of a turn was found, or why the turn is in no row.

root
    No parent: no earlier turn matches.
messages
    The generated message nearest above it in the message tree.
rewrite
    As ``messages``. Its prompt also replaced a short reply, which is now rewritten.
tokens
    The longest path at the end of a row (of any turn under ``parent_by="prefix"``) that
    is a prefix of its prompt. For turns without messages under a route by messages:
    the turn whose prompt is a proper prefix of its prompt and whose path it repeats for
    longest.
previous
    The previous call of the session.
unrouted
    It has an empty list of messages: no parent, in no row.
history_replaced
    No parent: the same agent spoke earlier, but this request does not extend its
    history.
prompts
    The chain whose last prompt is the longest prefix of its prompt.

Only under ``parent_by="prefix"``, with the parent as for ``tokens``:

ambiguous
    Quarantined: several turns match with the same tokens. The parent is the first.
superseded
    Quarantined: a retry that nothing continues; another retry was continued.
unresolved_kept, unresolved
    A retry; no turn with its prompt was continued. The first is kept, the others are
    quarantined.
unresolved_ambiguous
    Quarantined as ``ambiguous``, and also an unresolved retry.
chain_quarantined
    Not quarantined itself, but every chain with it contains a quarantined turn.
empty
    It sampled nothing: nothing continues it, and it is in no row.

Only under ``parent_by="generations"``, where ``messages`` names the last turn whose
messages and reply are the longest such beginning of the request:

refused_tokens
    Its prompt does not begin with its parent's path: in no row.
refused_truncated
    Its parent stopped for its length: in no row.
retried
    Nothing continues it, and a later turn has the same parent: in no row.
""")

SEGMENT_KINDS = _defined("""How a segment ended.

history_replaced
    The agent's next request does not extend its history.
subagent
    A sub-agent's segment: its tool call was answered, or the session ended.
final
    The main agent's last segment.
""")

LINKS = _schema(
    "links",
    *_TURN,
    # turn_index of the parent. null: none
    pa.field("parent", pa.int32()),
    pa.field("link_reason", _names),
    # rank in the policy's traversal of the session, from 0
    pa.field("order", pa.int32()),
    # the turn that replaced this one's reply, so that it does not train. null: none
    pa.field("rewritten_by", pa.int32()),
    # how its segment ended (SEGMENT_KINDS). null: the route has no segments
    pa.field("segment_kind", _names),
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

TEXT_CAUSES = _defined("""Causes of a finding, from the text of both sides.

The first that applies counts.

truncated
    The prompt ends here. If no other cause applies: its message ends here, while the
    path's continues.
same_text
    The text is equal, the tokens differ.
special_tokens
    Equal except for special tokens (or their text in ordinary tokens) and white space
    around them.
boolean
    Equal once ``True``, ``False`` and ``None`` are ``true``, ``false`` and ``null``.
tool_arguments
    Part of a JSON object with the same value in another notation.
white_space
    Equal except for white space.
reasoning_dropped
    Equal without the path's reasoning; the prompt has none.
template
    Different text, but the request repeats every earlier message and the reply
    unchanged, so the chat template made the difference. Also an empty frame for
    reasoning on one side.
rewritten
    Different text, and the request drops or changes an earlier message.
other_text
    Different text, and no messages that show who changed it.
""")

DRIFT = _schema(
    "drift",
    *_TURN,
    _required("parent", pa.int32()),
    # tokens shared by the parent's path and this prompt, from the start
    _required("lcp", pa.int32()),
    # tokens of the path beyond lcp; 0: clean
    _required("size", pa.int32()),
    pa.field("region", _names),
    # where path and prompt agree again: path[resync_path:][:resync_length] ==
    # prompt[resync_prompt:][:resync_length]. null: nowhere
    pa.field("resync_path", pa.int32()),
    pa.field("resync_prompt", pa.int32()),
    pa.field("resync_length", pa.int32()),
    # sampled tokens of the path at or beyond lcp
    _required("tokens_after_drift", pa.int32()),
    pa.field("cause", _names),
)
"""One row per turn with a parent: how its prompt departs from the parent's path."""

FINDINGS = _schema(
    "findings",
    *_TURN,
    _required("parent", pa.int32()),
    # counts the findings of the turn from 0, in the order of the prompt
    _required("finding", pa.int32()),
    _required("cause", _names),
    # tokens of the parent's path ...
    _required("path_start", pa.int32()),
    _required("path_stop", pa.int32()),
    # ... and the prompt's tokens in their place. Between findings, and from the last
    # finding to the end of the path, both have the same tokens
    _required("prompt_start", pa.int32()),
    _required("prompt_stop", pa.int32()),
    # decoded text, with special tokens
    _required("path_text", pa.string()),
    _required("prompt_text", pa.string()),
)
"""Each span where a prompt departs from the parent's path, with its cause."""

ROUNDTRIP = _schema(
    "roundtrip",
    *_TURN,
    # encode(decode(output_ids)) gives output_ids
    _required("exact", pa.bool_()),
    # the first position in the output that differs. null: exact
    pa.field("first_difference", pa.int32()),
    # number of output ids, and of ids that encoding gives
    _required("n_output", pa.int32()),
    _required("n_encoded", pa.int32()),
    # the turn's own value, and false if the text does not give the ids back
    _required("trainable", pa.bool_()),
)
"""Whether each output survives the round trip through its text, one row per turn."""

LABELS = ("sub_agent", "retry", "sibling", "rollback", "compaction", "rewrite")
"""Kinds of branches (see `analysis.label_branches`)."""

BRANCHES = _schema(
    "branches",
    *_TURN,
    _required("label", _names),
    # the earlier turn that it is compared with
    _required("other", pa.int32()),
    # first messages shared by this request and the other turn's request and reply.
    # null: unknown, tokens were compared
    pa.field("shared_messages", pa.int32()),
    # first tokens shared by this prompt and the other turn's path
    _required("shared_tokens", pa.int32()),
    # tokens of the other turn's path that this prompt does not repeat
    _required("dropped_tokens", pa.int32()),
    # the reason for the label, in words
    _required("evidence", pa.string()),
)
"""One row per turn that opens a branch."""

ROW_VERSIONS = pa.struct(
    [pa.field("first", pa.string()), pa.field("last", pa.string())]
)
"""The weights that sampled a row's first token and its last."""

ROWS = _schema(
    "rows",
    _required("session_id", pa.string()),
    # counts the session's rows from 0, in the policy's order
    _required("row_index", pa.int32()),
    pa.field("group_id", pa.string()),
    _required("input_ids", pa.large_list(pa.int32())),
    # the prompt of the call that opened the row
    _required("prompt_length", pa.int32()),
    # true where this row trains the token
    _required("loss_mask", pa.large_list(pa.bool_())),
    # null outside the mask, and for tokens without a logprob
    _required("logprobs", pa.large_list(pa.float32())),
    # ascending, never overlapping
    _required("spans", pa.large_list(SPAN)),
    # row_index of the earlier row of the session with the longest shared prefix, the
    # first on ties. null: none shares a token
    pa.field("parent_row", pa.int32()),
    # tokens shared with it; 0 without one
    _required("shared_length", pa.int32()),
    # the session's reward. null: unscorable
    pa.field("reward", pa.float64()),
    # this row's share of the rollout's trained tokens; null if the rollout trains none
    pa.field("row_weight", pa.float64()),
    # trained tokens of all rows of the session
    _required("rollout_mask_sum", pa.int64()),
    pa.field("finish_reason", pa.string()),
    pa.field("truncated", pa.bool_()),
    pa.field("use_tool", pa.bool_()),
    pa.field("ill_formed", pa.bool_()),
    # of its turns, as in LINKS
    pa.field("segment_kind", _names),
    # the turn whose path the row is, or whose output ends the row. null: unknown
    pa.field("last_turn", pa.int32()),
    # the turns in the row, in order, up to last_turn, including turns with an empty
    # output and turns lost to drift or truncation. null: unknown
    pa.field("turns", pa.large_list(pa.int32())),
    # the weights of the first and the last sampled token with known weights. null: none
    pa.field("weight_versions", ROW_VERSIONS),
    # the training step of the last turn, if turns have this column. null: unknown
    pa.field("step", pa.int64()),
    # its images, in order. An image that max_row_tokens cuts has its stop beyond the
    # row. null: none
    pa.field("mm_items", pa.large_list(MM_ITEM)),
)
"""One row per training sequence."""

OPENED_BY = ("no_parent", "drift", "branch")
"""Why a row begins at its first turn: it has no parent, its prompt drifts from its parent's
path, or another row continues its parent."""

ROW_REASONS = _schema(
    "row_reasons",
    # null: the rows do not name it
    pa.field("session_id", pa.string()),
    _required("row_index", pa.int32()),
    # the turn that opens the row: the first that no earlier row contains. null: the rows
    # do not name turns
    pa.field("first_turn", pa.int32()),
    # its parent. null: none
    pa.field("parent", pa.int32()),
    # one of OPENED_BY
    _required("opened_by", pa.string()),
    _required("tokens_trained", pa.int64()),
    # tokens of its empty spans (EMPTY_KINDS)
    _required("tokens_lost", pa.int64()),
    _required("sentence", pa.string()),
)
"""Why each row begins where it does, one line per row (see `analysis.why`)."""

OUTPUT_KINDS = ("trained", *LOSSES)
"""What a policy does with a sampled token: it trains it, or loses it for a reason."""

OUTPUT_SPANS = _schema(
    "output_spans",
    *_TURN,
    # tokens output_start:output_stop of the turn's output
    _required("output_start", pa.int32()),
    _required("output_stop", pa.int32()),
    # one of OUTPUT_KINDS
    _required("kind", _names),
    # the row that trains them, lost them, or has them as context. null: no row does
    pa.field("row_index", pa.int32()),
    # the turn whose prompt caused the loss because it departs from an earlier path.
    # null: none did
    pa.field("drift_turn", pa.int32()),
)
"""Each range of sampled tokens and what a policy does with it, in order of session, turn
and position (see `analysis.output_spans`). Every sampled token is in one line; a token that
several rows train is in one line per row."""

_SUFFIX_FIELDS = {
    "input_ids": (
        # first token of the suffixes: shared_length, or the row's first trained token
        # if that is earlier. 0 without a parent_row
        _required("suffix_start", pa.int32()),
        # input_ids[suffix_start:]
        _required("suffix_ids", pa.large_list(pa.int32())),
    ),
    # loss_mask[suffix_start:]; the tokens before are false
    "loss_mask": (_required("suffix_mask", pa.large_list(pa.bool_())),),
    # logprobs[suffix_start:]; the tokens before are null
    "logprobs": (_required("suffix_logprobs", pa.large_list(pa.float32())),),
}

ROWS_SUFFIX = _schema(
    "rows",
    *(new for field in ROWS for new in _SUFFIX_FIELDS.get(field.name, (field,))),
)
"""``rows`` in the suffix layout: only the parent_row stores the prefix that a row shares
with it and does not train. Positions (``spans``, ``prompt_length``) count from the start
of the full row."""

SIMULATION = _schema(
    "simulation",
    # the preset's name, and the choices that differ from it
    _required("policy", pa.string()),
    _required("turns", pa.int64()),
    _required("rows", pa.int64()),
    # as in REPORT, over all sessions
    *_all_required(
        pa.int64(),
        "rows_untrained rows_cut rows_over_max_rows turns_by_tokens roots "
        "turns_quarantined turns_unresolved tokens_sampled tokens_trained",
    ),
    # the sum of all lost_*
    _required("tokens_lost", pa.int64()),
    *(_required(f"lost_{reason}", pa.int64()) for reason in LOSSES),
    _required("tokens_duplicated", pa.int64()),
    # trained tokens whose row, up to them, differs from the path they were sampled after
    *_all_required(
        pa.int64(), "tokens_out_of_context tokens_forward tokens_forward_shared"
    ),
    # padding of each row to a multiple of the given length. null: no length was given
    pa.field("tokens_padding", pa.int64()),
    # tokens of the longest row; 0 without rows
    _required("longest_row", pa.int64()),
    # packs of the given size (trees that are larger are carried over several), their
    # tokens, and pairs of a token and one that it attends. null: no size was given
    pa.field("packs", pa.int64()),
    pa.field("tokens_packed", pa.int64()),
    pa.field("pairs_packed", pa.int64()),
)
"""Results of several policies on the same turns, one row per policy."""

PACKS = _schema(
    "packs",
    # a tree of tokens in pre-order, tree after tree; padding at the end
    _required("input_ids", pa.large_list(pa.int32())),
    # tokens before it on its path from the root; 0 for padding
    _required("position_ids", pa.large_list(pa.int32())),
    # where the tokens below it end: token q attends token k if k <= q < subtree_end[k].
    # A token of padding attends itself
    _required("subtree_end", pa.large_list(pa.int32())),
    # tokens without the padding
    _required("n_tokens", pa.int32()),
    # where each segment starts: the longest runs of tokens without a branch inside
    _required("segment_start", pa.large_list(pa.int32())),
    # the segment of the pack whose last token the segment follows; -1: none. In a pack
    # with a prefix such a segment follows the prefix, unless its position_ids start at 0
    _required("segment_parent", pa.large_list(pa.int32())),
    # where each tree starts
    _required("tree_start", pa.large_list(pa.int32())),
    # the session of each tree; a null element: it joins sessions of a group
    _required("tree_session", pa.large_list(pa.string())),
    # the sessions of all rows in the pack
    _required("sessions", pa.large_list(pa.string())),
    # tree_start, and n_tokens (and the end of the padding), as attention kernels for
    # packed sequences take it. null: the pack has a branch or a prefix
    pa.field("cu_seqlens", pa.large_list(pa.int32())),
    # an edge is a token that a row trains. The token of the pack that predicts it
    _required("edge_source", pa.large_list(pa.int32())),
    # its id
    _required("edge_target", pa.large_list(pa.int32())),
    # the line of its row in the table of rows
    _required("edge_row", pa.large_list(pa.int64())),
    # its position in the row
    _required("edge_position", pa.large_list(pa.int32())),
    # its share of the loss, without the advantage
    _required("edge_weight", pa.large_list(pa.float64())),
    # as recorded. null: the engine gave none
    _required("edge_logprob", pa.large_list(pa.float32())),
    # of a part of a tree: the line of the pack that has the part before it. null: the
    # pack has no prefix
    pa.field("prefix_pack", pa.int64()),
    # the prefix: the path to the pack's first token, by position. Where each token is
    # in that pack, counted from the first token of the prefix that it has itself
    _required("prefix_source", pa.large_list(pa.int32())),
    # as subtree_end, of the tokens of the prefix: q attends it if q < prefix_end
    _required("prefix_end", pa.large_list(pa.int32())),
    # its images, by position in the pack; rows that share one have it once. null: none
    pa.field("mm_items", pa.large_list(MM_ITEM)),
)
"""Rows that share prefixes as trees of tokens, one line per micro-batch. ``columns`` of
`trajkit.pack` add a list ``edge_<name>`` each."""

PACK_RULES = _defined("""What `trajkit.verify_packs` looks at.

length
    The lists of a pack's tokens, segments, trees and edges are as long as one another.
range
    Tokens, rows and positions that a pack names exist, and no id is null or negative.
max_tokens
    No pack is longer than asked.
subtree_end
    The tokens that it spans are nested: each subtree lies in that of the token above.
position
    It counts the tokens that the token attends, without itself.
padding
    A token of padding attends itself, and no token below it; no edge is there.
prefix
    It is the path to the pack's first token, in the pack that it names.
segment, tree
    They agree with subtree_end.
sessions
    The sessions of a pack and of a tree are those of its rows.
cu_seqlens
    It agrees with subtree_end.
not_trained
    Every edge is a token that its row trains, or observes.
context
    The tokens that an edge's source attends are those before the edge in its row.
target
    An edge's target is its token in the row.
weight, logprob, column
    They are those of the row.
mm_items
    The images of a pack are the rows', and its content ids are theirs.
packed_twice, not_packed
    Every token that a row trains has one edge.
""")

PACK_VIOLATIONS = _schema(
    "pack_violations",
    # the line of the pack. null: the violation is of no one pack
    pa.field("pack", pa.int64()),
    # the first token of the pack that is wrong. null: of no one token
    pa.field("token", pa.int32()),
    # the row that it is about. null: of no one row
    pa.field("session_id", pa.string()),
    pa.field("row_index", pa.int32()),
    # the position in the row. null: of no one position
    pa.field("row_token", pa.int32()),
    _required("rule", _names),
    # the values, and how many more there are in the pack
    _required("detail", pa.string()),
)
"""What breaks a rule in packs, one line per pack, row and rule."""

ASSIGNMENT = _schema(
    "assignment",
    # counts the optimizer steps from 0
    _required("step", pa.int32()),
    _required("rank", pa.int32()),
    # counts the packs of the rank in the step from 0
    _required("slot", pa.int32()),
    # the line of the pack in its table. null: an empty pack, so that ranks have as many
    pa.field("pack", pa.int64()),
    # in the unit of the costs given to `trajkit.balance`; 0 for an empty pack
    _required("cost", pa.float64()),
)
"""Which rank computes which pack, one line per pack."""

RULES = _defined("""The rules that `trajkit.verify` checks.

session
    The row's session has turns, and its rows are contiguous.
row_index
    It counts the rows of the session from 0.
length
    Mask and logprobs have the row's length, and no row exceeds ``max_row_tokens``.
null
    Ids, mask and spans have no null.
span_turn, span_kind, span_place, span_range
    A span names a turn of the session and a kind that the policy produces, follows the
    previous span without overlap, and is as long as its range of the turn's output.
span_tokens
    A span has the tokens of its output range.
untrainable
    Tokens that may not be trained are in untrainable spans, and no others are.
mask
    It is true exactly for trained spans. In rows without spans: for outputs that were
    located in the row.
logprob
    The engine's value under the mask, null elsewhere.
context
    The tokens before a trained token are those it was sampled after. For spliced rows see
    row_tokens.
trained_twice
    No sampled token is trained or lost in two spans, or in two of a row if the policy
    trains a token in several.
not_trained
    Every token that the policy promises to train is trained.
not_located
    In rows without spans: some row contains the end of the turn's prompt and its output.
row_tokens
    A row is the path of a turn (of ``last_turn``, if given), truncated at
    ``max_row_tokens``; in a spliced row, each output follows the end of its prompt.
prompt_length
    The prompt length of the row's first turn.
parent_row, shared_length
    The first earlier row with the longest shared prefix, and the prefix's length.
rollout_mask_sum, row_weight, reward, group_id
    They follow from the complete rollout.
finish_reason
    It follows from the row's calls.
turns
    They end with ``last_turn`` and contain the turns of the row's spans in order.
weight_versions
    Those of the row's first and last sampled token with known weights.
flags
    They follow from the row's turns, or have at least theirs if the policy takes those of
    the chain.
mm_items
    Each is an image of the session, its tokens are that image's content ids, and no
    other token is a content id.
policy
    The rows are those that the policy makes of the turns: tokens, mask, spans, turns and
    flags. Checked in sessions that break no other rule.
""")

VIOLATIONS = _schema(
    "violations",
    pa.field("session_id", pa.string()),
    # null: the violation concerns no single row
    pa.field("row_index", pa.int32()),
    # null: it concerns no single turn
    pa.field("turn_index", pa.int32()),
    # position of the first wrong token in the row or, without row_index, in the turn's
    # output. null: the violation concerns the row as such
    pa.field("token", pa.int32()),
    _required("rule", _names),
    # the values found and expected, and the number of tokens
    _required("detail", pa.string()),
)
"""One row per violation and contiguous range of tokens."""

ROW_CHECK_KINDS = _defined("""What `trajkit.check_rows` says of rows.

trains
    The row trains these tokens of the turn. Nothing is wrong.
mask_shifted
    The mask is that of the tokens before or after the sampled ones.
not_sampled
    Trained tokens that are no turn's output.
untrainable
    Trained tokens of a turn, or of an output, that may not be trained.
trained_twice
    Tokens that an earlier row trains too.
out_of_context
    Trained tokens that follow other tokens than they were sampled after.
logprobs_shifted
    The logprobs are those of the tokens before or after.
logprobs
    Logprobs that are not the engine's.
masked_out
    Sampled tokens that rows have and none trains.
in_no_row
    Sampled tokens that no row has.
not_found
    No turn begins like the row.
session_without_rows
    Sessions of the turns that have no row. Nothing is wrong.
""")

ROW_CHECKS = _schema(
    "row_checks",
    # the position of the row, from 0. null: the line is of no row
    pa.field("row", pa.int32()),
    # null: the row was not found
    pa.field("session_id", pa.string()),
    # null: the line concerns no single turn
    pa.field("turn_index", pa.int32()),
    # position in the row, padding included. null: of no token
    pa.field("token", pa.int32()),
    # one of ROW_CHECK_KINDS
    _required("kind", _names),
    _required("tokens", pa.int64()),
    _required("detail", pa.string()),
)
"""What rows train of what was sampled (see `trajkit.check_rows`)."""

IMPORT_REPORT = _schema(
    "import_report",
    _required("file", pa.string()),
    # position in the file: "line 3", "sample 0"
    _required("place", pa.string()),
    # null: not in the record
    pa.field("session_id", pa.string()),
    # one of LEFT_OUT and KEPT in trajkit.importers.findings
    _required("problem", _names),
    # true if the record still became a turn
    _required("kept", pa.bool_()),
    _required("detail", pa.string()),
)
"""Records that an import dropped or changed, one row per record and problem."""
