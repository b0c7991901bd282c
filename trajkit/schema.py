"""The Arrow schema of every table, column by column, with unit and null rule.

Token ids are int32. Positions and lengths count tokens. Unknown is null, never 0.0 or
-1; a null logprob has 0.0 in its bytes, so that a consumer of the raw buffer gets a
finite number. Lists are ``large_list``; small sets of names are dictionary-encoded.

The schema version travels in the table metadata under ``trajkit.version``; a table that
lost its metadata is taken to be of the present version.
"""

import pyarrow as pa

SCHEMA_VERSION = 2
KEY_BYTES = 16
# of a key: the digest of what the message says, whatever the types of its numbers
VALUE_BYTES = 12

_names = pa.dictionary(pa.int8(), pa.string())


def _schema(kind: str, *fields: pa.Field) -> pa.Schema:
    return pa.schema(
        fields,
        metadata={"trajkit.table": kind, "trajkit.version": str(SCHEMA_VERSION)},
    )


def _required(name: str, type_: pa.DataType) -> pa.Field:
    return pa.field(name, type_, nullable=False)


MESSAGE = pa.struct(
    [
        # digest of the body: each key has one body (trajkit.turns.messages)
        pa.field("key", pa.binary(KEY_BYTES)),
        pa.field("role", pa.string()),
        # canonical JSON; null where the session showed this very body before
        pa.field("body", pa.string()),
    ]
)
"""One chat message. ``body`` is null where the session showed the same body before."""

WEIGHT_VERSION = pa.struct(
    [
        pa.field("version", pa.string()),
        pa.field("start", pa.int32()),
        pa.field("stop", pa.int32()),
    ]
)
"""Output tokens ``start:stop`` were sampled with the weights ``version``."""

SPAN_KINDS = (
    "trained",
    "duplicate",
    "absorbed",
    "cut",
    "untrainable",
    "no_splice_point",
)
"""What a row does with a stretch of a turn's output.

trained
    The row trains it.
duplicate
    It stands in the row as context; another row claims it.
absorbed
    The row claimed it and lost it to drift; the piece is empty.
cut
    The row claimed it and it lies beyond ``max_row_tokens``; the piece is empty.
untrainable
    It stands in the row as context; it may not be trained (`LOSSES`: untrainable,
    aborted, masked, no_logprob).
no_splice_point
    The row would have gone on with it, but ended before; the piece is empty.
"""

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

``trained``, ``duplicate`` and ``untrainable`` pieces have ``stop - start == output_stop
- output_start``. ``absorbed``, ``cut`` and ``no_splice_point`` pieces are empty (``start ==
stop``): the output range is what was lost, ``start`` the place where it would have
stood, or where the row was replaced or ended if that is before it.
"""

EMPTY_KINDS = ("absorbed", "cut", "no_splice_point")
"""Pieces that say what a row lost."""

TURNS = _schema(
    "turns",
    # one agent run; a rollout of a task
    _required("session_id", pa.string()),
    # commit order within the session; ascending, gaps allowed
    _required("turn_index", pa.int32()),
    # exactly what the engine consumed
    _required("prompt_ids", pa.large_list(pa.int32())),
    # exactly what it sampled
    _required("output_ids", pa.large_list(pa.int32())),
    # one per output id. null list: the engine gave none; null element: none for that
    # token
    pa.field("output_logprobs", pa.large_list(pa.float32())),
    # the engine's own word: stop, length, abort, ...
    pa.field("finish_reason", pa.string()),
    # the request's chat messages in order. null list: route by tokens
    pa.field("messages", pa.large_list(MESSAGE)),
    # the reply as the next request is expected to echo it. null: none
    pa.field("response", MESSAGE),
    # the reply calls a tool; null: unknown, taken as false
    pa.field("use_tool", pa.bool_()),
    # the reply's tool call did not parse; null: unknown, taken as false
    pa.field("ill_formed", pa.bool_()),
    # false: context only. null: true
    pa.field("trainable", pa.bool_()),
    # one per output id; false: the token is context only. null: all true
    pa.field("output_mask", pa.large_list(pa.bool_())),
    # which weights sampled which output tokens
    pa.field("weight_versions", pa.large_list(WEIGHT_VERSION)),
)
"""One row per model call. Only the not-null columns are required; others may be absent,
and unknown extra columns pass through."""

DELTA_FIELDS = (
    # the earlier turn of the session that this prompt starts like. null: none
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
"""The delta form of ``turns``: the first three stand for ``prompt_ids``, the last two,
against the same base, for ``messages``."""

TURNS_DELTA = _schema(
    "turns",
    *(TURNS.field(name) for name in ("session_id", "turn_index")),
    *DELTA_FIELDS[:3],
    *(TURNS.field(name) for name in ("output_ids", "output_logprobs", "finish_reason")),
    *DELTA_FIELDS[3:],
    *(
        TURNS.field(name)
        for name in (
            "response",
            "use_tool",
            "ill_formed",
            "trainable",
            "output_mask",
            "weight_versions",
        )
    ),
)
"""``turns`` in delta form: linear in the context instead of quadratic."""

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
"""What the caller knows of each session, one row per session."""

AMENDMENT_REASONS = ("undelivered", "delivered", "dropped")
"""What became known of a turn after it was recorded.

