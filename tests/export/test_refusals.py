"""What a trainer would lose, cut or regroup without a word, exports write or refuse."""

import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trajkit as tk
from tests.export.group_of_rows import (
    EVERY,
    changed,
    one_row_each,
    plain,
    sample_rows,
    with_column,
)
from trajkit import export
from trajkit.cli import main
from trajkit.errors import (
    ArgumentError,
    ExportError,
    LongRowsWarning,
    NoSignalWarning,
)
from trajkit.export import (
    areal,
    nemo_rl,
    openrlhf,
    prime_rl,
    roll,
    sft,
    skyrl,
    slime,
    tinker,
    trl,
    verl,
)

NO_PAYLOADS = {"rlinf", "roll", "sft"}
EXPORTS = {name: make for name, make in EVERY.items() if name not in NO_PAYLOADS}


def group(rewards, groups, *, sessions=None, tokens=3):
    """One row for each rollout."""
    names = sessions or [f"s{k}" for k in range(len(rewards))]
    turns = tk.from_records(
        [
            {
                "session_id": name,
                "prompt_ids": [1, 2],
                "output_ids": [3] * tokens,
                "output_logprobs": [-1.0] * tokens,
            }
            for name in names
        ]
    )
    facts = pa.table({"session_id": names, "reward": rewards, "group_id": groups})
    return tk.linearize(turns, "faithful", sessions=facts)


def payload(rows, name):
    """A payload of the sample rows: one entry per token."""

    def entries(ids, mask):
        n = len(ids) - 1
        if name == "routed_experts":
            return [*([[k, 300 * (k == 2)]] for k in range(n)), None]
        if name == "sampling_mask":
            pairs = zip(ids, mask, strict=True)
            return [[7, token] if trained else None for token, trained in pairs]
        return [None, *[-0.5] * n]

    lines = rows.select(["input_ids", "loss_mask"]).to_pylist()
    return with_column(rows, name, [entries(*line.values()) for line in lines])


CARRIED = {
    "routed_experts": {"miles", "nemo_rl", "prime_rl", "skyrl", "slime", "verl"},
    "sampling_mask": {"prime_rl", "skyrl", "slime"},
    "ref_logprobs": {"prime_rl"},
    "teacher_logprobs": {"miles", "prime_rl", "slime"},
}


@pytest.mark.parametrize("target", EXPORTS)
@pytest.mark.parametrize("name", CARRIED)
def test_payloads_are_carried_or_refused(name, target):
    rows = payload(one_row_each(sample_rows()), name)
    if target in CARRIED[name]:
        without = str(plain(EXPORTS[target](rows.drop_columns([name]))))
        assert str(plain(EXPORTS[target](rows))) != without
    else:
        with pytest.raises(ExportError, match=f"payload {name}, for which the format"):
            EXPORTS[target](rows)


def test_prime_rl_has_experts_for_every_token():
    rows = payload(one_row_each(sample_rows()), "routed_experts")
    found = prime_rl.sample_fields(rows, env_name="e")[1]["routed_experts"]
    assert (found["shape"], found["dtype"]) == ([5, 1, 2], "uint16")
    experts = plain(np.frombuffer(found["data"], "<u2").reshape(5, 2))
    assert experts == [[0, 0], [1, 0], [2, 300], [3, 0], [3, 0]]
    ((batch,),) = prime_rl.micro_batch_fields(
        rows, 16, env_name="e", pad_to_multiple_of=8
    )
    joined = np.frombuffer(batch["routed_experts"]["data"], "<u2").reshape(16, 2)
    assert batch["routed_experts"]["shape"] == [16, 1, 2]
    assert plain(joined[8:15, 0]) == [7, 0, 1, 2, 3, 3, 0]


