"""The fields of every format are those that the trainers' own code made or took."""

from hashlib import sha256
from itertools import chain

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import trajkit as tk
from tests.export.group_of_rows import (
    EVERY,
    TARGETS,
    one_row_each,
    plain,
    sample_rows,
    with_column,
)
from tests.made_tables import turns_table
from tests.strategies import runs
from trajkit.errors import ExportError
from trajkit.export import (
    areal,
    miles,
    nemo_rl,
    openrlhf,
    prime_rl,
    rlinf,
    rllm,
    roll,
    sft,
    skyrl,
    slime,
    tinker,
    trl,
    verl,
)
from trajkit.turns import content_ids

ROWS = sample_rows()
EACH = one_row_each(ROWS)


def subset(found, due):
    """What ``found`` has in the fields that ``due`` has."""
    if isinstance(due, dict):
        return {name: subset(found[name], due[name]) for name in due}
    if isinstance(due, list) and due and isinstance(due[0], list | dict):
        return [subset(*pair) for pair in zip(found, due, strict=True)]
    return plain(found)


GRPO = TARGETS["trl_grpo"]["rollout_func_returns"]
GRPO["reward"] = GRPO.pop("rwd")
STEP_SCORES = TARGETS["roll"]["non_tensor_batch"].pop("step_scores")
LABELS = {"labels": TARGETS["hf_sft"]["labels_that_SFTTrainer_makes"]["labels"]}
MADE = {
    "nemo_rl": (nemo_rl.message_log_fields, ROWS, TARGETS["nemo_rl"]["message_log"]),
    "roll": (
        lambda rows: [*roll.batch_fields(rows, sequence_length=12, pad_token_id=0)],
        EACH,
        [TARGETS["roll"]["batch"], TARGETS["roll"]["non_tensor_batch"]],
    ),
    "sft": (lambda rows: sft.labels_table(rows).to_pydict(), ROWS, LABELS),
    "skyrl": (skyrl.generator_fields, ROWS, TARGETS["skyrl"]["generator_output"]),
    "slime": (slime.sample_fields, ROWS, TARGETS["slime"]["samples"]),
    "trl": (trl.rollout_func_fields, EACH, GRPO),
    "trl async": (
        trl.rollout_sample_fields,
        ROWS,
        TARGETS["trl_async_grpo"]["samples"],
    ),
}


@pytest.mark.parametrize(("make", "rows", "due"), MADE.values(), ids=MADE)
def test_fields_are_those_that_the_trainer_s_code_made(make, rows, due):
    assert subset(make(rows), due) == due


def test_no_field_is_there_that_a_trainer_does_not_take():
    for name in ("skyrl", "trl"):
        make, rows, due = MADE[name]
        assert make(rows).keys() == due.keys()
    batch, facts = MADE["roll"][0](EACH)
    assert batch.keys() == TARGETS["roll"]["batch"].keys()
    # it adds the rewards of the steps up
    assert [*map(sum, facts["step_scores"])] == [*map(sum, STEP_SCORES)]


def test_tinker_data_are_those_of_the_cookbook():
    found = tinker.datum_fields(ROWS, weighted=False)
    for one, due in zip(found, TARGETS["tinker"]["data"], strict=True):
        assert one["model_input"] == due["model_input"]
        for name in ("target_tokens", "logprobs", "advantages", "mask"):
            assert plain(one[name]) == due[name]["data"]
            assert str(one[name].dtype) == due[name]["dtype"]


def test_openrlhf_executions_are_those_of_its_samples():
    dues = TARGETS["openrlhf"]["experiences"][::2]
    for one, due in zip(openrlhf.execution_fields(EACH), dues, strict=True):
        mask = np.zeros(len(one["observation_tokens"]), int)
        for start, stop in one["action_ranges"]:
            mask[start:stop] = 1
        assert due["sequences"] == [one["observation_tokens"]]
        assert due["action_mask"] == [mask[1:].tolist()]
        assert due["rollout_log_probs"] == [one["rollout_log_probs"][1:]]
        assert (due["rewards"], due["truncated"]) == (
            [one["reward"]],
            [one["truncated"]],
        )