undelivered
    Its answer reached no client: it is context only.
delivered
    Its answer reached a client after all, which asked again: it is what it says itself.
dropped
    Its session was dropped: it is context only.
"""

AMENDMENTS = _schema(
    "amendments",
    _required("session_id", pa.string()),
    _required("turn_index", pa.int32()),
    # one of AMENDMENT_REASONS
    _required("reason", pa.string()),
    # false: the turn is context only. null: as the turn itself says
    pa.field("trainable", pa.bool_()),
)
"""What became known of turns after they were recorded; of several lines of one turn the
last one counts. It lies beside the turns, and `trajkit.read_turns` folds it in."""

TURN_REWARDS = _schema(
    "turn_rewards",
    _required("session_id", pa.string()),
    _required("turn_index", pa.int32()),
    # null: unscorable, never 0
    pa.field("reward", pa.float64()),
)
"""A reward per turn, as `trajkit.training.spread_rewards` takes it."""

ATTRIBUTION = _schema(
    "turns",
    _required("session_id", pa.string()),
    _required("turn_index", pa.int32()),
    # one per prompt token: the message that it renders, counted from the first of the
    # request (or of the tail, see message_tool_names). negative: structure, such as the
    # generation prompt, or rendered for an earlier call. null list: unknown
    pa.field("prompt_message_index", pa.large_list(pa.int32())),
    # one per prompt token: it is the message's text, not the template's scaffold around
    # it. null list: unknown
    pa.field("prompt_is_content", pa.large_list(pa.bool_())),
    # one per message: the tool whose output it is; null element: none, or unknown. Where
    # the list is shorter than the request's messages, prompt_message_index counts the
    # last messages only. null list: joined by tool_call_id from the message bodies
    pa.field("message_tool_names", pa.large_list(pa.string())),
)
"""Optional columns of ``turns``, in either form, that say what each prompt token
renders. `trajkit.observations.observation_weights` reads them."""

LOSSES = (
    "absorbed",
    "rewritten",
    "cut",
    "untrainable",
    "unrouted",
    "restarted",
    "over_max_rows",
    "aborted",
    "masked",
    "no_logprob",
    "no_splice_point",
    "quarantined",
    "not_selected",
    "refused",
    "retried",
)
"""Why a sampled token is in no row's loss.

absorbed
    The row that claimed it replaced it by what the next prompt had in its place.
rewritten
    A later request showed another message in its place, and the turn left the tree.
cut
    It lies beyond ``max_row_tokens`` of the row that claimed it.
untrainable
    The turn says ``trainable = false``, or its session ended in an error.
