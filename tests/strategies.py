"""Every hypothesis strategy the suite uses.

Vocabularies are tiny and messages few, so that prefixes collide, siblings are equal and
one reply opens another. Turns are dicts as `tests.oracles.rows` reads them.
"""

from collections import OrderedDict
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from random import Random

import numpy as np
import pyarrow as pa
from hypothesis import Phase, settings
from hypothesis import strategies as st

from tests.fuzz.sessions import growing, numbered, random_policy, session

fewer_examples = settings(max_examples=max(settings().max_examples // 3, 8))
"""For a property that runs under many parameters, or goes over every policy."""


def pick(draw, options):
    """One of the options, each as likely as the others.

    ``st.sampled_from`` made for one draw costs more than all that it draws.
    """
    return options[draw(_indices(len(options)))]


@cache
def _indices(n):
    return st.integers(0, n - 1)


token_lists = st.lists(st.integers(0, 3), max_size=12)

thresholds = st.sampled_from([1024, 3, 2, 1, 0, -1])
"""fork_threshold: small enough to matter for outputs of a few tokens."""

policies = (
    st.tuples(st.just("slime"), thresholds)
    | st.just(("strict", 0))
    | st.just(("per_call", 0))
)
"""The name of a policy and its fork_threshold."""

row_limits = st.none() | st.integers(1, 40)
"""max_row_tokens."""


@st.composite
def prefix_pairs(draw):
    """Two token lists that share a prefix of any length: ``([1, 2, 3], [1, 2, 0])``."""
    a = draw(token_lists)
    b = a[: draw(st.integers(0, len(a)))] + draw(token_lists)
    return a, b


seeds = st.integers(0, 2**32 - 1)


@st.composite
def sessions(draw, max_turns=8, names=(), **style):
    """One session: a list of turns in commit order (`tests.fuzz.sessions`).

    ``names``: fields beyond the plain ones. A failing session is made smaller by calls.
    """
    n = draw(st.integers(1, max_turns))
    random = Random(draw(seeds))
    return numbered(random, session(random, n, **style), names)


def delegating_sessions(max_turns=10, names=()):
    """Agents that call tools and send out sub-agents."""
    return sessions(max_turns, names, calling=0.5, answering=0.3)


@st.composite
def sessions_of_agents(draw):
    """Turns that name agents and their starts; some come before what they continue."""
    random = Random(draw(seeds))
    turns = random.choice([session, growing])(random, draw(st.integers(1, 10)))
    if random.random() < 0.5:
        random.shuffle(turns)
    turns = numbered(random, turns)
    for turn in turns:
        others = [one["turn_index"] for one in turns if one is not turn]
        turn["agent_id"] = random.choice([None, None, "a", "b"])
        turn["call_kind"] = random.choice([None, None, "agent", "transcript", "title"])
        turn["started_by_turn"] = random.choice([None, None, *others[:1], *others[-1:]])
        turn["started_by_call"] = random.choice([None, "c", "d"])
    return turns


few = settings(
    max_examples=max(5, settings.default.max_examples // 12),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
"""For properties of `many_calls`: each example is large, and a seed does not shrink."""


@st.composite
def many_calls(draw):
    """One session of 40 to 300 calls, as a recorder takes and numbers them."""
    longest = draw(st.sampled_from([30, 400]))
    random = Random(draw(seeds))
    turns = session(random, draw(st.integers(40, 300)), longest=longest)
    return [
        {**turn, "turn_index": k, "prompt_ids": turn["prompt_ids"] or [0]}
        for k, turn in enumerate(numbered(random, turns))
    ]


@st.composite
def runs(draw, max_sessions=4, max_turns=5, names=()):
    """Several sessions whose calls came in interleaved: turns that name their session.

    The turns of each session are in commit order.
    """
    drawn = draw(
        st.lists(sessions(max_turns, names), min_size=1, max_size=max_sessions)
    )
    waiting = {f"s{k}": iter(turns) for k, turns in enumerate(drawn)}
    order = [f"s{k}" for k, turns in enumerate(drawn) for _ in turns]
    Random(draw(seeds)).shuffle(order)
    return [{"session_id": name, **next(waiting[name])} for name in order]


# Messages and records

# one object, as json.loads makes of every NaN: containers find it equal to itself
NAN = float("nan")

json_leaves = st.sampled_from(
    [
        *[None, True, False, 0, 1, -1, 1.0, 0.0, -0.0, 0.5, NAN, float("inf")],
        *[2**53, 2**53 + 1, float(2**53), 10**30, 1e30],
        *["", "1", "a", '"\\\n\x00', "é", "\u2028", "\U0001f600", "\ud800", "\\ud800"],
    ]
)
"""Values of which many pairs are equal, or nearly so."""

json_values = st.recursive(
    json_leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "é"]), inner, max_size=3)
    ),
    max_leaves=6,
)