def test_miles_samples_are_what_its_class_takes():
    samples = miles.sample_fields(ROWS)
    assert samples == slime.sample_fields(ROWS)
    assert samples[2]["metadata"]["truncated"] is True
    for one, due in zip(
        samples, TARGETS["miles"]["status, trained tokens and rollout"], strict=True
    ):
        found = [one["status"].upper(), sum(one["loss_mask"]), one["rollout_id"]]
        assert found == due


def test_arrays_have_the_types_of_the_trainers():
    one = trl.rollout_sample_fields(ROWS)[0]
    assert one["input_ids"].dtype == one["completion_mask"].dtype == np.int64
    assert one["old_log_probs"].dtype == np.float32
    for message in chain.from_iterable(nemo_rl.message_log_fields(ROWS)):
        assert message["token_ids"].dtype == np.int64
        assert len(message["generation_logprobs"]) == len(message["token_ids"])
    flags = skyrl.generator_fields(ROWS)["is_last_step"]
    assert [type(flag) for flag in flags] == [bool] * 3
    assert set(sft.labels_table(ROWS).schema.types) == {pa.list_(pa.int32())}


def test_supervised_rows_are_attended_whole():
    masks = [[1] * n for n in map(len, ROWS["input_ids"].to_pylist())]
    assert sft.labels_table(ROWS)["attention_mask"].to_pylist() == masks
    assert (
        sft.mask_table(ROWS)["loss_mask"].to_pylist() == ROWS["loss_mask"].to_pylist()
    )


def test_slime_numbers_rollouts_and_groups_from_the_given_ones():
    found = slime.sample_fields(ROWS, first_index=8, first_group_index=3)
    assert [one["rollout_id"] for one in found] == [8, 8, 9]
    assert {one["group_index"] for one in found} == {3}


def test_verl_batches_are_padded_as_its_own():
    due = TARGETS["verl"]["padded"]
    found = verl.padded_fields(ROWS, 6, 8, pad_token_id=0)
    for name in due.keys() - {"token_level_rewards", "position_ids"}:
        assert plain(found[name]) == due[name], name
    seen = found["attention_mask"] == 1
    places = np.array(due["position_ids"])
    assert plain(found["position_ids"][seen]) == plain(places[seen])
    assert plain(found["uid"]) == TARGETS["verl"]["uid"]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((4, 8), "5 and 2 tokens, but .* are 4 and 8"),
        ((6, 5), "3 and 6 tokens, but .* are 6 and 5"),
    ],
)
def test_verl_batches_truncate_nothing(sizes, said):
    with pytest.raises(ExportError, match=said):
        verl.padded_fields(ROWS, *sizes, pad_token_id=0)


def on_newest_wire(recorded, **appended):
    """The fields recorded at 559b44772, under the names and with the fields since then."""
    names = {"mm_kwargs": "mm_refs"}
    return {names.get(name, name): value for name, value in recorded.items()} | appended


def test_prime_rl_samples_are_those_of_its_wire_format():
    due = [
        on_newest_wire(
            one,
            sampling_mask=None,
            trace_id=row["session_id"],
            branch_index=row["row_index"],
            payload=None,
        )
        for one, row in zip(
            TARGETS["prime_rl"]["samples"], ROWS.to_pylist(), strict=True
        )
    ]
    found = prime_rl.sample_fields(ROWS, env_name="demo")
    assert [list(one) for one in found] == [list(two) for two in due]
    assert found == due
    for name, said in (("all", "other than 'all'"), (None, "env_name is None")):
        with pytest.raises(ExportError, match=said):
            prime_rl.sample_fields(ROWS, env_name=name)


def test_prime_rl_micro_batches_are_those_of_its_packer():
    traces = [(["s0", "s0"], [0, 1]), (["s1"], [0])]
    due = [
        on_newest_wire(
            one, sampling_mask=None, trace_ids=ids, branch_indices=rows, payload=None
        )
        for one, (ids, rows) in zip(
            TARGETS["prime_rl"]["micro_batches"], traces, strict=True
        )
    ]
    found = prime_rl.micro_batch_fields(
        ROWS, 16, env_name="demo", ranks=2, pad_to_multiple_of=8
    )
    assert found == [[batch] for batch in due]
    assert [list(batch) for batches in found for batch in batches] == [
        list(batch) for batch in due
    ]