unrouted
    The turn had a list of messages with nothing in it, which message routing passes
    over (unless tokens decide among equals, as they do for ``faithful``).
restarted
    A later prompt of the row departs inside the prompt that opened it: the row begins
    anew there, without what it had.
over_max_rows
    Its row is one that ``max_rows`` of the policy leaves out.
aborted
    The turn's finish_reason is ``abort``, and the policy takes such turns for context.
masked
    The turn's ``output_mask`` says so.
no_logprob
    The engine gave no logprob for it, and the policy trains no token without.
no_splice_point
    Its prompt, or that of a turn before it in its chain, had no end of turn at which a
    row of raw replies could go on; the row ended there.
quarantined
    Every chain that the turn stands in holds one that was set aside (see `LINK_REASONS`).
not_selected
    It is in chains that the policy's ``row_selection`` leaves out.
refused
    Its tokens do not go on from what its messages go on from (see `LINK_REASONS`).
retried
    A later call went on from the same call, and none from this one.

What may not be trained at all is counted as that, whatever else befell it: untrainable
before aborted before masked before no_logprob, and these before all others.
"""

REPORT = _schema(
    "report",
    *SESSIONS,
    _required("turns", pa.int32()),
    _required("rows", pa.int32()),
    # rows left out because nothing in them was trained, or they had no response
    _required("rows_untrained", pa.int32()),
    # rows left out because max_row_tokens left no response token
    _required("rows_cut", pa.int32()),
    # rows left out because the policy's max_rows leaves no room for them
    _required("rows_over_max_rows", pa.int32()),
    # tokens that the model sampled; equals trained plus all lost_*
    _required("tokens_sampled", pa.int64()),
    # sampled tokens that are under the loss mask of some row, each counted once
    _required("tokens_trained", pa.int64()),
    # sampled tokens that stand in further rows, as context or trained again
    _required("tokens_duplicated", pa.int64()),
    # tokens of all rows: what a forward pass computes
    _required("tokens_forward", pa.int64()),
    # the same with each shared prefix counted once
    _required("tokens_forward_shared", pa.int64()),
    *(_required(f"lost_{reason}", pa.int64()) for reason in LOSSES),
    # rows that ended before their chain of turns did (see LOSSES), left out or not
    _required("rows_no_splice_point", pa.int32()),
    # turns that are in no row for this, also those with nothing to train
    _required("turns_no_splice_point", pa.int32()),
    # turns without messages, which a policy that routes by messages routed by tokens
    _required("turns_by_tokens", pa.int32()),
    # turns without a parent, except those that the links leave out (LINK_REASONS:
    # unrouted, empty)
    _required("roots", pa.int32()),
    # turns that the route "prefix" set aside (see LINK_REASONS)
    _required("turns_quarantined", pa.int32()),
    # retries of a prompt of which none was continued, the one that is kept included
    _required("turns_unresolved", pa.int32()),
)
"""What became of each session, one row per session, also where no row came out."""

OBSERVATIONS = _schema(
    "observations",
    _required("session_id", pa.string()),
    # tokens with a weight, over all rows
    _required("tokens_observed", pa.int64()),
    # tokens that would have one, had an earlier row not
    _required("tokens_repeated", pa.int64()),
    # tool messages passed over because no name is known and tool_names asks for one
    _required("messages_unnamed", pa.int32()),
    # turns without attribution that can be used
    _required("turns_skipped", pa.int32()),
    # turns of which whole messages were taken
    _required("turns_whole", pa.int32()),
)
"""What `observations.observation_weights` did with each session, one row per session."""

LINK_REASONS = (
    "root",
    "messages",
    "rewrite",
    "tokens",
    "previous",
    "unrouted",
    "history_replaced",
    "prompts",
    "ambiguous",
    "superseded",
    "unresolved_kept",
    "unresolved",
    "unresolved_ambiguous",
    "chain_quarantined",
    "empty",
    "refused_tokens",
    "refused_truncated",
    "retried",
)
"""How a turn was given its parent (or none), and why it is in no row.

