"""Turns: recorded model calls in full and in delta form, and what is learned later."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from trajkit.schema import engine
from trajkit.schema.engine import TURN, Fault, columns, defined, struct, table

KEY_BYTES = 16

MESSAGE = struct(
    """
    key key?: digest of the message: the same for messages that are ==
        (trajkit.turns.messages)
    role text?
    body text?: JSON with sorted keys; null: the last body that the session has of this
        key
    """,
    key=pa.binary(KEY_BYTES),
)
"""One chat message. A repeated message has its key and a null ``body``."""

WEIGHT_VERSION = struct("""
    version text?
    start, stop int32?
""")
"""Output tokens ``start:stop`` were sampled with the weights ``version``."""

MM_ITEM = struct("""
    kind text?: what it is: image
    hash text?: SHA-256 of the original bytes, 64 hexadecimal digits; a log has them in a
        file of this name in its folder images
    token_id int32?: the id that the engine has at each of its tokens
    start, stop int32?: its tokens are start:stop of the prompt or row
""")
"""An image in a prompt.

Its tokens are content ids: ids beyond every vocabulary that depend on kind, hash and
number of tokens (`trajkit.turns.images.content_ids`). Hence prompts with different
images differ in their ids, and every stage that compares tokens compares images too.
`trajkit.turns.engine_ids` gives the ids that the engine consumed.
"""


def no_key_missing(name: str, table: pa.Table) -> Iterator[Fault]:
    """Every message has a key and a role."""
    for start, ends, values in engine.flat_chunks(table.column(name)):
        yield engine.broken_items(
            start, ends, values.is_null(), f"{name}[{{}}] is null"
        )
        for field in ("key", "role"):
            lacking = engine.field_of(values, field).is_null()
            yield engine.broken_items(
                start, ends, lacking, f"{name}[{{}}] has no {field}"
            )


def reply_has_key(name: str, table: pa.Table) -> Iterator[Fault]:
    """A response that is not null has a key and a role."""
    column = table.column(name).combine_chunks()
    given = np.asarray(column.is_valid())
    for field in ("key", "role"):
        lacking = given & np.asarray(engine.field_of(column, field).is_null())
        yield engine.broken(lacking, f"{name} has no {field}")


def one_per_output(name: str, table: pa.Table) -> Iterator[Fault]:
    """One bool per output id, or none at all."""
    yield from engine.as_long_as("output_ids", name, f"{{}} elements of {name}", table)
    yield from engine.no_null(name, table)


def tile_outputs(name: str, table: pa.Table) -> Iterator[Fault]:
    """Spans without nulls that tile the output, in order."""
    column = table.column(name)
    n_output, given = engine.lengths(table.column("output_ids")), ~engine.nulls(column)
    for start, ends, spans in engine.flat_chunks(column):
        lacking = engine.lacks(spans, "version", "start", "stop")
        rule = f"{name}[{{}}] has a null: version, start and stop are needed"
        yield engine.broken_items(start, ends, lacking, rule)
        if lacking.any():
            continue
        lows = np.asarray(engine.field_of(spans, "start"))
        highs = np.asarray(engine.field_of(spans, "stop"))
        begins = np.append(0, ends)[:-1]
        filled = np.flatnonzero(ends > begins)
        due = np.append(0, highs)[: len(lows)]
        due[begins[filled]] = 0
        yield engine.broken_items(
            start,
            ends,
            (lows != due) | (highs < lows),
            f"{name}[{{}}] is {{}}:{{}}, expected a start of {{}}: the spans tile the "
            "output",
            lows,
            highs,
            due,
        )
        last = np.zeros(len(table), np.int64)
        last[start + filled] = highs[ends[filled] - 1]
        here = np.zeros(len(table), np.bool_)
        here[start : start + len(ends)] = True
        yield engine.broken(
            here & given & (last != n_output),
            f"{name} end at {{}} of {{}} output ids: the spans tile the output",
            last,
            n_output,
        )


def not_empty(table: pa.Table) -> Iterator[Fault]:
    """Every prompt has a token."""
    if "prompt_ids" in table.column_names:
        n_prompt = engine.lengths(table.column("prompt_ids"))
    else:
        n_prompt = engine.lengths(table.column("suffix_ids"))
        n_prompt = n_prompt + table.column("shared_length").to_numpy()
    yield engine.broken(
        n_prompt == 0, "prompt_ids is empty: an engine samples after some token"
    )


def delta(table: pa.Table) -> Iterator[Fault]:
    """The base of a turn is an earlier turn and has what is shared with it."""
    bases = table.column("base_turn")
    none = engine.nulls(bases)
    base_row, found = engine.lookup(table, "turn_index", bases)
    late = base_row >= np.arange(len(table))
    bad = ~none & (~found | late)
    yield engine.broken(
        bad, "base_turn {} is not an earlier turn of the session", bases
    )
    if bad.any():
        return

    shared = table.column("shared_length").to_numpy()
    n_own, n_output = (
        engine.lengths(table.column(name)) for name in ("suffix_ids", "output_ids")
    )
    path_len = np.where(none, 0, (shared + n_own + n_output)[base_row])
    yield engine.broken(
        (shared < 0) | (shared > path_len),
        "shared_length is {}: expected 0 to {}, tokens of the base turn",
        shared,
        path_len,
    )
    listed, shares = table.column("suffix_messages"), table.column("shared_messages")
    yield engine.broken(
        engine.nulls(listed) != engine.nulls(shares),
        "shared_messages and suffix_messages are null together",
    )
    n_shared = shares.fill_null(0).to_numpy()
    total = n_shared + engine.lengths(listed) + ~engine.nulls(table.column("response"))
    there = np.where(none | engine.nulls(listed)[base_row], 0, total[base_row])
    yield engine.broken(
        (n_shared < 0) | (n_shared > there),
        "shared_messages is {}: expected 0 to {}, messages of the base turn",
        n_shared,
        there,
    )


_TURNS = columns(
    """
    session_id text (contiguous): one agent run; a rollout of a task
    turn_index int32 (ascending): commit order within the session; ascending, gaps allowed
    prompt_ids [int32] (token_ids): the ids that the engine consumed, unchanged; content
        ids for images (MM_ITEM)
    output_ids [int32] (token_ids): the ids that the engine sampled, unchanged
    output_logprobs [float32]? (logprob_per_id): one per output id. null: the engine
        returned none, for the output or for the token
    finish_reason text?: as the engine names it: stop, length, abort, ...
    messages [message]? (no_key_missing): the request's chat messages in order. null list:
        route by tokens
    response message? (reply_has_key): the reply as the next request is expected to repeat
        it. null: unknown
    use_tool bool?: the reply calls a tool; null: unknown, taken as false
    ill_formed bool?: the reply's tool call did not parse; null: unknown, taken as false
    trainable bool?: false: context only. null: true
    output_mask [bool]? (one_per_output): one per output id; false: the token is context
        only. null: all true
    weight_versions [versions]? (tile_outputs): the weights that sampled each range of
        output tokens
    mm_items [image]?: the images of the prompt, in order, also in delta form. null: none
    """,
    message=MESSAGE,
    versions=WEIGHT_VERSION,
    image=MM_ITEM,
    logprob_per_id=engine.logprobs("output_ids"),
    no_key_missing=no_key_missing,
    reply_has_key=reply_has_key,
    one_per_output=one_per_output,
    tile_outputs=tile_outputs,
)
TURNS = table("turns", *_TURNS, rules=(not_empty,))
"""One row per model call. Only the not-null columns are required; others may be absent,
and unknown extra columns pass through."""

_DELTA_COLUMNS = columns(
    """
    base_turn int32?: the earlier turn of the session that shares a prefix with this
        prompt. null: none
    shared_length int32: prompt[:shared_length] == (base prompt ++ base
        output)[:shared_length]
    suffix_ids [int32] (token_ids): prompt[shared_length:]
    shared_messages int32?: messages[:shared_messages] == (base messages ++ base
        response)[:shared_messages]
    suffix_messages [message]? (no_key_missing): messages[shared_messages:]. null list:
        the turn has no messages
    """,
    message=MESSAGE,
    no_key_missing=no_key_missing,
)
DELTA_FIELDS = tuple(one.field for one in _DELTA_COLUMNS)
"""Columns of the delta form. The first three replace ``prompt_ids``, the last two
replace ``messages``; all use the same base turn."""

_DELTA = {"prompt_ids": _DELTA_COLUMNS[:3], "messages": _DELTA_COLUMNS[3:]}

TURNS_DELTA = table(
    "turns",
    *(new for old in _TURNS for new in _DELTA.get(old.field.name, (old,))),
    rules=(delta, not_empty),
)
"""``turns`` in delta form: its size is linear in the context, not quadratic."""

ROUTING = table(
    "turns",
    *TURN,
    *columns("""
    request_id text?: the source's name of the call
    parent_resolution text?: what was known of the call's parent when the request came in:
        root, resolved or unresolved. null: nothing is recorded
    parent_request text?: the request_id of the parent, if it is resolved
    scored bool?: true: its reply was scored, and nothing after it counts. One turn of a
        session
    tools_key text?: what `trajkit.turns.tools_key` gives of the tools that the request
        offers. null: unknown, the same for all such turns
    """),
)
"""Optional columns of ``turns`` that tell which turn continues which. The policy ``nemo``
(``parent_by="prefix"``) follows recorded parents, and prefixes in sessions without them;
the policy ``graph`` (``compare_tools``) compares tools."""

ATTRIBUTION = table(
    "turns",
    *TURN,
    *columns("""
    prompt_message_index [int32]?: one per prompt token: index of the message that it
        renders, in the request (or in its last messages, see message_tool_names).
        negative: structure, such as the generation prompt, or a token of an earlier call.
        In delta form the tokens that are shared with the base may be left out if their
        index is -1. null list: unknown
    prompt_is_content [bool]?: one per prompt token: true for the message's text, false
        for the template's tokens around it. In delta form shared tokens may be left out
        if false. null list: unknown
    message_tool_names [text]?: one per message: the tool whose output it is; null
        element: no tool, or unknown. A list shorter than the request's messages covers
        the last ones, and so does prompt_message_index. null list: joined by tool_call_id
        from the message bodies
    """),
)
"""Optional columns of ``turns`` that attribute prompt tokens to messages. They are read
by `trajkit.learn.observation_weights`."""

AMENDMENT_REASONS = defined("""Reasons to amend a recorded turn.

