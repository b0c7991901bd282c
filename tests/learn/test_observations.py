"""Observation weights: each observed token is learned once per rollout."""

import numpy as np
import pyarrow as pa
import pytest

import trajkit as tk
from tests.golden_sessions import golden
from tests.libraries import LIBRARIES, tensor
from tests.oracles.rows import observed_tokens
from trajkit.errors import ArgumentError, InvalidTurnsError

ATTRIBUTION = {
    "message_indices": "prompt_message_index",
    "is_content": "prompt_is_content",
    "message_tool_names": "message_tool_names",
}
"""prime-rl's names of the columns."""


def attributed(session):
    """The turns of a golden session with the attribution that the peer was given."""
    records = []
    for turn in session["turns"]:
        given = turn.get("attribution") or {}
        columns = {ours: given.get(theirs) for theirs, ours in ATTRIBUTION.items()}
        flags = columns["prompt_is_content"]
        if flags is not None:
            columns["prompt_is_content"] = [bool(flag) for flag in flags]
        known = {name: value for name, value in turn.items() if name != "attribution"}
        records.append({"session_id": "s", **known, **columns})
    return tk.from_records(records)


def facts(error):
    return pa.table(
        {
            "session_id": ["s"],
            "reward": [1.0],
            "error": pa.array([error], pa.string()),
        }
    )


# --- the rule that mends it

STARTS = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
END = 9


def said(role, *content, **extra):
    """A message whose content is token ids."""
    return {"role": role, "content": " ".join(map(str, content)), **extra}


def calls_tool(name, call_id, *content):
    function = {"name": name, "arguments": "{}"}
    tool_call = {"id": call_id, "type": "function", "function": function}
    return said("assistant", *content, tool_calls=[tool_call])


def answer(call_id, *content):
    return said("tool", *content, tool_call_id=call_id)


def ids_of(message):
    return [int(word) for word in message["content"].split()]


def call(messages, reply, *, output=None, session="s", names="join", **columns):
    """A record of a request rendered by a template, with its attribution.

    ``columns`` replace columns of the attribution; ``names`` "join" leaves the tool
    names to the message bodies.
    """
    prompt, index, flags = [], [], []
    for i, message in enumerate(messages):
        body = ids_of(message)
        prompt += [STARTS[message["role"]], *body, END]
        index += [i] * (len(body) + 2)
        flags += [False, *[True] * len(body), False]
    record = {
        "session_id": session,
        "prompt_messages": messages,
        "response_message": reply,
        "prompt_ids": [*prompt, STARTS["assistant"]],
        "output_ids": [*ids_of(reply), END] if output is None else output,
        "prompt_message_index": [*index, -1],
        "prompt_is_content": [*flags, False],
        "message_tool_names": None if names == "join" else names,
    }
    return {**record, **columns}


OPENING = [said("system", 20), said("user", 21)]
ASK = calls_tool("bash", "c1", 30, 31)
TOLD = answer("c1", 40, 41)
DONE = said("assistant", 32)


def conversation(**columns):
    """Two calls; the second shows what the tool said."""
    return [call(OPENING, ASK), call([*OPENING, ASK, TOLD], DONE, **columns)]


def drifting():
    """Three calls; the reply before the tool's answer comes back with another id."""
    again = said("assistant", 30, 39)
    turns = [
        call(OPENING, ASK),
        call([*OPENING, ASK, TOLD], DONE),
        call([*OPENING, ASK, TOLD, DONE, answer("c2", 42)], said("assistant", 33)),
    ]
    for turn in turns[1:]:
        shown = call([*OPENING, again, TOLD], DONE)["prompt_ids"][:-1]
        turn["prompt_ids"] = [*shown, *turn["prompt_ids"][len(shown) :]]
    return turns


def weighed(records, policy="faithful", *, sessions=None, **options):
    """(row, token id, weight) of each weighed token."""
    turns = tk.from_records(records)
    rows = tk.linearize(turns, policy, sessions=sessions)
    rows = tk.learn.observation_weights(rows, turns, sessions=sessions, **options)
    return [
        (r, token, weight)
        for r, row in enumerate(rows.to_pylist())
        for token, weight in zip(
            row["input_ids"], row["observation_weight"], strict=True
        )
        if weight
    ]


