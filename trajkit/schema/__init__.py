"""The Arrow schema of every table, column by column, with unit, null rule and rules.

Token ids are int32. Positions and lengths count tokens. Unknown is null, never 0.0 or
-1; a null logprob has 0.0 in its bytes, so that a consumer of the raw buffer gets a
finite number. Lists are ``large_list``; small sets of names are dictionary-encoded.

The schema version travels in the table metadata under ``trajkit.version``; a table that
lost its metadata is read as the current version. Turns of version 2 have other message
keys, which are computed again from the bodies (`trajkit.turns.delta.renew_keys`).
"""

from functools import partial

from trajkit.schema.engine import SCHEMA_VERSION as SCHEMA_VERSION
from trajkit.schema.engine import SCHEMA_VERSIONS as SCHEMA_VERSIONS
from trajkit.schema.engine import (
    defined,
    described,
    every_token_counted,
    meanings,
    one_of,
    spans_in_order,
    struct,
)

_TURN = """session_id text
turn_index int32"""
_IN_ORDER = """session_id text (contiguous)
turn_index int32 (ascending)"""

# Turns: recorded model calls, and what is learned later.

KEY_BYTES = 16

MESSAGE = struct("""message
key key?: digest of the message: the same for messages that are == (trajkit.turns.messages)
role text?
body text?: JSON with sorted keys; null: the last body that the session has of this key
""")
"""One chat message. A repeated message has its key and a null ``body``."""

WEIGHT_VERSION = struct("""versions
version text?
start, stop int32?
""")
"""Output tokens ``start:stop`` were sampled with the weights ``version``."""

MM_ITEM = struct("""image
kind text?: what it is: image
hash text?: SHA-256 of the original bytes, 64 hexadecimal digits; a log has them in a file
    of this name in its folder images
token_id int32?: the id that the engine has at each of its tokens
start, stop int32?: its tokens are start:stop of the prompt or row
""")
"""An image in a prompt.

Its tokens are content ids: ids beyond every vocabulary that depend on kind, hash and number
of tokens (`trajkit.turns.content_ids`), so every stage that compares tokens compares images
too. `trajkit.turns.engine_ids` gives the ids that the engine consumed.
"""


_COMMIT = """session_id text (contiguous): one agent run; a rollout of a task
turn_index int32 (ascending): commit order within the session; gaps are allowed"""
_OUTPUT = """output_ids [int32] (token_ids): the ids that the engine sampled, unchanged
output_logprobs [float32]? (logprob_per_output): one per output id. null: the engine
    returned none, for the output or for the token
finish_reason text?: as the engine names it: stop, length, abort, ..."""
_REPLY = """response message? (reply_has_key): the reply as the next request is expected to
    repeat it. null: unknown
use_tool bool?: the reply calls a tool; null: unknown, taken as false
ill_formed bool?: the reply's tool call did not parse; null: unknown, taken as false
trainable bool?: false: context only. null: true
output_mask [bool]? (mask_per_output): one per output id; false: the token is context only.
    null: all true
weight_versions [versions]? (tile_outputs): the weights that sampled each range of output
    tokens
mm_items [image]?: the images of the prompt, in order, also in delta form. null: none"""

TURNS = described(f"""turns (not_empty)
{_COMMIT}
prompt_ids [int32] (token_ids): the ids that the engine consumed, unchanged; content ids for
    images (MM_ITEM)
{_OUTPUT}
messages [message]? (no_key_missing): the request's chat messages in order. null list: route
    by tokens
{_REPLY}
""")
"""One row per model call. Only the not-null columns are required; others may be absent,
and unknown extra columns pass through."""