json_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "tool"])},
    optional={"content": json_values, "tool_calls": json_values},
)
"""Chat messages of any JSON value."""


@st.composite
def message_pairs(draw):
    """Two messages, alike but for one field or for the order of their keys."""
    a = draw(json_messages)
    b = dict(reversed(a.items()))
    if draw(st.booleans()):
        b["content"] = draw(json_values)
    return a, b


# What passes through the gateway as text (tests/shim): markers, halves of markers,
# white space, and tool calls that read well or badly.
plain_texts = st.text(st.sampled_from("a \né>|"), max_size=4)
_markers = st.sampled_from(["<", "<|im_end|>", "<|im_start|>", "</tool_call>"])
_good_arguments = st.sampled_from(["{}", '{"a":  1.50}', '{"b": "</tool_call>"}'])
_call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'.format
good_calls = st.builds(_call, st.sampled_from(["bash", "edit"]), _good_arguments)
_bad_calls = st.builds(_call, st.just(""), _good_arguments) | st.builds(
    _call, st.just("bash"), st.just('{"a": ')
)
spoken_texts = st.lists(plain_texts | _markers, max_size=8).map("".join)
reply_texts = st.lists(
    plain_texts | _markers | good_calls | _bad_calls, max_size=6
).map("".join)


# Choices of a policy


def chosen_policies():
    """A preset's name and choices that differ from it, as `trajkit.policy` takes them."""
    drawn = seeds.map(lambda seed: random_policy(Random(seed)))
    return drawn.filter(lambda one: one[1].get("missing_logprobs") != "raise")


# Payloads


@st.composite
def payload_lists(draw, turn):
    """Pairs of small numbers: per output id, per id, or none."""
    n_output = len(turn["output_ids"])
    n = pick(draw, [n_output, len(turn["prompt_ids"]) + n_output, None])
    pairs = st.none() | st.lists(st.integers(0, 99), min_size=2, max_size=2)
    return None if n is None else draw(st.lists(pairs, min_size=n, max_size=n))


@st.composite
def runs_apart(draw):
    """Two token lists, the second with stretches of the first left out or replaced."""
    a = draw(token_lists)
    b, at = [], 0
    while at < len(a):
        kept = draw(st.integers(0, len(a) - at))
        b += a[at : at + kept] + draw(st.lists(st.integers(0, 3), max_size=3))
        at += kept + draw(st.integers(1, 4))
    return a, b + draw(token_lists)


client_habits = st.sets(st.sampled_from(["no reasoning", "blocks", "numbers"]))
"""What a client does to a reply that it sends back: `prompting.test_conversation`."""


# Tool calls in the forms of models

_json_kinds = {
    "string": st.text(st.sampled_from("a 1\n\t<>/=\"'{}:é\\"), max_size=8),
    "integer": st.integers(-(10**12), 10**12),
    "number": st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 9),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(st.integers() | st.text(st.sampled_from('a<\n"'), max_size=3)),
    "object": st.dictionaries(st.sampled_from("ab"), st.text(max_size=3), max_size=2),
}
_tool_names = st.sampled_from(["bash", "edit_file", "mcp__a__b"])


@st.composite
def typed_calls(draw):
    """A tool in OpenAI's form, and a call of it: its name and arguments."""
    name = draw(_tool_names)
    keys = draw(st.lists(st.sampled_from(["path", "b", "old text"]), unique=True))
    kinds = {key: pick(draw, sorted(_json_kinds)) for key in keys}
    tool = {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in kinds.items()},
            },
        },
    }
    return tool, name, {key: draw(_json_kinds[kind]) for key, kind in kinds.items()}


call_shards = st.text(st.sampled_from('a \n\t{}:,"=<>/'), max_size=4) | st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<function=bash>",
        "</function>",
        "<parameter=path>",
        "</parameter>",
        "<arg_key>path</arg_key>",
        "<arg_value>",
        "</arg_value>",
        '{"name": "bash"',
        ', "arguments": {}',
        ', "parameters": {}',
        "}",
        "<think>",
        "</think>",
        "bash\n",
    ]
)
"""Pieces of which something like calls, and calls, are made."""