def counted(records, policy="faithful", **options):
    turns = tk.from_records(records)
    rows = tk.linearize(turns, policy)
    report = tk.learn.observation_report(rows, turns, **options)
    (line,) = report.to_pylist()
    return line


def test_the_content_of_a_tool_s_message_is_weighed_and_the_mask_stays():
    turns = tk.from_records(conversation())
    rows = tk.linearize(turns)
    out = tk.learn.observation_weights(rows, turns, alpha=0.5)
    assert weighed(conversation(), alpha=0.5) == [(0, 40, 0.5), (0, 41, 0.5)]
    assert out.drop_columns("observation_weight").equals(rows)
    assert out.schema.field("observation_weight").type == pa.large_list(pa.float32())
    assert tk.learn.observation_weights(out, turns, alpha=0.5).equals(out)


def test_a_token_is_weighed_once_however_many_rows_repeat_it():
    turns = tk.from_records(drifting())
    rows = tk.linearize(turns, "per_call")
    assert [ids.count(40) for ids in rows["input_ids"].to_pylist()] == [0, 1, 1]
    assert weighed(drifting(), "per_call") == [(1, 40, 1), (1, 41, 1), (2, 42, 1)]
    line = counted(drifting(), "per_call")
    assert (line["tokens_observed"], line["tokens_repeated"]) == (3, 2)


def test_a_row_that_was_cut_leaves_the_rest_of_a_message_to_the_next():
    opening = [said("system", 20), said("user", 21, 22, 23)]
    records = [
        call(opening, ASK),
        call([*opening, ASK, TOLD], DONE),
        call([opening[0], ASK, TOLD], DONE),
    ]
    turns = tk.from_records(records)
    rows = tk.linearize(turns, max_row_tokens=14)
    assert [ids[-1] for ids in rows["input_ids"].to_pylist()] == [40, END]
    report = tk.learn.observation_report(rows, turns)
    line = report.to_pylist()[0]
    assert (line["tokens_observed"], line["tokens_repeated"]) == (2, 1)
    out = tk.learn.observation_weights(rows, turns)
    assert [
        [(t, w) for t, w in zip(ids, weights, strict=True) if w]
        for ids, weights in zip(
            out["input_ids"].to_pylist(),
            out["observation_weight"].to_pylist(),
            strict=True,
        )
    ] == [[(40, 1)], [(41, 1)]]


def test_a_compaction_goes_on_where_it_was():
    """A tool's answer that is first shown after the history was replaced."""
    summary = said("user", 22)
    turns = [
        call(OPENING, ASK),
        call([OPENING[0], summary, ASK, TOLD], DONE),
        call([OPENING[0], summary, ASK, TOLD, DONE, answer("c2", 42)], DONE),
    ]
    assert [token for _, token, _ in weighed(turns)] == [40, 41, 42]


def test_what_stands_in_the_first_prompt_is_not_weighed():
    shots = [said("user", 23), ASK, TOLD]
    turns = [
        call([*shots, *OPENING], DONE),
        call([*shots, *OPENING, DONE, answer("c2", 42)], DONE),
    ]
    assert [token for _, token, _ in weighed(turns)] == [42]
    # nor by a sub-agent that begins with what the model never said
    turns = [call(OPENING, ASK), call([said("user", 24), DONE, TOLD], DONE)]
    assert weighed(turns) == []


def test_equal_answers_to_siblings_are_two_observations():
    """Without a tool_call_id the reply before it tells them apart."""
    other = said("assistant", 34)
    same = said("tool", 43)
    turns = [
        call(OPENING, DONE),
        call(OPENING, other),
        call([*OPENING, DONE, same], DONE),
        call([*OPENING, other, same], DONE),
    ]
    assert [token for _, token, _ in weighed(turns)] == [43, 43]
    rewritten = said("assistant", 35)
    turns = [
        call(OPENING, DONE),
        call([*OPENING, DONE, same], DONE),
        call([*OPENING, rewritten, same, DONE, TOLD], DONE),
    ]
    assert [token for _, token, _ in weighed(turns)] == [43, 40, 41]