TURNS_DELTA = described(f"""turns (delta, not_empty)
{_COMMIT}
base_turn int32?: the earlier turn of the session that shares a prefix with this prompt.
    null: none
shared_length int32: prompt[:shared_length] == (base prompt ++ base output)[:shared_length]
suffix_ids [int32] (token_ids): prompt[shared_length:]
{_OUTPUT}
shared_messages int32?: messages[:shared_messages] == (base messages ++ base
    response)[:shared_messages]
suffix_messages [message]? (no_key_missing): messages[shared_messages:]. null list: the turn
    has no messages
{_REPLY}
""")
"""``turns`` in delta form: its size is linear in the context, not quadratic.

The columns of prompts take the place of ``prompt_ids``, those of messages that of
``messages``; all use the same base turn."""

ROUTING = described(f"""turns
{_TURN}
request_id text?: the source's name of the call
parent_resolution text?: what was known of the call's parent when the request came in: root,
    resolved or unresolved. null: nothing is recorded
parent_request text?: the request_id of the parent, if it is resolved
scored bool?: true: its reply was scored, and nothing after it counts. One turn of a session
tools_key text?: what `trajkit.turns.tools_key` gives of the tools that the request offers.
    null: unknown, the same for all such turns
""")
"""Optional columns of ``turns`` that tell which turn continues which. ``nemo`` follows
recorded parents, and prefixes in sessions without them; ``graph`` compares tools."""

AGENTS = described(f"""turns
{_TURN}
agent_id text?: the agent that called. null: the main agent, or one without a name
call_kind text?: agent or transcript: a call in the history of its agent, as null. Any other
    is a side call, which the harness made for itself
started_by_turn int32? (another, turn_exists): the turn whose reply started the agent with a
    tool call. null: none, or unknown
started_by_call text?: the id of that tool call
""")
"""Optional columns of ``turns`` that tell which agent called. A turn that has none of them
belongs to its parent's agent if that has no name either, else to the main agent."""

ATTRIBUTION = described(f"""turns
{_TURN}
prompt_message_index [int32]?: one per prompt token, or one for each of the last: index of
    the message that it renders, in the request (or in its last messages, see
    message_tool_names). negative: structure, such as the generation prompt, or a token of
    an earlier call, as are the tokens before a shorter list. null list: unknown
prompt_is_content [bool]?: for the same tokens: true for the message's text, false for the
    template's tokens around it. null list: unknown
message_tool_names [text]?: one per message: the tool whose output it is; null element: no
    tool, or unknown. A list shorter than the request's messages covers the last ones, and
    so does prompt_message_index. null list: joined by tool_call_id from the message bodies
""")
"""Optional columns of ``turns`` that attribute prompt tokens to messages. They are read
by `trajkit.learn.observation_weights`."""

AMENDMENT_REASONS = defined("""Reasons to amend a recorded turn.

undelivered: Its answer reached no client: it is context only.
delivered: A client asked again and received the answer: the turn's own ``trainable``
    counts.
dropped: Its session was dropped: it is context only.
""")

AMENDMENTS = described(f"""amendments
{_TURN}
reason text: one of AMENDMENT_REASONS
trainable bool?: false: the turn is context only. null: the turn's own value counts
""")
"""Facts about turns that became known after they were recorded. The last line of a turn
counts. The file is in the folder of the turns, and `trajkit.read_turns` applies it."""

PAYLOADS = defined("""Extra columns of turns that have a rule of their own.

    `trajkit.validate` checks it, and `trajkit.linearize` carries them as its ``payloads``.

routed_experts: Per token of prompt and output, or of all but the last: the experts that it
    was sent to, a list per layer. A list that could be of the output ids alone as well is
    of all ids but the last, as engines give it. A later call's counts for the last id.
sampling_mask: Per output id: the ids that it was drawn from after top-p and top-k, itself
    among them. Null or empty: nothing was cut off, or it is not known.
ref_logprobs, teacher_logprobs: Log-probabilities under another model, per output id, or per
    token of prompt and output.
""")

# Sessions: their metadata, rewards, and counts per session or policy.

_SESSION = """session_id text (one_row_per_session)
reward float64? (finite): null: unscorable, never 0
group_id text?: the task that several rollouts share
error text?: null: the rollout ended without an error"""

SESSIONS = described(f"""sessions
{_SESSION}
""")
"""Metadata of sessions that the caller knows, one row per session."""