root
    Nothing that the policy compares with comes before it.
messages
    The generated message nearest above it in the message tree.
rewrite
    As ``messages``, and its prompt took the place of a short reply, which was rewritten.
tokens
    The longest row end (of any turn, under the route ``"prefix"``) that is a prefix of
    its prompt. Of a turn without messages, under a route by messages: the turn whose
    prompt its own longer prompt begins with, and whose prompt and output it repeats for
    longest.
previous
    The previous call of the session.
unrouted
    It has a list of messages with nothing in it: not placed, in no row.
history_replaced
    None, though its agent spoke before: it does not go on where that agent stood.
prompts
    The chain whose last prompt is the longest prefix of its prompt.

Under the route ``"prefix"``, of turns set aside or not (the parent is as for
``tokens``):

ambiguous
    Set aside: several turns are that prefix with the same tokens. The parent is the
    first of them.
superseded
    Set aside: a retry that was not gone on from, beside one that was.
unresolved_kept, unresolved
    A retry; no turn with its prompt was gone on from. The first of them is kept, the
    others are set aside.
unresolved_ambiguous
    Set aside as ``ambiguous``, and such a retry as well.
chain_quarantined
    Not set aside, but every chain that it stands in holds a turn that is.
empty
    It sampled nothing: no turn continues it, and it is in no row.

Under the route ``"generations"`` (``messages`` is then the last turn whose messages and
reply are the first messages of the request, for as many as can be):

refused_tokens
    Its prompt does not begin with what that turn held, the parent: in no row.
refused_truncated
    That turn, the parent, stopped for its length: in no row.
retried
    No turn goes on from it, and a later one goes on from the same parent: in no row.
"""

SEGMENT_KINDS = ("history_replaced", "subagent", "final")
"""How an agent's run of calls ended.

history_replaced
    The agent went on with other messages than those that it had been shown.
subagent
    It was sent out by a tool call, and that call was answered or the session ended.
final
    It is the main agent's last run.
"""

LINKS = _schema(
    "links",
    _required("session_id", pa.string()),
    _required("turn_index", pa.int32()),
    # the turn_index of the turn that this one is compared with. null: none
    pa.field("parent", pa.int32()),
    pa.field("link_reason", _names),
    # rank in the policy's own traversal of the session, from 0
    pa.field("order", pa.int32()),
    # the turn whose rewrite took this one out of training. null: none
    pa.field("rewritten_by", pa.int32()),
    # how the run of calls that it is in ended (SEGMENT_KINDS). null: the route knows no
    # agents
    pa.field("segment_kind", _names),
)
"""One row per turn: which turn it continues."""

REGIONS = ("none", "last_reply", "earlier_reply", "prompt")
"""Where drift starts in what was held: nowhere, in the parent's output, in an output
before it, or elsewhere."""

CAUSES = (
    "clean",
    "truncated",
    "head_dropped",
    "middle_edited",
    "tail_changed",
    "diverged",
)
"""What drift looks like from the token ids alone (see `trajkit.classify_drift`)."""

TEXT_CAUSES = (
    "truncated",
    "same_text",
    "special_tokens",
    "boolean",
    "tool_arguments",
    "white_space",
    "reasoning_dropped",
    "template",
    "rewritten",
    "other_text",
)
"""What a stretch of drift is once both sides are decoded; the first that holds.

truncated
    The prompt ends here; or, of what no other name fits, its message does, while the
    one of held goes on.
same_text
    The text is the same, in other tokens.
special_tokens
    The same but for special tokens (there, or spelled out in ordinary ones) and white
    space around them.
boolean
    The same once ``True``, ``False`` and ``None`` are ``true``, ``false`` and ``null``.
tool_arguments
    Part of a JSON object that is the same value, written otherwise.
white_space
    The same but for white space.