def test_roles_and_tools_have_their_own_alpha():
    turns = [
        call(OPENING, ASK),
        call([*OPENING, ASK, TOLD], calls_tool("read", "c2", 33)),
        call(
            [
                *OPENING,
                *[ASK, TOLD, calls_tool("read", "c2", 33), answer("c2", 42)],
                said("user", 25),
            ],
            DONE,
        ),
    ]
    assert weighed(turns, roles=("tool", "user")) == [
        (0, 40, 1),
        (0, 41, 1),
        (0, 42, 1),
        (0, 25, 1),
    ]
    assert weighed(turns, roles={"tool": 0.5, "user": 0.25}) == [
        (0, 40, 0.5),
        (0, 41, 0.5),
        (0, 42, 0.5),
        (0, 25, 0.25),
    ]
    assert weighed(turns, tool_names=["read"]) == [(0, 42, 1)]
    assert weighed(turns, tool_names={"bash": 0.5, "read": 2}) == [
        (0, 40, 0.5),
        (0, 41, 0.5),
        (0, 42, 2),
    ]


def test_an_assistant_s_message_that_no_model_sampled_may_be_learned():
    injected = said("assistant", 36)
    turns = [
        call(OPENING, DONE),
        call([*OPENING, DONE, said("user", 24), injected, said("user", 25)], DONE),
    ]
    assert weighed(turns, roles=["assistant"]) == [(0, 36, 1)]
    # nor is a reply that was sampled, wherever the row shows it
    turns += [call([*turns[1]["prompt_messages"], DONE, said("user", 26)], DONE)]
    assert weighed(turns, roles=["assistant"]) == [(0, 36, 1)]


def test_a_tool_without_a_name_is_weighed_unless_names_are_asked_for():
    nameless = said("tool", 44)
    turns = [call(OPENING, DONE), call([*OPENING, DONE, nameless], DONE)]
    assert weighed(turns) == [(0, 44, 1)]
    assert weighed(turns, tool_names=["bash"]) == []
    assert counted(turns, tool_names=["bash"])["messages_unnamed"] == 1


def test_a_prompt_of_which_the_tail_alone_was_rendered():
    """Indices and names count from the first new message."""
    names = [None, None, None, "bash"]
    whole = conversation(names=names)
    n = len(whole[0]["prompt_ids"]) + len(whole[0]["output_ids"])
    index, flags = whole[1]["prompt_message_index"], whole[1]["prompt_is_content"]
    tail = conversation(
        names=["bash"],
        prompt_message_index=[-1] * n + [0 if i == 3 else -1 for i in index[n:]],
        prompt_is_content=[False] * n + flags[n:],
    )
    assert weighed(tail) == weighed(whole) == [(0, 40, 1), (0, 41, 1)]
    tail.append(
        call([*OPENING, ASK, TOLD, DONE, answer("c2", 42)], DONE, names=["bash"])
    )
    m = len(tail[1]["prompt_ids"]) + len(tail[1]["output_ids"])
    k = len(tail[2]["prompt_ids"])
    tail[2]["prompt_message_index"] = [-1] * m + [0] * (k - m - 1) + [-1]
    tail[2]["prompt_is_content"] = [False] * m + [False, True, False, False]
    assert [token for _, token, _ in weighed(tail)] == [40, 41, 42]


def test_messages_that_a_missing_turn_attributes_are_a_gap():
    turns = [
        call(OPENING, ASK, turn_index=0),
        call([*OPENING, ASK, TOLD], DONE, turn_index=1),
        call([*OPENING, ASK, TOLD, DONE, answer("c2", 42)], DONE, turn_index=2),
    ]
    n = len(turns[1]["prompt_ids"]) + len(turns[1]["output_ids"])
    last = turns[2]
    last["message_tool_names"] = ["bash"]
    last["prompt_message_index"] = [
        0 if k >= n and i == 5 else -1
        for k, i in enumerate(last["prompt_message_index"])
    ]
    assert [token for _, token, _ in weighed(turns)] == [40, 41, 42]
    with pytest.raises(
        InvalidTurnsError, match="the first 5 of 6 messages are attribut"
    ):
        weighed([turns[0], last])
    assert counted([turns[0], last], missing="skip")["turns_skipped"] == 1