def test_experts_of_two_models_are_no_micro_batch():
    rows = payload(one_row_each(sample_rows()), "routed_experts")
    first, second = rows["routed_experts"].to_pylist()
    wider = [each and [*each, *each] for each in second]
    rows = with_column(rows, "routed_experts", [first, wider])
    with pytest.raises(ExportError, match=r"shapes \[\(1, 2\), \(2, 2\)\]"):
        prime_rl.micro_batch_fields(rows, 16, env_name="e")


def test_prime_rl_has_a_count_for_every_token():
    rows = payload(one_row_each(sample_rows()), "sampling_mask")
    found = prime_rl.sample_fields(rows, env_name="e")[1]["sampling_mask"]
    assert plain(np.frombuffer(found["counts"], "<i4")) == [0, 0, 0, 2, 2]
    assert plain(np.frombuffer(found["ids"], "<i4")) == [7, 41, 7, 42]
    ((batch,),) = prime_rl.micro_batch_fields(
        rows, 16, env_name="e", pad_to_multiple_of=8
    )
    counts = np.frombuffer(batch["sampling_mask"]["counts"], "<i4")
    assert (len(counts), counts.sum()) == (16, 2 * 7)
    assert len(batch["sampling_mask"]["ids"]) == 4 * 2 * 7


def test_skyrl_has_the_sampled_token_first():
    rows = payload(one_row_each(sample_rows()), "sampling_mask")
    rows = payload(rows, "routed_experts")
    found = skyrl.generator_fields(rows)
    assert plain(found["rollout_sample_support"][1]) == [[41, 7], [42, 7]]
    assert plain(found["rollout_sample_support"][0][2]) == [-1, -1]
    experts = found["rollout_expert_indices"][1]
    assert (experts.shape, experts.dtype) == ((4, 1, 2), np.uint16)


def test_slime_has_offsets_of_the_response():
    rows = one_row_each(sample_rows())
    for name in ("routed_experts", "sampling_mask", "teacher_logprobs"):
        rows = payload(rows, name)
    found = slime.sample_fields(rows)[0]
    assert found["rollout_top_p_token_offsets"] == [0, 2, 4, 4, 6, 8, 10]
    assert found["rollout_top_p_token_ids"][:4] == [7, 21, 7, 22]
    assert found["teacher_log_probs"] == [-0.5] * 6
    assert len(found["rollout_routed_experts"]) == 8


def test_nemo_rl_experts_are_those_of_their_message():
    rows = payload(one_row_each(sample_rows()), "routed_experts")
    for log in nemo_rl.message_log_fields(rows):
        joined = np.concatenate([message["routed_experts"] for message in log])
        n = sum(len(message["token_ids"]) for message in log)
        assert plain(joined[:, 0, 0]) == [*range(n - 1), n - 2]


EVEN = "as many layers and experts for every token"
NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("sampling_mask", [None, None, None, [7], [7, 32]], "token 3 lacks the token"),
        ("sampling_mask", [None, None], "2 values of sampling_mask for 5"),
        ("ref_logprobs", [None, None, None, None, -1.0], "of token 3 is None"),
        ("teacher_logprobs", None, "of token 3 is None"),
        ("ref_logprobs", [0.0, NAN, 0.0, 0.0, 0.0], "of token 1 is nan"),
        ("ref_logprobs", [0.0], "1 values of ref_logprobs for 5"),
        ("observation_weight", [0.0, 0.5, None, 0.0, 0.0], "of token 2 is None"),
        ("observation_weight", [0.5], "1 values of observation_weight for 5"),
        ("routed_experts", [[[1]], None, [[1]], [[1]], None], EVEN),
        ("routed_experts", [[[1]], [[1, 2]], [[1]], [[1]], None], EVEN),
        ("routed_experts", [[[1]], [[-1]], [[1]], [[1]], None], "numbers below 0"),
        ("routed_experts", None, "routed_experts is null"),
    ],
)
def test_values_per_token_that_do_not_fit_are_refused(name, value, match):
    rows = payload(one_row_each(sample_rows()), name)
    (first, _) = rows[name].to_pylist()
    if name == "observation_weight":
        first = [0.0, *first[1:]]
    rows = with_column(rows, name, [first, value])
    with pytest.raises(ExportError, match=f"session 's1', row 0: .*{match}"):
        prime_rl.sample_fields(rows, env_name="e")