TURN_REWARDS = described(f"""turn_rewards
{_TURN}
reward float64?: null: unscorable, never 0
""")
"""A reward per turn, as `trajkit.learn.spread_rewards` takes it."""

LOSS_MEANINGS = meanings("""Reasons why no row trains a sampled token, as people read them.

absorbed: Its row continued with the next prompt's ids instead: drift, or a call that
    was tried again.
rewritten: A later request showed another message in its place.
cut: It is beyond max_row_tokens.
untrainable: Its turn has trainable = false, or its session ended in an error.
unrouted: Its call has no messages, and the policy compares messages.
restarted: A later prompt changed the row's first prompt, so the row was begun again.
over_max_rows: Its row is beyond the policy's max_rows.
aborted: Its call was aborted.
masked: The turn's output_mask excludes it.
no_logprob: It has no logprob, and the policy needs one.
no_splice_point: Its row ended before it: a prompt has no end of turn from which to
    continue.
quarantined: Every chain with its call has a call that could continue two others, or a
    retry.
not_selected: Its chain is not among those that become rows.
refused: The prompt of its call does not continue the tokens of the parent.
retried: Its call was tried again later, and its own reply was not used.

A token that may not be trained at all counts as untrainable, aborted, masked or no_logprob,
in this order, before any other reason.
""")
LOSSES = (*LOSS_MEANINGS,)

_LOST = "\n".join(f"lost_{reason} int64" for reason in LOSSES)

REPORT = described(
    f"""report (counted)
{_SESSION}
turns, rows int32
rows_untrained int32: rows omitted because nothing in them was trained, or they had no
    response
rows_cut int32: rows omitted because max_row_tokens left no response token
rows_over_max_rows int32: rows omitted because the policy's max_rows was reached
tokens_sampled int64: tokens that the model sampled; equals trained plus all lost_*
tokens_trained int64: sampled tokens under the loss mask of some row, each counted once
tokens_duplicated int64: occurrences of sampled tokens in additional rows, as context or
    trained again
tokens_forward int64: tokens of all rows, which a forward pass computes
tokens_forward_shared int64: the same with each shared prefix counted once
{_LOST}
rows_no_splice_point int32: rows that ended before their chain did (see LOSSES), omitted
    rows included
turns_no_splice_point int32: turns that are in no row for that reason, also those with
    nothing to train
turns_by_tokens int32: turns without messages, linked by tokens although the policy links by
    messages
roots int32: turns without a parent, except unrouted and empty ones (LINK_REASONS)
turns_quarantined int32: turns that parent_by="prefix" quarantined (see LINK_REASONS)
turns_unresolved int32: retries of prompts for which no retry was continued, including the
    kept one
""",
    counted=partial(every_token_counted, LOSSES),
)
"""Counts per session, one row per session, also for sessions without rows."""

OBSERVATIONS = described("""observations
session_id text
tokens_observed int64: tokens with a weight, over all rows
tokens_repeated int64: tokens without a weight because an earlier row has it
messages_unnamed int32: tool messages skipped because tool_names requires a name and none is
    known
turns_skipped int32: turns without usable attribution
""")
"""Counts of `trajkit.learn.observation_weights`, one row per session."""

SIMULATION = described(f"""simulation
policy text: the preset's name, and the choices that differ from it
turns, rows int64
rows_untrained, rows_cut, rows_over_max_rows int64: as in REPORT, over all sessions
turns_by_tokens, roots, turns_quarantined, turns_unresolved int64
tokens_sampled, tokens_trained int64
tokens_lost int64: the sum of all lost_*
{_LOST}
tokens_duplicated int64
tokens_out_of_context int64: trained tokens whose row, up to them, differs from the path
    they were sampled after
tokens_forward, tokens_forward_shared int64
tokens_padding int64?: padding of each row to a multiple of the given length. null: no
    length was given
longest_row int64: tokens of the longest row; 0 without rows
packs, tokens_packed, pairs_packed int64?: packs of the given size (trees that are larger
    are carried over several), their tokens, and pairs of a token and one that it attends.
    null: no size was given
""")
"""Results of several policies on the same turns, one row per policy."""