@pytest.mark.parametrize("first", [40, 41])
def test_of_equal_prompts_the_first_says_what_a_tail_leaves_open(first):
    shown = [*OPENING, ASK, TOLD]
    alike = [call(shown, DONE) for _ in range(2)]
    for one, token in zip(alike, (first, 81 - first), strict=True):
        one["prompt_is_content"] = [ids == token for ids in one["prompt_ids"]]
    last = call([*shown, DONE, answer("c2", 42)], DONE)
    m = len(alike[0]["prompt_ids"]) + len(alike[0]["output_ids"])
    last["prompt_message_index"][:m] = [-1] * m
    last["prompt_is_content"][:m] = [False] * m
    # the equal calls have no rows of their own
    turns = [call(OPENING, ASK), *({**one, "trainable": False} for one in alike), last]
    turns[0]["trainable"] = False
    assert [token for _, token, _ in weighed(turns)] == [first, 42]


def test_a_turn_without_messages_is_a_gap():
    records = conversation()
    records[1].update(prompt_messages=None, response_message=None)
    with pytest.raises(InvalidTurnsError, match="turn 1: there are no messages"):
        weighed(records)
    assert weighed(records, missing="skip") == []


def test_the_attribution_of_shared_tokens_may_be_left_out_in_delta_form():
    turns = tk.from_records(drifting())
    rows = tk.linearize(turns)
    delta = tk.compact(turns)
    shared = delta["shared_length"].to_pylist()
    assert any(shared)

    def changed(name, empty, left_out):
        lists = turns[name].to_pylist()
        values = [
            each[n:] if left_out else [empty] * n + each[n:]
            for n, each in zip(shared, lists, strict=True)
        ]
        return pa.array(values, turns.schema.field(name).type)

    def weights(left_out):
        table = delta
        for name, empty in (("prompt_message_index", -1), ("prompt_is_content", False)):
            place = table.schema.get_field_index(name)
            table = table.set_column(place, name, changed(name, empty, left_out))
        return tk.learn.observation_weights(rows, table)

    assert weights(left_out=True).equals(weights(left_out=False))
    assert any(map(any, weights(left_out=True)["observation_weight"].to_pylist()))


def test_a_rollout_that_failed_is_not_weighed():
    assert weighed(conversation(), sessions=facts(None)) != []
    assert weighed(conversation(), "strict", sessions=facts("timeout")) == []


LACKING = [
    pytest.param({"prompt_message_index": None}, "index is null", id="no index"),
    pytest.param(
        {"prompt_message_index": [0] * 9}, "9 values of prompt_mess", id="short index"
    ),
    pytest.param(
        {"names": [None, None, None]}, "index 3 of 3 message_tool", id="short names"
    ),
    pytest.param({"names": [None] * 5}, "5 message_tool_names for 4", id="long names"),
]


@pytest.mark.parametrize(("columns", "match"), LACKING)
def test_a_turn_without_attribution_raises_or_is_counted(columns, match):
    turns = conversation(**columns)
    with pytest.raises(InvalidTurnsError, match=rf"session 's', turn 1: .*{match}"):
        weighed(turns)
    assert weighed(turns, missing="skip") == []
    assert counted(turns, missing="skip")["turns_skipped"] == 1
    # the next call attributes the same tokens
    turns.append(call([*OPENING, ASK, TOLD, DONE, answer("c2", 42)], DONE))
    tokens = [token for _, token, _ in weighed(turns, missing="skip")]
    assert tokens == [40, 41, 42]


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        pytest.param({"prompt_is_content": None}, "is_content is null", id="no flags"),
        pytest.param(
            {"prompt_is_content": [True]}, "1 values of prompt_is", id="short flags"
        ),
    ],
)
def test_a_turn_without_flags_is_refused(columns, match):
    turns = conversation(**columns)
    with pytest.raises(InvalidTurnsError, match=match):
        weighed(turns)
    assert weighed(turns, missing="skip") == []


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tool_names": []}, id="no tools"),
        pytest.param({"tool_names": {}}, id="no tools in a mapping"),
        pytest.param({"roles": []}, id="no roles"),
        pytest.param({"roles": ["user"], "tool_names": ["bash"]}, id="tools of none"),
        pytest.param({"alpha": float("nan")}, id="not a number"),
        pytest.param({"alpha": True}, id="a bool"),
        pytest.param({"roles": {"tool": float("inf")}}, id="infinite"),
    ],
)
def test_choices_that_are_refused(options):
    with pytest.raises(ArgumentError, match=next(iter(options))):
        weighed(conversation(), **options)