def test_prime_rl_ranks_have_as_many_micro_batches():
    """A rank without a row gets padding that trains nothing."""
    rows = ROWS.append_column(
        "observation_weight",
        pa.array([[0.0, 0.5, *[0.0] * 7], None, None], pa.list_(pa.float32())),
    )
    found = prime_rl.micro_batch_fields(
        rows, 16, env_name="demo", ranks=3, weighted=True
    )
    assert [len(batches) for batches in found] == [1, 1, 1]
    (first,), (second,), (padding,) = found
    assert first["ce_weights"] == [0.0, 0.5, *[0.0] * 14]
    assert second["ce_weights"] is None
    weights = [
        one["rl_weights"]
        for one in prime_rl.sample_fields(
            rows, env_name="demo", weighted=tk.export.step_counts(rows)
        )
    ]
    assert first["rl_weights"] == weights[0] + weights[1]
    assert padding["loss_mask"] == [False]
    assert padding["input_ids"] == [1]
    assert padding["sequence_lengths"] == [1]


def test_prime_rl_and_tinker_take_advantages_per_token():
    gains = [
        [float(k + 1) for k in range(n)]
        for n in map(len, ROWS["input_ids"].to_pylist())
    ]
    rows = with_column(ROWS, "advantage", gains)
    first = prime_rl.sample_fields(rows, env_name="demo")[0]
    assert first["advantages"] == [0, 0, 0, 4, 5, 0, 7, 8, 9]
    datum = tinker.datum_fields(rows, weighted=False)[0]
    assert plain(datum["advantages"]) == [0, 0, 4, 5, 0, 7, 8, 9]
    short = with_column(rows, "advantage", [gains[0][1:], *gains[1:]])
    with pytest.raises(ExportError, match="row 0: 8 advantages for 9 tokens"):
        tinker.datum_fields(short)


@given(
    runs(), st.sampled_from(["faithful", "slime", "trl", "nemo", "per_call", "miles"])
)
def test_tinker_provenance_names_the_tokens_of_turns(turns, policy):
    turns = [{**turn, "prompt_ids": turn["prompt_ids"] or [1]} for turn in turns]
    table = turns_table(turns)
    rows = tk.linearize(table, tk.policy(policy, missing_logprobs="untrain"))
    trains = [any(mask) for mask in rows["loss_mask"].to_pylist()]
    rows = rows.filter(pa.array(trains, pa.bool_()))
    rows = rows.append_column("advantage", pa.array([1.0] * len(rows)))
    known = {
        f"{turn['session_id']}/{turn['turn_index']}": turn for turn in table.to_pylist()
    }
    columns = {"sampled": "output_ids", "prompt": "prompt_ids"}

    def named(spans):
        """The tokens that spans name, and the kind of each."""
        for span in spans:
            ids = known[span["sequence_id"]][columns[span["kind"]]]
            for k in range(span["offset"], span["offset"] + span["length"]):
                yield ids[k], span["kind"]

    for datum, row in zip(tinker.datum_fields(rows), rows.to_pylist(), strict=True):
        for name in ("session_id", "row_index"):
            assert datum[name] == row[name]
        of_model = [*named(datum["model_input_spans"])]
        of_loss = [*named(datum["loss_fn_input_spans"])]
        assert [token for token, _ in of_model] == row["input_ids"][:-1]
        assert [token for token, _ in of_loss] == row["input_ids"][1:]
        for (_, kind), trained in zip(of_loss, row["loss_mask"][1:], strict=True):
            assert kind == "sampled" or not trained