def test_prime_rl_has_one_field_for_two_kinds_of_reference():
    rows = payload(one_row_each(sample_rows()), "ref_logprobs")
    rows = payload(rows, "teacher_logprobs")
    with pytest.raises(ExportError, match="Drop one of the columns"):
        prime_rl.sample_fields(rows, env_name="e")
    fields = prime_rl.sample_fields(rows.drop_columns(["ref_logprobs"]), env_name="e")
    assert fields[1]["ref_logprobs"] == [0.0, *[-0.5] * 4]


# --- rows

LONG, SHORT = one_row_each(sample_rows())["loss_mask"].to_pylist()
LOGPROBS = one_row_each(sample_rows())["logprobs"].to_pylist()
GAINS = [[0.5] * len(mask) for mask in (LONG, SHORT)]
NULL = "advantage is null or absent"
WITH_RESPONSE = {"miles", "rlinf", "skyrl", "slime", "trl", "verl"}
OF_LOGPROBS = {*EVERY} - {"sft"}
OF_REWARDS = {"miles", "openrlhf", "rlinf", "roll", "skyrl", "slime", "verl"}
OF_ADVANTAGES = {"areal", "prime_rl", "tinker", "trl_async"}
BY_POSITION = {"openrlhf", "trl"}
OF_S1 = [
    ("loss_mask", [True, *SHORT[1:]], "token 0 is trained", set(EVERY)),
    ("loss_mask", [False] * 5, "no token is trained", set(EVERY)),
    ("loss_mask", SHORT[:4], r".* have lengths \[5, 4, 5\]", set(EVERY)),
    *(
        ("logprobs", [*LOGPROBS[1][:4], value], "token 4 is trained and ", OF_LOGPROBS)
        for value in (None, NAN, float("-inf"))
    ),
    ("prompt_length", 4, "token 3 is trained, .* which is 4", WITH_RESPONSE),
    ("prompt_length", 0, "token 3 .* which is 0: expected 1 to 3", WITH_RESPONSE),
    ("reward", None, "reward is null", OF_REWARDS),
    ("advantage", None, NULL, OF_ADVANTAGES),
]
OTHERS = [
    (changed("advantage", None), NULL, OF_ADVANTAGES),
    (changed("advantage", GAINS), "is a list per token, but", {"trl_async", "areal"}),
    (
        sample_rows(),
        "session 's0', row 0: the rollout has several",
        {"openrlhf", "rlinf", "roll", "trl"},
    ),
    (
        sample_rows().take([0, 2, 1]),
        "session 's0', row 1: .* not contiguous",
        {"skyrl", "slime", "verl", "prime_rl"},
    ),
    (
        group([1.0, 0.0, 1.0, 0.0], ["g", "h", "g", "h"]),
        "other groups lie between the rows of group 'g'",
        BY_POSITION,
    ),
    (
        group([1.0, 0.0, 1.0, 0.0], ["g", "g", "g", "h"]),
        "group 'h' has 1 rows, but 3 were expected",
        BY_POSITION,
    ),
]


def of_s1(name, value):
    """The rows with another value in the row of s1."""
    first, _ = one_row_each(sample_rows())[name].to_pylist()
    return changed(name, [first, value])


@pytest.mark.parametrize(
    ("rows", "match", "targets"),
    [
        *(
            (of_s1(n, v), f"session 's1', row 0: {said}", to)
            for n, v, said, to in OF_S1
        ),
        *OTHERS,
    ],
)
def test_rows_that_a_trainer_would_take_wrongly_are_refused(rows, match, targets):
    for target in targets:
        with pytest.raises(ExportError, match=match):
            EVERY[target](rows)


