"""Observation weights: each observed token is learned once per rollout."""

from random import Random

import numpy as np
import pyarrow as pa
import pytest

import trajkit as tk
from tests.libraries import LIBRARIES, tensor
from tests.oracles.rows import observed_tokens
from trajkit.errors import ArgumentError, InvalidTurnsError


def facts(error):
    return pa.table(
        {
            "session_id": ["s"],
            "reward": [1.0],
            "error": pa.array([error], pa.string()),
        }
    )


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
    turns = tk.from_records(records) if isinstance(records, list) else records
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
    half = {"tool": 0.5}
    out = tk.learn.observation_weights(rows, turns, roles=half)
    assert weighed(conversation(), roles=half) == [(0, 40, 0.5), (0, 41, 0.5)]
    assert out.drop_columns("observation_weight").equals(rows)
    assert out.schema.field("observation_weight").type == pa.large_list(pa.float32())
    assert tk.learn.observation_weights(out, turns, roles=half).equals(out)


def some_calls(random):
    """Calls of a session; some go on from others, whose reply may come back changed."""
    replies = [DONE, ASK, said("assistant", 33)]
    shown = [TOLD, said("tool", 43), said("tool", 43, 44), said("user", 24)]
    lists, records = [OPENING], []
    for _ in range(random.randint(1, 6)):
        base = random.choice([OPENING[:1], *lists, *lists[-1:]])
        messages = [*base, *random.choices(shown, k=random.randint(base != OPENING, 2))]
        reply = random.choice(replies)
        records.append(call(messages, reply))
        lists.append([*messages, random.choice([reply, reply, random.choice(replies)])])
    return records


@pytest.mark.parametrize("policy", ["faithful", "strict", "per_call", "slime", "trl"])
def test_weighed_tokens_are_the_twin_s(policy):
    """Each once, however many rows repeat it, and none that the first prompt shows."""
    observed = repeated = 0
    for seed in range(12):
        records = some_calls(Random(seed))
        turns = tk.from_records(records)
        rows = tk.linearize(turns, policy)
        for roles in (("tool",), ("tool", "user")):
            choice = {"roles": dict.fromkeys(roles, 1.0)}
            out = tk.learn.observation_weights(rows, turns, **choice)
            found = [
                [p for p, weight in enumerate(weights) if weight]
                for weights in out["observation_weight"].to_pylist()
            ]
            assert found == observed_tokens(records, rows.to_pylist(), roles), seed
            (line,) = tk.learn.observation_report(rows, turns, **choice).to_pylist()
            assert line["tokens_observed"] == sum(map(len, found))
            observed += line["tokens_observed"]
            repeated += line["tokens_repeated"]
    assert observed > 12
    assert repeated > 0


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


def test_roles_and_tools_have_their_own_weight():
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
    assert weighed(turns, roles={"tool": 0.5, "user": 0.25}) == [
        (0, 40, 0.5),
        (0, 41, 0.5),
        (0, 42, 0.5),
        (0, 25, 0.25),
    ]
    assert weighed(turns, tool_names={"read": 1}) == [(0, 42, 1)]
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
    assert weighed(turns, roles={"assistant": 1}) == [(0, 36, 1)]
    # nor is a reply that was sampled, wherever the row shows it
    turns += [call([*turns[1]["prompt_messages"], DONE, said("user", 26)], DONE)]
    assert weighed(turns, roles={"assistant": 1}) == [(0, 36, 1)]


def test_a_tool_without_a_name_is_weighed_unless_names_are_asked_for():
    nameless = said("tool", 44)
    turns = [call(OPENING, DONE), call([*OPENING, DONE, nameless], DONE)]
    assert weighed(turns) == [(0, 44, 1)]
    assert weighed(turns, tool_names={"bash": 1}) == []
    assert counted(turns, tool_names={"bash": 1})["messages_unnamed"] == 1


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
    for name in ("prompt_message_index", "prompt_is_content"):
        tail[1][name] = tail[1][name][n:]
    assert weighed(tail) == weighed(whole)
    assert weighed(tk.compact(tk.from_records(tail))) == weighed(whole)
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


def test_a_rollout_that_failed_is_not_weighed():
    assert weighed(conversation(), sessions=facts(None)) != []
    assert weighed(conversation(), "strict", sessions=facts("timeout")) == []


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"prompt_message_index": None}, "index is null"),
        ({"prompt_message_index": [0] * 99}, "99 values of prompt_mess"),
        ({"names": [None, None, None]}, "index 3 of 3 message_tool"),
        ({"names": [None] * 5}, "5 message_tool_names for 4"),
        ({"prompt_is_content": None}, "is_content is null"),
        ({"prompt_is_content": [True]}, "1 values of prompt_is_content and 15 of"),
    ],
)
def test_a_turn_without_attribution_raises_or_is_counted(columns, match):
    turns = conversation(**columns)
    with pytest.raises(
        InvalidTurnsError, match=rf"'s', turn 1: .*{match}.*--attribution"
    ):
        weighed(turns)
    assert weighed(turns, missing="skip") == []
    assert counted(turns, missing="skip")["turns_skipped"] == 1
    # the next call attributes the same tokens
    turns.append(call([*OPENING, ASK, TOLD, DONE, answer("c2", 42)], DONE))
    tokens = [token for _, token, _ in weighed(turns, missing="skip")]
    assert tokens == [40, 41, 42]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tool_names": {}}, id="no tools"),
        pytest.param({"roles": {}}, id="no roles"),
        pytest.param({"roles": ["tool"]}, id="no weights"),
        pytest.param({"tool_names": {"a": 1}, "roles": {"user": 1}}, id="no tool role"),
        pytest.param({"roles": {"tool": True}}, id="a bool"),
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


# --- the loss: what the authors of prime-rl's rule met, one test each


def learned(records, *, advantage=2.0, **options):
    """Rows with advantages and observation weights."""
    records = [
        {**record, "output_logprobs": [-0.5] * len(record["output_ids"])}
        for record in records
    ]
    turns = tk.from_records(records)
    rows = tk.linearize(turns, reward=advantage)
    return tk.learn.observation_weights(rows, turns, roles={"tool": 0.25}, **options)


def flat(rows, name):
    return np.concatenate([np.array(v, float) for v in rows[name].to_pylist()])


def some_logprobs(rows):
    n = len(flat(rows, "input_ids"))
    return -0.1 * (1 + np.arange(n) % 7)


@pytest.mark.parametrize("library", LIBRARIES)
def test_observed_tokens_count_and_nothing_leaks(library):
    rows = learned(drifting())
    mask, weights = (
        flat(rows, "loss_mask").astype(bool),
        flat(rows, "observation_weight"),
    )
    assert weights.sum() == 3 * 0.25
    now = some_logprobs(rows)
    at = tensor(now, library, requires_grad=True)
    loss = tk.learn.reference_loss(rows, at)
    sums = [one.item() for one in (loss.rl_sum, loss.observation_sum, loss.total)]
    assert sums[1] == pytest.approx(-(weights * now).sum())
    assert sums[2] == pytest.approx(sums[0] + sums[1] / 3)
    if library == "numpy":
        return
    found = []
    for value in (loss.rl_sum, loss.observation_sum, loss.total):
        at.grad = None
        value.backward(retain_graph=True)
        found.append(at.grad.numpy())
    rl, observation, total = found
    # a gradient that a mask blocks would be 0 here
    assert observation == pytest.approx(-weights, abs=1e-8)
    assert (np.abs(rl) > 1e-3).tolist() == mask.tolist()
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