def test_areal_trajectories_are_those_of_its_workflows():
    due = TARGETS["areal"]["padded"]
    (found,) = areal.trajectory_fields(ROWS, version=7, reward="advantage")
    for name in ("input_ids", "loss_mask", "logprobs", "attention_mask"):
        assert plain(found[name]) == due[name], name
    # AReaL pads versions with 0, off the mask
    real = found["attention_mask"]
    assert plain(found["versions"][real]) == plain(np.array(due["versions"])[real])
    assert plain(found["rewards"]) == [0.5, 0.5, -0.5]
    assert plain(found["turn_ids"]) == [
        [-1, -1, -1, 0, 0, -1, 1, 1, 1],
        [-1, -1, -1, -1, -1, 0, 0, -1, -1],
        [-1, -1, -1, 0, 0, -1, -1, -1, -1],
    ]


def test_areal_rows_end_with_their_last_trained_token():
    """AReaL puts the reward at the end of the row and loses it if that is context."""
    case = TARGETS["areal"]["row_that_ends_in_context"]
    row = EACH.slice(0, 1)
    mask, span = case["loss_mask"], row["spans"][0].as_py()[0]
    columns = {
        "input_ids": case["input_ids"],
        "loss_mask": [bool(bit) for bit in mask],
        "logprobs": [-1.0 if bit else None for bit in mask],
        "spans": [{**span, "start": a, "stop": b} for a, b in ((3, 5), (6, 9))],
    }
    for name, values in columns.items():
        row = with_column(row, name, [values])
    (found,) = areal.trajectory_fields(row)
    assert plain(found["input_ids"]) == [case["input_ids"][:9]]
    assert plain(found["rewards"]) == [1.0]


def test_areal_versions_are_integers():
    masks = EACH["loss_mask"].to_pylist()
    names = [["3" if trained else None for trained in mask] for mask in masks]

    def versions(**options):
        rows = EACH.append_column("weight_version", pa.array(names))
        return plain(areal.trajectory_fields(rows, **options)[0]["versions"][0])

    assert versions() == [-1, -1, -1, 3, 3, -1, 3, 3, 3]
    mask, own = masks[0], names[0]
    for name, at_3 in (("step-1", ["step-1"]), (None, [None]), (None, None)):
        names[0] = at_3 and [*own[:3], *at_3, *own[4:]]
        with pytest.raises(ExportError, match=f"{name!r} of token 3 is not an integer"):
            versions()
    assert versions(version=2) == [2 if trained else -1 for trained in mask]


def test_miles_takes_experts_as_arrays():
    experts = [[[[1]]] * len(ids) for ids in ROWS["input_ids"].to_pylist()]
    table = ROWS.append_column("routed_experts", pa.array(experts))
    found = miles.sample_fields(table)[0]["rollout_routed_experts"]
    assert (found.dtype, found.shape) == (np.int32, (8, 1, 1))


def test_rlinf_results_have_the_mask_of_the_rows():
    found = rlinf.rollout_fields(EACH, group_size=2)
    masks = TARGETS["rlinf"]["response_mask"]
    for k, (row, mask) in enumerate(zip(EACH.to_pylist(), masks, strict=True)):
        n = found["prompt_lengths"][k] + found["response_lengths"][k]
        assert mask[:n] == row["loss_mask"]
        assert found["prompt_ids"][k] + found["response_ids"][k] == row["input_ids"]
    assert found["rewards"] == [1.0, 0.0]
    assert found["is_end"] == [True, False]
    with pytest.raises(ExportError, match="has 2 rows, but 3 were expected"):
        rlinf.rollout_fields(EACH, group_size=3)


CALL = {
    "session_id": "a",
    "prompt_ids": [1],
    "output_ids": [2],
    "output_logprobs": [-1],
}