@pytest.mark.parametrize(
    ("rows", "match", "targets"),
    [
        (changed("advantage", [0.0, 0.0]), "all advantages are 0", OF_ADVANTAGES),
        *(
            (
                group(*facts),
                "no group has two rewards",
                BY_POSITION | {"skyrl", "slime", "verl"},
            )
            for facts in (
                ([1.0, 0.0], ["g", "h"]),
                ([0.3, 0.1 + 0.2], ["g", "g"]),
                ([1.0, 0.0], [None, None]),
            )
        ),
    ],
)
def test_rows_that_train_nothing_are_told(rows, match, targets):
    for target in targets:
        with pytest.warns(NoSignalWarning, match=match):
            EVERY[target](rows)
        EVERY[target](rows.slice(0, 1))  # a rollout of a larger group


def test_areal_takes_rewards_of_one_row_or_advantages():
    with pytest.raises(ExportError, match="Add advantages, and pass reward='adv"):
        areal.trajectory_fields(sample_rows())


# --- groups


def test_async_grpo_groups_are_numbered():
    rows = with_column(
        group([1.0, 0.0, 1.0, 0.0], ["g", "h", "g", "h"]), "advantage", [1.0] * 4
    )
    found = trl.rollout_sample_fields(rows, first_group_id=5)
    assert [one["group_id"] for one in found] == [5, 6, 5, 6]


def test_slime_samples_of_a_group_are_consecutive():
    rows = group([1.0, 0.0, 0.0, 1.0], ["g", "h", "g", "h"])
    found = slime.sample_fields(rows)
    assert [one["group_index"] for one in found] == [0, 0, 1, 1]
    assert [one["reward"] for one in found] == [1.0, 0.0, 0.0, 1.0]
    assert [one["metadata"]["session_id"] for one in found] == ["s0", "s2", "s1", "s3"]
    assert [one["rollout_id"] for one in found] == [0, 1, 2, 3]


def test_a_session_without_a_group_joins_none_with_its_name():
    rows = group(
        [1.0, 0.0, 1.0, 0.0], ["a", "a", None, None], sessions=["x", "y", "a", "b"]
    )
    names = skyrl.generator_fields(rows)["trajectory_ids"]
    for uids in (
        [name.rpartition("_")[0] for name in names],
        [one[0]["extra_fields"]["uid"] for one in verl.agent_loop_fields(rows)],
        verl.padded_fields(rows, 2, 3, 0)["uid"].tolist(),
    ):
        assert uids[0] == uids[1] == "a"
        assert len(set(uids)) == 3
    assert len({*names}) == 4
    assert len(areal.trajectory_fields(rows)) == 3


# --- weights


def uneven():
    """Rollout a has one row, rollout b three of other lengths."""
    calls = {
        "session_id": ["a", "b", "b", "b"],
        "prompt_ids": [[1], [1, 7], [1, 8], [9]],
        "output_ids": [[2], [5, 6], [5, 6], [5]],
        "output_logprobs": [[-1.0], [-1.0] * 2, [-1.0] * 2, [-1.0]],
    }
    rows = tk.linearize(tk.from_records(pa.table(calls).to_pylist()), "per_call")
    gains = pa.table({"session_id": ["a", "b"], "advantage": [1.0, -1.0]})
    return tk.add_advantages(rows, gains)


COUNTS = export.StepCounts(rollouts=2, tokens=6)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (trl.rollout_sample_fields, {"weighted": True}),
        (tinker.datum_fields, {}),
        (tinker.datum_fields, {"reduce": "sum"}),
        (prime_rl.sample_fields, {"env_name": "e", "weighted": COUNTS}),
        (areal.trajectory_fields, {"weighted": COUNTS}),
    ],
)
def test_weights_do_not_depend_on_the_other_rows(make, options):
    rows = uneven()

    names = {"advantage", "advantages", "rl_weights", "rewards"}

    def factors(rows):
        fields = make(rows, **options)
        return [{k: plain(v) for k, v in one.items() if k in names} for one in fields]

    alone = factors(rows.slice(0, 1)) + factors(rows.slice(1))
    assert factors(rows) == alone
    assert alone[0] != alone[1]