def test_rows_of_other_turns_are_refused():
    turns = tk.from_records(conversation())
    rows = tk.linearize(tk.from_records(drifting()), "per_call")
    said = "session 's', row 1: no call of the session has its 1"
    with pytest.raises(InvalidTurnsError, match=said):
        tk.learn.observation_weights(rows, turns)
    other = tk.from_records(conversation()[:1]).slice(0, 0)
    with pytest.raises(InvalidTurnsError, match="row 0: the session has no turns"):
        tk.learn.observation_weights(rows, other)


# --- the rule against its twin


def fully_attributed():
    """Golden sessions whose every call was rendered in full."""
    return [s for s in golden("interleave") if s["knobs"]["attribution"] == "full"]


@pytest.mark.parametrize("policy", ["faithful", "strict", "per_call", "slime", "trl"])
def test_echo_is_its_twin(policy):
    weighed_sessions = 0
    for session in fully_attributed():
        turns = attributed(session)
        rows = tk.linearize(turns, policy)
        out = tk.learn.observation_weights(rows, turns).to_pylist()
        expected = observed_tokens(session["turns"], rows.to_pylist())
        found = [[p for p, w in enumerate(r["observation_weight"]) if w] for r in out]
        assert found == expected
        weighed_sessions += any(expected)
    assert weighed_sessions > 20


# --- the loss: what the authors of prime-rl's rule met, one test each


def learned(records, *, advantage=2.0, alpha=0.25, **options):
    """Rows with advantages and observation weights."""
    records = [
        {**record, "output_logprobs": [-0.5] * len(record["output_ids"])}
        for record in records
    ]
    turns = tk.from_records(records)
    rows = tk.linearize(turns, reward=advantage)
    return tk.learn.observation_weights(rows, turns, alpha=alpha, **options)


def flat(rows, name):
    return np.concatenate([np.array(v, float) for v in rows[name].to_pylist()])


def some_logprobs(rows):
    n = len(flat(rows, "input_ids"))
    return -0.1 * (1 + np.arange(n) % 7)


def gradients(rows, library, *names, **options):
    """Of attributes of the loss, in the logprob of every token."""
    at = some_logprobs(rows)
    if library == "numpy":
        return [by_differences(rows, at, name, options) for name in names]
    found = []
    for name in names:
        leaf = tensor(at, library, requires_grad=True)
        value = getattr(tk.learn.reference_loss(rows, leaf, **options), name)
        value.backward()
        assert leaf.grad is not None
        found.append(leaf.grad.numpy())
    return found


def by_differences(rows, at, name, options):
    step = 1e-6
    found = []
    for k in range(len(at)):
        up, down = at.copy(), at.copy()
        up[k] += step
        down[k] -= step
        high, low = (
            getattr(tk.learn.reference_loss(rows, x, **options), name)
            for x in (up, down)
        )
        found.append((high - low) / (2 * step))
    return np.array(found)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_gradient_is_minus_alpha_on_observed_tokens_and_nothing_leaks(library):
    rows = learned(drifting())
    mask, weights = flat(rows, "loss_mask"), flat(rows, "observation_weight")
    assert weights.sum() == 3 * 0.25
    rl, observation, total = gradients(
        rows, library, "rl_sum", "observation_sum", "total"
    )
    # a gradient that a mask blocks would be 0 here
    assert observation == pytest.approx(-weights, abs=1e-8)
    assert (np.abs(rl) > 1e-3).tolist() == mask.astype(bool).tolist()
    assert total == pytest.approx(rl + observation / 3, abs=1e-6)


def test_the_longest_of_several_prefixes_goes_on():
    """Two rows that the prompt continues; the tool's answer is the longer one's."""
    short = call(OPENING[:1], DONE, output=[])
    cut = {name: short[name][:3] for name in short if name.startswith("prompt_")}
    turns = [
        call(OPENING, ASK),
        {**short, **cut, "prompt_messages": OPENING[:1]},
        call([*OPENING, ASK, TOLD], DONE),
    ]
    assert weighed(turns, "strict") == [(0, 40, 1), (0, 41, 1)]


def test_a_row_is_refused_weights_of_another_length():
    rows = learned(conversation())
    short = pa.array([[1.0]], pa.large_list(pa.float32()))
    rows = rows.drop_columns("observation_weight")
    with pytest.raises(
        InvalidTurnsError, match="row 0: 1 values of observation_weight for 17"
    ):
        tk.learn.reference_loss(
            rows.append_column("observation_weight", short), some_logprobs(rows)
        )