reasoning_dropped
    The same once the reasoning of held is left out; the prompt has none.
template
    Other text, though the request shows every message that was shown before, the reply
    included, as it was: so what renders it made the difference. Also an empty frame for
    reasoning that one side has.
rewritten
    Other text, and the request leaves out or changes a message that was shown before.
other_text
    Other text, and no messages to tell who changed it.
"""

DRIFT = _schema(
    "drift",
    _required("session_id", pa.string()),
    _required("turn_index", pa.int32()),
    _required("parent", pa.int32()),
    # tokens that held (parent prompt ++ parent output) and this prompt share
    _required("lcp", pa.int32()),
    # held tokens beyond lcp; 0: clean
    _required("size", pa.int32()),
    pa.field("region", _names),
    # where replay and held are in step again: held[resync_path:][:resync_length] ==
    # prompt[resync_prompt:][:resync_length]. null: nowhere
    pa.field("resync_path", pa.int32()),
    pa.field("resync_prompt", pa.int32()),
    pa.field("resync_length", pa.int32()),
    # sampled tokens of held that lie at or beyond lcp
    _required("tokens_after_drift", pa.int32()),
    pa.field("cause", _names),
)
"""One row per turn with a parent: how its prompt departs from what was held."""

FINDINGS = _schema(
    "findings",
    _required("session_id", pa.string()),
    _required("turn_index", pa.int32()),
    _required("parent", pa.int32()),
    # counts the findings of the turn from 0, in the order of the prompt
    _required("finding", pa.int32()),
    _required("cause", _names),
    # tokens of held (parent prompt ++ parent output) ...
    _required("path_start", pa.int32()),
    _required("path_stop", pa.int32()),
    # ... that stand in the prompt as these. Between one finding and the next, and from
    # the last one to the end of held, both have the same tokens
    _required("prompt_start", pa.int32()),
    _required("prompt_stop", pa.int32()),
    # decoded, special tokens spelled out
    _required("path_text", pa.string()),
    _required("prompt_text", pa.string()),
)
"""Each stretch where a prompt departs from what was held, with its cause."""

ROUNDTRIP = _schema(
    "roundtrip",
    _required("session_id", pa.string()),
    _required("turn_index", pa.int32()),
    # encode(decode(output_ids)) gives output_ids
    _required("exact", pa.bool_()),
    # the first position in the output where it does not. null: exact
    pa.field("first_difference", pa.int32()),
    # output ids, and ids that encoding gives
    _required("n_output", pa.int32()),
    _required("n_encoded", pa.int32()),
    # the turn's own, and false where the text does not give the ids back
    _required("trainable", pa.bool_()),
)
"""Whether the text of each output gives its ids back, one row per turn."""

LABELS = ("sub_agent", "retry", "sibling", "rollback", "compaction", "rewrite")
"""Why a turn does not simply go on where its agent was (see `analysis.label_branches`).
"""

BRANCHES = _schema(
    "branches",
    _required("session_id", pa.string()),
    _required("turn_index", pa.int32()),
    _required("label", _names),
    # the earlier turn that it is held against
    _required("other", pa.int32()),
    # messages that this request and the other turn (its request and its reply) share at
    # their start. null: unknown, tokens tell
    pa.field("shared_messages", pa.int32()),
    # the same of tokens: of this prompt and the other's prompt and output
    _required("shared_tokens", pa.int32()),
    # tokens of the other's prompt and output that this prompt does not show as they
    # were
    _required("dropped_tokens", pa.int32()),
    # what tells it, in words
    _required("evidence", pa.string()),
)
"""The turns that open a branch, one row each."""

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
    # null off the mask and where the engine gave none
    _required("logprobs", pa.large_list(pa.float32())),
    # ascending, never overlapping
    _required("spans", pa.large_list(SPAN)),
    # the row_index of the earlier row of the session that starts like this one for
    # longest, the first of equals. null: none shares a token
    pa.field("parent_row", pa.int32()),
    # tokens shared with it; 0 without one
    _required("shared_length", pa.int32()),
    # as given for the session. null: unscorable
    pa.field("reward", pa.float64()),
    # this row's share of the rollout's trained tokens; null where the rollout trains
    # none
    pa.field("row_weight", pa.float64()),
    # trained tokens of all rows of the session
    _required("rollout_mask_sum", pa.int64()),
    pa.field("finish_reason", pa.string()),
    pa.field("truncated", pa.bool_()),
    pa.field("use_tool", pa.bool_()),
    pa.field("ill_formed", pa.bool_()),
    # of its turns, as in LINKS
    pa.field("segment_kind", _names),
    # the turn whose prompt and output the row is, or ends with. null: unknown
    pa.field("last_turn", pa.int32()),
    # the turns in the row, in order, up to last_turn: those with an empty output, and
    # those that the row lost to drift or a cut, included. null: unknown
    pa.field("turns", pa.large_list(pa.int32())),
    # the weights that sampled the first and the last sampled token of the row, of those
    # whose weights are known. null: of none
    pa.field("weight_versions", ROW_VERSIONS),
    # of the last turn, if turns have a column of this name: the training step that the
    # run belongs to. null: unknown
    pa.field("step", pa.int64()),
)
"""One row per training sequence."""

_SUFFIX_FIELDS = {
    "input_ids": (
        # where the suffixes begin: shared_length, or the first token that the row
        # trains, where that comes before. 0 without a parent_row
        _required("suffix_start", pa.int32()),
        # input_ids[suffix_start:]
        _required("suffix_ids", pa.large_list(pa.int32())),
    ),
    # loss_mask[suffix_start:]; what comes before is false
    "loss_mask": (_required("suffix_mask", pa.large_list(pa.bool_())),),
    # logprobs[suffix_start:]; what comes before is null
    "logprobs": (_required("suffix_logprobs", pa.large_list(pa.float32())),),
}

ROWS_SUFFIX = _schema(
    "rows",
    *(new for field in ROWS for new in _SUFFIX_FIELDS.get(field.name, (field,))),
)
"""``rows`` in the layout "suffix": what a row shares with its parent_row, and does not
train, stands there only. Positions (``spans``, ``prompt_length``) are still those of the
whole row."""

SIMULATION = _schema(
    "simulation",
    # its name, and the choices that differ from the preset of that name
    _required("policy", pa.string()),
    _required("turns", pa.int64()),
    _required("rows", pa.int64()),
    # as in REPORT, over all sessions
    _required("rows_untrained", pa.int64()),
    _required("rows_cut", pa.int64()),
    _required("rows_over_max_rows", pa.int64()),
    _required("turns_by_tokens", pa.int64()),
    _required("roots", pa.int64()),
    _required("turns_quarantined", pa.int64()),
    _required("turns_unresolved", pa.int64()),
    _required("tokens_sampled", pa.int64()),
    _required("tokens_trained", pa.int64()),
    # the sum of all lost_*
    _required("tokens_lost", pa.int64()),
    *(_required(f"lost_{reason}", pa.int64()) for reason in LOSSES),
    _required("tokens_duplicated", pa.int64()),
    # trained where the row up to the token is not what it was sampled after
    _required("tokens_out_of_context", pa.int64()),
    _required("tokens_forward", pa.int64()),
    _required("tokens_forward_shared", pa.int64()),
    # what brings each row to a multiple of the given length. null: none was given
    pa.field("tokens_padding", pa.int64()),
    # tokens of the longest row; 0 without rows
    _required("longest_row", pa.int64()),
)
"""What policies make of the same turns, one row per policy."""

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
)
"""Rows that share prefixes as trees of tokens, one line per micro-batch. ``columns`` of
`trajkit.pack` add a list ``edge_<name>`` each."""

PACK_RULES = (
    "length",
    "range",
    "max_tokens",
    "subtree_end",
    "position",
    "padding",
    "prefix",
    "segment",
    "tree",
    "sessions",
    "cu_seqlens",
    "not_trained",
    "context",
    "target",
    "weight",
    "logprob",
    "column",
    "packed_twice",
    "not_packed",
)
"""What `trajkit.verify_packs` looks at.

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
segment, tree, cu_seqlens
    They agree with subtree_end.