def test_weights_over_a_step_need_its_counts():
    assert export.step_counts(uneven()) == COUNTS
    makes = (prime_rl.sample_fields, {"env_name": "e"}), (areal.trajectory_fields, {})
    for make, options in makes:
        with pytest.raises(ExportError, match=r"weighted=True: .* divides by the tra"):
            make(uneven(), weighted=True, **options)


@pytest.mark.parametrize("weight", [None, float("nan"), -1.0])
def test_a_row_weight_that_is_no_number_is_refused(weight):
    rows = with_column(uneven(), "row_weight", [1.0, 1.0, weight, 1.0], pa.float64())
    for make in (tinker.datum_fields, trl.rollout_sample_fields):
        with pytest.raises(ExportError, match="session 'b', row 1: row_weight is"):
            make(rows, weighted=True)


# --- lengths


@pytest.mark.parametrize(
    ("make", "name", "others"),
    [
        (openrlhf.execution_fields, "max_len", {}),
        (prime_rl.sample_fields, "seq_len", {"env_name": "e"}),
        (sft.labels_table, "max_length", {}),
        (roll.batch_fields, "sequence_length", {"pad_token_id": 0}),
    ],
)
def test_rows_beyond_the_trainers_limit_are_refused(make, name, others):
    rows, limit = group([1.0, 0.0], ["g", "g"], tokens=2047), {name: 2048}
    rows = with_column(rows, "advantage", [1.0, -1.0])
    # 2048 is their default
    given = {} if make in (openrlhf.execution_fields, prime_rl.sample_fields) else limit
    with pytest.raises(ExportError, match=f"2049 tokens, but .* at .*{name} 2048"):
        make(rows, **others, **given)
    make(rows, **others, **{name: 2049})


def test_rows_that_trl_would_cut_are_told():
    rows = group([1.0], ["g"], tokens=1023)
    with pytest.warns(
        LongRowsWarning, match=r"has 1025 tokens, .* Set it to 1025 or None"
    ):
        sft.labels_table(rows)
    assert sft.labels_table(rows, max_length=1025).num_rows == 1
    assert sft.labels_table(group([1.0], ["g"], tokens=1022)).num_rows == 1


# --- files


@pytest.fixture
def files(tmp_path):
    """Rows of a group with two rewards, and one with one."""
    for name, rewards in (("rows", [1.0, 0.0]), ("equal", [1.0, 1.0])):
        tk.write_rows(group(rewards, ["g", "g"]), tmp_path / f"{name}.parquet")
    return tmp_path


def run(folder, rows, target, *words):
    command = ["export", str(folder / f"{rows}.parquet"), "--to", target]
    return main([*command, "-o", str(folder / "out"), *words])


def test_supervised_files_are_what_axolotl_takes_for_tokenized(files, capsys):
    assert run(files, "rows", "sft") == 0
    table = pq.read_table(files / "out" / "rows.parquet")
    assert table.column_names == ["input_ids", "attention_mask", "labels"]
    assert "2 rows for sft" in capsys.readouterr().out


def test_llama_factory_loads_the_folder(files, capsys):
    datasets = pytest.importorskip("datasets")
    assert run(files, "rows", "llama-factory") == 0
    # no bar of datasets, where stderr is no terminal
    assert capsys.readouterr().err == ""
    found = datasets.load_from_disk(str(files / "out" / "tokenized"))
    assert found.column_names == ["input_ids", "attention_mask", "labels"]
    assert found[0]["labels"] == [-100, -100, 3, 3, 3]
    assert [path.name for path in (files / "out").iterdir()] == ["tokenized"]