IMPORT_REPORT = described("""import_report
file text
place text: position in the file: "line 3", "sample 0"
session_id text?: null: not in the record
problem name: docs/import.md lists them
kept bool: true if the record still became a turn
detail text
""")
"""Records that an import dropped or changed, one row per record and problem."""

# Rows: training sequences, what they do with outputs, and what is wrong with them.

SPAN_KINDS = defined("""What a row does with a range of a turn's output.

trained: The row trains it.
duplicate: The row contains it as context; another row trains it.
absorbed: The row lost it to drift; the span is empty.
cut: It is beyond ``max_row_tokens``; the span is empty.
untrainable: The row contains it as context, since it may not be trained (`LOSSES`:
    untrainable, aborted, masked, no_logprob).
no_splice_point: The row ended before it could continue with it; the span is empty.
""")

SPAN = struct("""span
start, stop, turn_index, output_start, output_stop int32?
kind name?
""")
"""Row tokens ``start:stop`` are ``output_start:output_stop`` of the turn's output, or none
(``start == stop``) if the range was lost (EMPTY_KINDS). ``start`` is then its position in
the row, or the position where the row was replaced or ended if that is smaller.
"""

EMPTY_KINDS = ("absorbed", "cut", "no_splice_point")
"""Kinds of spans whose tokens the row lost."""

ROW_VERSIONS = struct("""row_versions
first, last text?
""")
"""The weights that sampled a row's first token and its last."""


ROWS = described(
    """rows (row_lengths, masks, spans)
session_id text (contiguous)
row_index int32 (ascending): counts the session's rows from 0, in the policy's order
group_id text?
input_ids [int32] (token_ids)
prompt_length int32 (not_negative): the prompt of the call that opened the row
loss_mask [bool] (no_null): true where this row trains the token
logprobs [float32] (logprob_per_id): null outside the mask, and for tokens without a logprob
spans [span] (no_span_null): ascending, never overlapping
parent_row int32? (earlier): row_index of the earlier row of the session with the longest
    shared prefix, the first on ties. null: none shares a token
shared_length int32 (not_negative): tokens shared with it; 0 without one
reward float64? (finite): the session's reward. null: unscorable
row_weight float64? (finite, is_share): this row's share of the rollout's trained tokens;
    null if the rollout trains none
rollout_mask_sum int64 (not_negative): trained tokens of all rows of the session
finish_reason text?
truncated, use_tool, ill_formed bool?
segment_kind name?: of its turns, as in LINKS
last_turn int32?: the turn whose path the row is, or whose output ends the row. null:
    unknown
turns [int32]?: the turns in the row, in order, up to last_turn, including turns with an
    empty output and turns lost to drift or truncation. null: unknown
weight_versions row_versions?: the weights of the first and the last sampled token with
    known weights. null: none
step int64?: the training step of the last turn, if turns have this column. null: unknown
mm_items [image]?: its images, in order. An image that max_row_tokens cuts has its stop
    beyond the row. null: none
""",
    spans=partial(spans_in_order, SPAN_KINDS, EMPTY_KINDS),
)
"""One row per training sequence."""

OPENED_BY = ("no_parent", "drift", "branch")
"""Why a row begins at its first turn: it has no parent, its prompt drifts from its parent's
path, or another row continues its parent."""

ROW_REASONS = described("""row_reasons
session_id text?: null: the rows do not name it
row_index int32
first_turn int32?: the turn that opens the row: the first that no earlier row contains.
    null: the rows do not name turns
parent int32?: its parent. null: none
opened_by text: one of OPENED_BY
tokens_trained int64
tokens_lost int64?: tokens of its empty spans (EMPTY_KINDS). null: of rows without turns
sentence text
""")
"""Why each row begins where it does, one line per row (see `analysis.why`)."""