sessions
    The sessions of a pack and of a tree are those of its rows.
not_trained
    Every edge is a token that its row trains, or observes.
context
    The tokens that an edge's source attends are those before the edge in its row.
target
    An edge's target is its token in the row.
weight, logprob, column
    They are those of the row.
packed_twice, not_packed
    Every token that a row trains has one edge.
"""

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

RULES = (
    "session",
    "row_index",
    "length",
    "null",
    "span_turn",
    "span_kind",
    "span_place",
    "span_range",
    "span_tokens",
    "untrainable",
    "mask",
    "logprob",
    "context",
    "trained_twice",
    "not_trained",
    "not_located",
    "row_tokens",
    "prompt_length",
    "parent_row",
    "shared_length",
    "rollout_mask_sum",
    "row_weight",
    "reward",
    "group_id",
    "finish_reason",
    "turns",
    "weight_versions",
    "flags",
)
"""What `trajkit.verify` looks at.

session
    The row's session has turns, and its rows follow one another.
row_index
    It counts the session's rows from 0.
length
    Mask and logprobs are as long as the row, and no row is longer than it may be.
null
    Ids, mask and pieces have no null.
span_turn, span_kind, span_place, span_range
    A piece names a turn of the session and a kind that the policy makes, ascends within
    the row without overlap, and is as long as its range of the turn's output.