# What becomes known of turns after they were recorded

amendment_lists = st.lists(
    st.fixed_dictionaries(
        {
            "session_id": st.sampled_from(["s0", "s1", "s2", "unknown"]),
            "turn_index": st.integers(0, 9),
            "reason": st.sampled_from(["undelivered", "delivered", "dropped"]),
            "trainable": st.sampled_from([False, None]),
        }
    ),
    max_size=8,
)

delivery_steps = st.lists(
    st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=8
)
"""Connections that begin to send an answer (the first time that they are named) and end
(the second time), with or without success."""


_saids = st.sampled_from([None, "", "a", "b", [], ["a"], {}, 1, 1.0, True])
_called = st.builds(
    lambda arguments, index: [
        {"id": "c", "function": {"name": "f", "arguments": arguments}, **index}
    ],
    st.sampled_from([None, '{"a":1}', '{ "a": 1 }', {"a": 1}, {"a": 1.0}, "{", '"{"']),
    st.sampled_from([{}, {"index": 0}]),
)
chat_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "assistant", "tool"])},
    optional={
        "content": _saids,
        "reasoning_content": _saids,
        "provider_state": _saids,
        "tool_call_id": _saids,
        "name": _saids,
        "tool_calls": _called | st.sampled_from([None, []]),
    },
)
"""Messages with fields that count only where another role has them."""


# Texts of JSON lines


json_spaces = st.sampled_from(["", "", "", " ", "\t", " \r "])
_odd_numbers = st.sampled_from(
    "3.0 1e3 true false null 2147483647 2147483648 99999999999 -0 -1 00 01 0 - 1. .5 1e "
    "[] [1] {} NaN -Infinity 1_0 +1 '' \"1\" 123456789012345678901 ".split(" ")
)
_odd_floats = st.sampled_from(
    '-0.0 0 -0 -1 1e-5 -1E-300 -1e400 1e999 -0.4012345671653748 0.1e1 null true "1" '
    "-9007199254740993 -0.12345678901234567890123 -1.7976931348623157e308 4.9e-324 -1e5 "
    "-00.1 -.1 -1.e1 -12345678901234567.5 -9007199254740993.5 1e22 1e23".split(" ")
)
json_floats = st.floats(-64, 0).map(repr) | st.floats(width=32).map(repr) | _odd_floats


@st.composite
def json_arrays(draw, elements, odd, size=6):
    """The text of an array, mostly of ``elements``."""
    texts = draw(st.lists(elements, max_size=size))
    if draw(st.integers(0, 3)) == 0:
        texts.insert(draw(st.integers(0, len(texts))), draw(odd))
    comma = pick(draw, [",", ", ", " ,\t"])
    return f"[{draw(json_spaces)}{comma.join(texts)}{draw(json_spaces)}]"


_small_ids = st.integers(0, 12).map(str)
_json_texts = st.sampled_from(
    ['"a"', '"\\"]"', '"[1, 2\\\\"', '"é\\ud800"', "{}", "1.0"]
)
_json_messages = st.sampled_from(
    [
        '{"role": "user", "content": "a"}',
        '{"role":"user","content":"a]\\"\\\\"}',
        '{"role": "user", "content": [{"prompt_ids": [1, 2]}, NaN]}',
        '{"role": "assistant", "content": null, "tool_calls": [{"a": 1.0, "b": [[]]}]}',
        '{"role": "tool", "content": "\\u2028é"}',
        '{"content": "no role"}',
        "12",
        "123",
    ]
)