OUTPUT_KINDS = ("trained", *LOSSES)
"""What a policy does with a sampled token: it trains it, or loses it for a reason."""

OUTPUT_SPANS = described(f"""output_spans
{_TURN}
output_start int32: tokens output_start:output_stop of the turn's output
output_stop int32
kind name: one of OUTPUT_KINDS
row_index int32?: the row that trains them, lost them, or has them as context. null: no row
    does
drift_turn int32?: the turn whose prompt caused the loss because it departs from an earlier
    path. null: none did
""")
"""Each range of sampled tokens and what a policy does with it, in order of session, turn
and position (see `analysis.output_spans`). Every sampled token is in one line; a token that
several rows train is in one line per row."""

RULES = defined("""The rules that `trajkit.verify` checks.

session: The row's session has turns, and its rows are contiguous.
row_index: It counts the rows of the session from 0.
length: Mask and logprobs have the row's length, and no row exceeds ``max_row_tokens``.
null: Ids, mask and spans have no null.
span_turn, span_kind, span_place, span_range: A span names a turn of the session and a known
    kind, follows the previous span without overlap, and is as long as its range of the
    turn's output.
span_tokens: A span has the tokens of its output range.
untrainable: Tokens that may not be trained are in untrainable spans, and no others are.
mask: It is true exactly for trained spans. In rows without spans: for outputs that were
    located in the row.
logprob: The engine's value under the mask, null elsewhere.
context: The tokens before a trained token are those it was sampled after. For spliced rows
    see row_tokens.
trained_twice: No sampled token is trained or lost in two spans, or in two of a row if the
    policy trains a token in several.
not_trained: Every token that the policy promises to train is trained.
row_tokens: A row is the path of a turn (of ``last_turn``, if given), truncated at
    ``max_row_tokens``; in a spliced row, each output follows the end of its prompt.
prompt_length: The prompt length of the row's first turn.
parent_row, shared_length: The first earlier row with the longest shared prefix, and the
    prefix's length.
rollout_mask_sum, row_weight, reward, group_id: They follow from the complete rollout.
finish_reason: It follows from the row's calls.
turns: They end with ``last_turn`` and contain the turns of the row's spans in order.
weight_versions: Those of the row's first and last sampled token with known weights.
flags: They follow from the row's turns, or have at least theirs if the policy takes those
    of the chain.
mm_items: Each is an image of the session, its tokens are that image's content ids, and no
    other token is a content id.
policy: The rows are those that the policy makes of the turns: tokens, mask, spans, turns
    and flags. Checked in sessions that break no other rule.
""")

VIOLATIONS = described("""violations
session_id text?
row_index int32?: null: the violation concerns no single row
turn_index int32?: null: it concerns no single turn
token int32?: position of the first wrong token in the row or, without row_index, in the
    turn's output. null: the violation concerns the row as such
rule name
detail text: the values found and expected, and the number of tokens
""")
"""One row per violation and contiguous range of tokens."""

ROW_CHECK_KINDS = defined("""What `trajkit.check_rows` says of rows.

trains: The row trains these tokens of the turn. Nothing is wrong.
mask_shifted: The mask is that of the tokens before or after the sampled ones.
not_sampled: Trained tokens that are no turn's output.
untrainable: Trained tokens of a turn, or of an output, that may not be trained.
trained_twice: Tokens that an earlier row trains too.
out_of_context: Trained tokens that follow other tokens than they were sampled after.
logprobs_shifted: The logprobs are those of the tokens before or after.
logprobs: Logprobs that are not the engine's.
masked_out: Sampled tokens that rows have and none trains.
in_no_row: Sampled tokens that no row has.
not_found: No turn begins like the row.
other_session: The row names a session, and its tokens are another's.
several_sequences: Another sequence begins inside the row, which is packed.
unread_mask: Rows have a column that is named as a mask, and was not read. Nothing is wrong.
unknown_session: Rows name sessions that the turns do not have, and are found by their \
tokens. Nothing is wrong.
session_without_rows: Sessions of the turns that have no row. Nothing is wrong.
""")