undelivered: Its answer reached no client: it is context only.
delivered: A client asked again and received the answer: the turn's own ``trainable``
    counts.
retried: Its request came again although it was answered, and the gateway was asked to
    make such turns context only.
continued: A later request contains its answer, so it was not retried: the turn's own
    ``trainable`` counts.
dropped: Its session was dropped: it is context only.
""")

AMENDMENTS = table(
    "amendments",
    *TURN,
    *columns("""
    reason text: one of AMENDMENT_REASONS
    trainable bool?: false: the turn is context only. null: the turn's own value counts
    """),
)
"""Facts about turns that became known after they were recorded. The last line of a turn
counts. The file is in the folder of the turns, and `trajkit.read_turns` applies it."""

PAYLOADS = defined("""Extra columns of turns that have a rule of their own.

    `trajkit.validate` checks it, and `trajkit.linearize` carries them as its ``payloads``.

routed_experts: Per token of prompt and output, or of all but the last: the experts that
    it was sent to, a list per layer. A list that could be of the output ids alone as well
    is of all ids but the last, as engines return it.
sampling_mask: Per output id: the ids that it was drawn from after top-p and top-k, itself
    among them. Null or empty: nothing was cut off, or it is not known.
ref_logprobs, teacher_logprobs: Log-probabilities under another model, per output id, or
    per token of prompt and output.
""")