@st.composite
def call_lines(draw):
    """The text of one line of a log of calls, mostly well formed."""
    n = draw(st.integers(0, 4))
    members = [
        ("session_id", pick(draw, ['"a"', '"a"', '"b"', "null", "NaN"])),
        ("prompt_ids", draw(json_arrays(_small_ids, _odd_numbers, 12))),
        (
            "output_ids",
            draw(
                st.lists(_small_ids, min_size=n, max_size=n).map(
                    lambda ids: f"[{', '.join(ids)}]"
                )
                | json_arrays(_small_ids, _odd_numbers)
            ),
        ),
        (
            "output_logprobs",
            draw(
                st.lists(json_floats, min_size=n, max_size=n).map(
                    lambda values: f"[{', '.join(values)}]"
                )
                | json_arrays(json_floats, _odd_floats, 3)
            ),
        ),
        (
            "prompt_messages",
            draw(st.just("null") | json_arrays(_json_messages, _json_texts, 4)),
        ),
    ]
    extra = ["prompt_ids", "output_ids", "prompt_messages", "note", "use_tool"]
    for _ in range(pick(draw, [0, 0, 0, 1, 2])):
        value = _json_texts | json_arrays(_small_ids, _odd_numbers)
        members.append((pick(draw, extra), draw(value)))
    if draw(st.integers(0, 3)) == 0:
        members = draw(st.permutations(members))
    names = {name: f'"{name}"' for name, _ in members}
    if draw(st.integers(0, 7)) == 0:
        names["prompt_ids"] = '"prompt\\u005fids"'
    colon, comma = pick(draw, [(":", ","), (": ", ", "), (" :\t", " , ")])
    inner = comma.join(f"{names[name]}{colon}{value}" for name, value in members)
    text = f"{{{draw(json_spaces)}{inner}{draw(json_spaces)}}}"
    if draw(st.integers(0, 7)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + pick(draw, ["", "]", '"', ",", "x"]) + text[at + 1 :]
    return text.encode("utf-8")


# Further columns of turns

_further_values = {
    "numbers": st.none() | st.integers(-3, 3) | st.sampled_from([0.5, 2.0]),
    "text": st.none() | st.sampled_from(["", "a", "é"]),
    "lists": st.none() | st.lists(st.none() | st.integers(0, 9), max_size=3),
    "dicts": st.none() | st.fixed_dictionaries({"a": st.integers(0, 3)}),
}


@st.composite
def weight_versions(draw, turn):
    """Which weights sampled a turn's output, or None."""
    n = len(turn["output_ids"])
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=2)))
    pieces = [
        {"version": str(start), "start": start, "stop": stop}
        for start, stop in pairwise([0, *cuts, n])
    ]
    return draw(st.sampled_from([None, pieces]))


@st.composite
def further_columns(draw, turn):
    """What a call may say in columns of its own, and which weights sampled its output."""
    names = draw(st.lists(st.sampled_from(sorted(_further_values)), unique=True))
    values = {name: draw(_further_values[name]) for name in names}
    values["experts"] = draw(payload_lists(turn))
    return draw(weight_versions(turn)), values


# Messages as a session hears them again and again


class _Text(str):
    __slots__ = ()


class _Whole(int):
    pass


def _in_lists(levels, bottom):
    for _ in range(levels):
        bottom = [bottom]
    return bottom


# Alike but for what a comparison may miss; some in types that are not JSON's own.
_heard_leaves = st.one_of(
    st.sampled_from([None, True, False, 1, 1.0, 0, 0.0, -0.0, NAN, float("nan")]),
    st.sampled_from([2**63 - 1, 2**63, -(2**63), 10**30, float("inf"), {}, []]),
    st.sampled_from(["", "a", "é", "ł", "\U0001f600", "\ud800", "\ud83d\ude00"]),
    st.sampled_from(["x" * 16, "x" * 17, "x" * 33 + "y", "x" * 33 + "z", "y" * 3000]),
    st.sampled_from(["y" * 2999 + "z", _in_lists(31, 1), _in_lists(40, 1)]),
    st.sampled_from([_Text("a"), _Whole(1), np.float64(1.0)]),
)
_heard_values = st.recursive(
    _heard_leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", _Text("a")]), inner, max_size=2)
        | st.builds(
            OrderedDict, st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
        )
    ),
    max_leaves=6,
)


@st.composite
def heard_calls(draw):
    """What some calls say: (messages or None, reply or None, base, whether it counts).

    Most go on from an earlier one; messages come again in other objects, with their keys in
    another order, and written otherwise.
    """
    roles = st.sampled_from(["user", "tool", "é"])
    message = st.fixed_dictionaries(
        {"role": roles}, optional={"c": _heard_values, "d": _heard_values}
    )
    pool = draw(st.lists(message, min_size=1, max_size=6))
    shown = st.sampled_from(pool).map(lambda one: dict(reversed(one.items())))
    shown = st.sampled_from(pool) | shown | shown.map(OrderedDict)
    calls, lists = [], [[]]
    for _ in range(draw(st.integers(1, 8))):
        base = pick(draw, lists)
        kept = base[: draw(st.integers(max(0, len(base) - 2), len(base)))]
        messages = kept + draw(st.lists(shown, max_size=3))
        reply = draw(st.none() | shown)
        lists.append(messages if reply is None else [*messages, reply])
        said = pick(draw, [messages, messages, messages, None])
        n_counted = sum(counts for *_, counts in calls)
        place = draw(st.integers(-1, n_counted - 1))
        calls.append((said, reply, place, pick(draw, [True, True, False])))
    return calls