ROW_CHECKS = described("""row_checks
row int32?: the position of the row, from 0. null: the line is of no row
session_id text?: null: the row was not found
turn_index int32?: null: the line concerns no single turn
token int32?: position in the row, padding included. null: of no token
kind name: one of ROW_CHECK_KINDS
tokens int64
detail text
""")
"""What rows train of what was sampled (see `trajkit.check_rows`)."""

# Links: the turn that each turn continues, and how its prompt departs from it.

LINK_REASONS = defined("""How the parent of a turn was found, or why the turn is in no row.

root: No parent: no earlier turn matches.
messages: The generated message nearest above it in the message tree.
rewrite: As ``messages``. Its prompt also replaced a short reply, which is now rewritten.
tokens: The longest path at the end of a row (of any turn under ``parent_by="prefix"``) that
    is a prefix of its prompt. For turns without messages under a route by messages: the
    turn whose prompt is a proper prefix of its prompt and whose path it repeats for
    longest.
previous: The previous call of the session.
unrouted: It has an empty list of messages: no parent, in no row.
history_replaced: No parent: the same agent spoke earlier, but this request does not extend
    its history.
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
no_parent: No parent: the recorded one is unresolved or missing, its path does not begin the
    prompt, or nothing is recorded, though it is of other turns of the session.

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

AGENT_EDGES = defined("""Kinds of edges between turns of different agents or histories.

call: From the turn whose tool call started a sub-agent, to the sub-agent's first turn.
return: From a sub-agent's last turn, to the first later turn of its caller that has the
    calling turn as parent, or further up.
compaction: From an agent's latest turn, to a turn of the agent that has no parent: its
    history begins anew. If an earlier path begins with the prompt, it was only sent again.
continuation: From a parent that belongs to another agent, to the turn.

Side calls have no edges, and no edge but a call ends at a turn without an ``order``.
``parent_by="none"`` and ``"previous"`` compare no prompts, and give calls only.
""")

AGENT_EDGE = struct("""agent_edge
kind text?
turn int32?
""")
"""An edge: its kind, one of AGENT_EDGES, and the turn where it begins."""

LINKS = described(
    f"""links (parents_first)
{_IN_ORDER}
parent int32? (another, turn_exists): turn_index of the parent. null: none
link_reason name? (reasons)
order int32? (not_negative, differ): rank in the policy's traversal of the session, from 0
rewritten_by int32? (turn_exists, later): the turn that replaced this one's reply, so that
    it does not train. null: none
segment_kind name?: how its segment ended (SEGMENT_KINDS). null: the route has no segments
agent_edges [agent_edge]?: edges that end at the turn, by kind and turn. null: unknown,
    as turns have neither agent_id nor started_by_turn (AGENTS)
""",
    reasons=one_of(LINK_REASONS),
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

truncated: The prompt ends here. If no other cause applies: its message ends here, while the
    path's continues.
same_text: The text is equal, the tokens differ.
special_tokens: Equal except for special tokens (or their text in ordinary tokens) and white
    space around them.
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


DRIFT = described(
    f"""drift (drift_agrees)
{_IN_ORDER}
parent int32 (another)
lcp int32 (not_negative): tokens shared by the parent's path and this prompt, from the start
size int32 (not_negative): tokens of the path beyond lcp; 0: clean
region name? (regions)
resync_path, resync_prompt, resync_length int32? (not_negative): where path and prompt agree
    again: path[resync_path:][:resync_length] == prompt[resync_prompt:][:resync_length].
    null: nowhere
tokens_after_drift int32 (not_negative): sampled tokens of the path at or beyond lcp
cause name? (causes): CAUSES, with a tokenizer TEXT_CAUSES. `trajkit drift`: retry or
    rollback, where a prompt is sent again
""",
    regions=one_of(REGIONS),
    causes=one_of((*CAUSES, *TEXT_CAUSES, "retry", "rollback")),
)
"""One row per turn with a parent: how its prompt departs from the parent's path."""

FINDINGS = described(f"""findings
{_TURN}
parent int32
finding int32: counts the findings of the turn from 0, in the order of the prompt
cause name
path_start, path_stop int32: tokens of the parent's path ...
prompt_start, prompt_stop int32: ... and the prompt's tokens in their place. Between
    findings, and from the last finding to the end of the path, both have the same tokens
path_text, prompt_text text: with special tokens; a byte of a split character is ``\\xe2``
""")
"""Each span where a prompt departs from the parent's path, with its cause."""

LABELS = ("sub_agent", "retry", "rollback", "compaction", "rewrite")
"""Kinds of branches (see `analysis.label_branches`)."""

BRANCHES = described(f"""branches
{_TURN}
label name
other int32: the earlier turn that it is compared with
evidence text: the reason for the label, in words
""")
"""One row per turn that opens a branch."""

# Packs: rows that share prefixes as trees of tokens, and where they are computed.

PACKS = described("""packs
input_ids [int32]: a tree of tokens in pre-order, tree after tree; padding at the end
position_ids [int32]: tokens before it on its path from the root; 0 for padding
subtree_end [int32]: where the tokens below it end: token q attends token k if k <= q <
    subtree_end[k]. A token of padding attends itself
n_tokens int32: tokens without the padding
sessions [text]: the sessions of all rows in the pack
edge_source [int32]: an edge is a token that a row trains. The token of the pack that
    predicts it
edge_target [int32]: its id
edge_row [int64]: the line of its row in the table of rows
edge_position [int32]: its position in the row
edge_weight [float64]: its share of the loss, without the advantage
edge_logprob [float32]: as recorded. null: the engine gave none
prefix_pack int64?: of a part of a tree: the line of the pack that has the part before it.
    null: the pack has no prefix
prefix_source [int32]: the prefix: the path to the pack's first token, by position. Where
    each token is in that pack, counted from the first token of the prefix that it has
    itself
prefix_end [int32]: as subtree_end, of the tokens of the prefix: q attends it if q <
    prefix_end
mm_items [image]?: its images, by position in the pack; rows that share one have it once.
    null: none
""")
"""Rows that share prefixes as trees of tokens, one line per micro-batch. ``columns`` of
`trajkit.pack` add a list ``edge_<name>`` each."""

PACK_RULES = defined("""What `trajkit.verify_packs` looks at.

length: The lists of a pack's tokens and edges are as long as one another.
range: Tokens, rows and positions that a pack names exist, and no id is null or negative.
max_tokens: No pack is longer than asked.
subtree_end: The tokens that it spans are nested: each subtree lies in that of the token
    above.
position: It counts the tokens that the token attends, without itself.
padding: A token of padding attends itself, and no token below it; no edge is there.
prefix: It is the path to the pack's first token, in the pack that it names.
sessions: The sessions of a pack are those of its rows.
not_trained: Every edge is a token that its row trains, or observes.
context: The tokens that an edge's source attends are those before the edge in its row.
target: An edge's target is its token in the row.
weight, logprob, column: They are those of the row.
mm_items: The images of a pack are the rows', and its content ids are theirs.
packed_twice, not_packed: Every token that a row trains has one edge.
""")

PACK_VIOLATIONS = described("""pack_violations
pack int64?: the line of the pack. null: the violation is of no one pack
token int32?: the first token of the pack that is wrong. null: of no one token
session_id text?: the row that it is about. null: of no one row
row_index int32?
row_token int32?: the position in the row. null: of no one position
rule name
detail text: the values, and how many more there are in the pack
""")
"""What breaks a rule in packs, one line per pack, row and rule."""

ASSIGNMENT = described("""assignment
step int32: counts the optimizer steps from 0
rank int32
slot int32: counts the packs of the rank in the step from 0
pack int64?: the line of the pack in its table. null: an empty pack, so that ranks have as
    many
cost float64: in the unit of the costs given to `trajkit.balance`; 0 for an empty pack
""")
"""Which rank computes which pack, one line per pack."""