span_tokens
    A piece holds the tokens that it says.
untrainable
    What may not be trained is not claimed, and only that is called so.
mask
    It is true where a piece is trained (in rows without pieces: where a located turn's
    output stands), and only there.
logprob
    The engine's own on the mask; null off it.
context
    What precedes a trained token is what it was sampled after. Not asked of a policy
    that splices.
trained_twice
    No sampled token is claimed by two rows or pieces.
not_trained
    Every token that the policy promises to train is trained.
not_located
    In rows without pieces: the turn's prompt's end and its output stand in some row.
row_tokens
    A row is the prompt and the output of a turn (``last_turn``, where it is given), cut
    where rows are cut; of a policy that splices, its turns' outputs with the stretches
    between them.
prompt_length
    The prompt of the call that opened the row.
parent_row, shared_length
    The first of the earlier rows that start like this one for longest, and for how many
    tokens.
rollout_mask_sum, row_weight, reward, group_id
    Of the whole rollout.
finish_reason, flags
    Of the row's calls.
turns
    They end with ``last_turn``, and have the turns of the row's pieces in this order.
weight_versions
    Of the row's first and last sampled token whose weights are known.
"""

VIOLATIONS = _schema(
    "violations",
    pa.field("session_id", pa.string()),
    # null: the violation is of no one row
    pa.field("row_index", pa.int32()),
    # null: of no one turn
    pa.field("turn_index", pa.int32()),
    # the first token that is wrong: its position in the row or, without row_index, in
    # the turn's output. null: of the whole row
    pa.field("token", pa.int32()),
    _required("rule", _names),
    # the values, and for how many tokens
    _required("detail", pa.string()),
)
"""What breaks a rule in rows, one row per violation and run of tokens."""

IMPORT_REPORT = _schema(
    "import_report",
    _required("file", pa.string()),
    # where in the file: "line 3", "sample 0"
    _required("place", pa.string()),
    # null: the record does not say
    pa.field("session_id", pa.string()),
    # one of trajkit.importers.findings's LEFT_OUT and KEPT
    _required("problem", _names),
    # whether the record still gave a turn
    _required("kept", pa.bool_()),
    _required("detail", pa.string()),
)
"""What an import could not take, or not whole: one row per record and problem."""