# Columns that trajkit does not know, of any type

_LONG = "longer than what a view holds in itself"
_numbers = st.integers(0, 9)
_texts = st.sampled_from(["", "a", "é", _LONG])
_bytes = _texts.map(str.encode)
_times = st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1))

# values of each type; None is added to all
_OF_TYPE = {
    pa.null(): st.none(),
    pa.bool_(): st.booleans(),
    pa.uint64(): st.sampled_from([0, 2**64 - 1]),
    pa.float16(): st.sampled_from([0.0, -0.5]),
    pa.float64(): st.sampled_from([0.0, -0.1]),
    pa.decimal128(5, 2): st.decimals(0, 9, places=2),
    pa.date32(): _times.map(datetime.date),
    pa.timestamp("us", "UTC"): _times.map(lambda time: time.replace(tzinfo=UTC)),
    pa.duration("us"): st.timedeltas(timedelta(0), timedelta(9)),
    pa.string(): _texts,
    pa.string_view(): _texts,
    pa.large_binary(): _bytes,
    pa.binary_view(): _bytes,
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.list_(pa.string_view()): st.lists(st.none() | _texts, max_size=3),
    pa.large_list(pa.string_view()): st.lists(st.none() | _texts, max_size=3),
    pa.large_list(pa.large_list(pa.int8())): st.lists(st.lists(_numbers), max_size=3),
    pa.list_view(pa.int64()): st.lists(_numbers, max_size=3),
    pa.list_(pa.int8(), 2): st.lists(_numbers, min_size=2, max_size=2),
    pa.struct({"a": pa.string_view(), "b": pa.struct({"c": pa.int8()})}): (
        st.fixed_dictionaries(
            {
                "a": st.none() | _texts,
                "b": st.none() | st.fixed_dictionaries({"c": _numbers}),
            }
        )
    ),
    pa.map_(pa.string(), pa.string_view()): st.lists(st.tuples(_texts, _texts)),
    pa.dictionary(pa.int8(), pa.string()): _texts,
}


@st.composite
def _arrays_of(draw, type_, n):
    given_in = type_.value_type if pa.types.is_dictionary(type_) else type_
    values = st.lists(st.none() | _OF_TYPE[type_], min_size=n, max_size=n)
    array = pa.array(draw(values), given_in)
    return array.dictionary_encode().cast(type_) if given_in != type_ else array


@st.composite
def columns_of_any_type(draw, n, types=tuple(_OF_TYPE)):
    """A table of n rows with columns of several of these types, in one chunk or two."""
    chosen = draw(st.lists(st.sampled_from(types), unique=True, min_size=1, max_size=5))
    names = [f"further {k}" for k in range(len(chosen))]
    columns = [draw(_arrays_of(type_, n)) for type_ in chosen]
    cut = pick(draw, [0, n // 2])
    table = pa.table(columns, names)
    return pa.concat_tables([table[:cut], table[cut:]]) if cut else table


# Tables beside the turns


@st.composite
def session_lines(draw):
    """What is known of sessions: some said again, and a column of the caller's own."""
    known = {
        "reward": st.none() | st.sampled_from([0.0, -0.5, 2.0]),
        "group_id": st.none() | _texts,
        "error": st.none() | _texts,
        "note": st.none() | _texts,
    }
    names = draw(st.lists(st.sampled_from(["", "a", "b", "é"]), max_size=6))
    return [
        {"session_id": name} | {k: draw(values) for k, values in known.items()}
        for name in names
    ]


@st.composite
def transcripts(draw):
    """Messages of conversations, as people write them down."""
    said = st.sampled_from(["", "q", "é", "A b"])
    roles = st.sampled_from(["system", "user", "assistant", "assistant", "tool"])
    message = st.fixed_dictionaries({"role": roles, "content": said})
    return draw(st.lists(st.lists(message, max_size=5), max_size=4))