def test_advantages_come_from_the_rows_or_from_sessions(files):
    sessions = files / "sessions.jsonl"
    lines = [{"session_id": f"s{k}", "reward": k, "group_id": "g"} for k in range(2)]
    sessions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = []
    for words in (
        ["--advantage", "group_mean"],
        ["--advantage", "group_std"],
        ["--sessions", str(sessions)],
    ):
        assert run(files, "rows", "tinker", *words) == 0
        lines = (files / "out" / "datums.jsonl").read_text().splitlines()
        gains = [json.loads(line)["loss_fn_inputs"]["advantages"][-1] for line in lines]
        found.append(np.array(gains) * 3)
    np.testing.assert_allclose(found[0], [0.5, -0.5], rtol=1e-6)
    np.testing.assert_allclose(found[1], [0.5**0.5, -(0.5**0.5)], rtol=1e-5)
    np.testing.assert_allclose(found[2], [-0.5, 0.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("rows", "target", "words", "match"),
    [
        ("equal", "tinker", ["--advantage", "group_mean"], "all 2 advantages are 0"),
        ("equal", "prime-rl", ["--advantage", "group_mean"], "all 2 advantages are 0"),
        ("rows", "tinker", [], "advantage is null or absent"),
        ("rows", "sft", ["--max-length", "4"], "5 tokens, but"),
        ("rows", "sft", ["--advantage", "none"], "does nothing with --to sft"),
    ],
)
def test_failing_exports_leave_nothing_behind(
    files, capsys, rows, target, words, match
):
    before = sorted(files.rglob("*"))
    assert run(files, rows, target, *words) != 0
    assert match in capsys.readouterr().err
    assert sorted(files.rglob("*")) == before


@pytest.mark.parametrize(
    ("target", "name", "words"),
    [
        ("slime", "torch", []),
        ("llama-factory", "datasets", []),
        ("prime-rl", "msgspec", ["--advantage", "group_mean"]),
    ],
)
def test_a_missing_package_is_one_line(files, monkeypatch, capsys, target, name, words):
    monkeypatch.setitem(sys.modules, name, None)
    assert run(files, "rows", target, *words) == 2
    said = f"trajkit: this needs {name}, which is not installed: pip install {name}\n"
    assert capsys.readouterr().err == said
    assert not (files / "out").exists()


def test_the_micro_batches_of_a_step_appear_together(tmp_path, monkeypatch):
    msgspec = pytest.importorskip("msgspec")
    rows = sample_rows()
    options = {"env_name": "e", "ranks": 2}
    encode, calls = msgspec.msgpack.encode, []

    def full(content):
        calls.append(content)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return encode(content)

    monkeypatch.setattr(msgspec.msgpack, "encode", full)
    with pytest.raises(OSError, match="No space left"):
        prime_rl.write_micro_batches(rows, tmp_path, 3, 16, **options)
    assert [*tmp_path.rglob("*")] == []
    prime_rl.write_micro_batches(rows, tmp_path, 3, 16, **options)
    with pytest.raises(FileExistsError, match="step_3"):
        prime_rl.write_micro_batches(rows, tmp_path, 3, 16, **options)
    assert len([*tmp_path.rglob("*.*")]) == 2


VERL = {"prompt_length": 8, "response_length": 8, "pad_token_id": 0}


@pytest.mark.parametrize("value", ["2", 2.0, True])
@pytest.mark.parametrize(
    ("make", "name", "others"),
    [
        *((verl.padded_fields, name, VERL) for name in VERL),
        (roll.batch_fields, "sequence_length", {"pad_token_id": 0}),
        (trl.rollout_sample_fields, "model_version", {}),
        (trl.rollout_func_fields, "num_generations", {}),
        (openrlhf.execution_fields, "max_len", {}),
        (slime.sample_fields, "first_index", {}),
        (areal.trajectory_fields, "version", {}),
    ],
)
def test_numbers_are_numbers(make, name, others, value):
    rows = with_column(group([1.0, 0.0], ["g", "g"]), "advantage", [1.0, -1.0])
    with pytest.raises(ArgumentError, match=f"{name}="):
        make(rows, **others | {name: value})