def test_rllm_episodes_have_the_turns():
    span = {"version": "7", "start": 0, "stop": 1}
    calls = [
        {**CALL, "weight_versions": [span]},
        {**CALL, "prompt_ids": [1, 2, 3], "trainable": False},
        {**CALL, "prompt_ids": [1, 2, 3, 2, 9], "output_ids": [8]},
        {**CALL, "session_id": "b"},
    ]
    names = {"session_id": ["a", "b"], "group_id": ["g", "g"], "reward": [1.0, 0.0]}
    one, two = rllm.episode_fields(tk.from_records(calls), pa.table(names))
    assert (one["id"], two["id"], one["task"]) == ("g:0", "g:1", "g")
    (path,) = one["trajectories"]
    assert (path["name"], path["reward"]) == ("agent", 1.0)
    assert [step["prompt_ids"] for step in path["steps"]] == [[1], [1, 2, 3, 2, 9]]
    assert [step["response_ids"] for step in path["steps"]] == [[2], [8]]
    assert [step["logprobs"] for step in path["steps"]] == [[-1.0], [-1.0]]
    assert [step["done"] for step in path["steps"]] == [False, True]
    assert [step["weight_version"] for step in path["steps"]] == [7, None]


@pytest.mark.parametrize(
    ("call", "reward", "group", "said"),
    [
        ({}, None, "g", "the session has no reward"),
        ({}, 1.0, "g:1", "the group 'g:1' has a colon"),
        ({"output_mask": [False]}, 1.0, "g", "turn 0: output_mask leaves"),
        ({"output_logprobs": [None]}, 1.0, "g", "turn 0: output_logprobs has a null"),
    ],
)
def test_rllm_takes_no_part_of_a_turn(call, reward, group, said):
    turns = tk.from_records([{**CALL, **call}])
    sessions = {"session_id": ["a"], "group_id": [group], "reward": [reward]}
    with pytest.raises(ExportError, match=said):
        rllm.episode_fields(turns, pa.table(sessions))


# --- images


def rows_with_an_image(folder, **choices):
    """A turn before the image and one after it, and the image's file."""
    folder.mkdir(exist_ok=True)
    image = Image.new("RGB", (5, 3), (200, 10, 10))
    image.save(folder / "drawn.png")
    data = (folder / "drawn.png").read_bytes()
    digest = sha256(data).hexdigest()
    (folder / digest).write_bytes(data)
    item = {"kind": "image", "hash": digest, "token_id": 7, "start": 3, "stop": 6}
    ids = [1, 2, 3, *content_ids("image", digest, 3).tolist(), 4]
    call = {"session_id": "a", "output_logprobs": [-1.0]}
    turns = tk.from_records(
        [
            {**call, "prompt_ids": [1, 2], "output_ids": [3]},
            {**call, "prompt_ids": ids, "output_ids": [5], "mm_items": [item]},
        ]
    )
    return tk.linearize(turns, "faithful", reward=1.0, **choices)


def test_verl_gets_images_and_the_ids_of_the_engine(tmp_path):
    rows = rows_with_an_image(tmp_path / "images")
    ((fields,),) = verl.agent_loop_fields(rows, images=tmp_path / "images")
    assert fields["prompt_ids"] + fields["response_ids"] == [1, 2, 3, 7, 7, 7, 4, 5]
    (image,) = fields["multi_modal_data"]["images"]
    assert (image.size, image.getpixel((0, 0))) == ((5, 3), (200, 10, 10))
    with pytest.raises(ExportError, match="No such file"):
        verl.agent_loop_fields(rows, images=tmp_path)


def test_verl_opens_no_file_outside_the_folder(tmp_path):
    rows = rows_with_an_image(tmp_path / "images")
    (tmp_path / "other").mkdir()
    [items] = [listed for listed in rows["mm_items"].to_pylist() if listed]
    named = [None, [{**items[0], "hash": "../images/drawn.png"}]][-len(rows) :]
    with pytest.raises(ExportError, match="is not the SHA-256"):
        verl.agent_loop_fields(
            with_column(rows, "mm_items", named), images=tmp_path / "other"
        )


def test_formats_without_images_refuse_them(tmp_path):
    rows = rows_with_an_image(tmp_path)
    for make in EVERY.values():
        with pytest.raises(ExportError, match=r"has images, which only|several rows"):
            make(rows)


def test_a_row_that_ends_in_an_image_is_refused(tmp_path):
    rows = rows_with_an_image(tmp_path, max_row_tokens=5)
    assert len(rows["input_ids"][0]) == 5
    with pytest.raises(ExportError, match="ends in an image"):
        verl.agent_loop_fields(rows, images=tmp_path)
