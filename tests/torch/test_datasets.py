"""Datasets give what is in the tables; tensors are taken as ids and logprobs."""

import pyarrow as pa
import pytest
import torch

import trajkit as tk
from tests.torch.cases import pack_of, packs_of, rows_of
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.torch.packs import Pack, PackDataset
from trajkit.turns import content_ids

FIELDS = [
    name
    for name in Pack.__slots__
    if name not in ("columns", "mm_items", "next_source")
]


def test_packs_are_the_lines_of_the_table():
    packs = packs_of(rows_of("several_sessions"), cut=True)
    assert len(packs) > 1
    dataset = PackDataset(packs)
    assert len(dataset) == len(packs)
    for line, pack in zip(packs.to_pylist(), dataset, strict=True):
        for name in FIELDS:
            assert getattr(pack, name).tolist() == line[name]
        assert pack.column("advantage").tolist() == line["edge_advantage"]
    assert dataset[-1].input_ids.tolist() == packs.to_pylist()[-1]["input_ids"]
    with pytest.raises(IndexError):
        dataset[len(packs)]


def test_tokens_stay_in_the_memory_of_the_table():
    packs = packs_of(rows_of("tail_changed"), cut=True)
    dataset = PackDataset(packs)
    last = packs["input_ids"].chunk(0).flatten()
    first = last.buffers()[1].address
    for line, pack in enumerate(dataset):
        before = sum(len(ids) for ids in packs["input_ids"][:line])
        assert pack.input_ids.data_ptr() == first + 4 * before


def test_columns_that_tensors_cannot_hold_are_refused():
    packs = packs_of(rows_of("clean"))
    n = len(packs["edge_source"][0])
    for values, pattern in [
        ([None] + [1] * (n - 1), r"pack 0: edge_version has 1 nulls of type int64"),
        (["x"] * n, "pack 0: edge_version has 0 nulls of type string"),
    ]:
        table = packs.append_column("edge_version", pa.array([values]))
        with pytest.raises(SchemaError, match=pattern):
            PackDataset(table)[0]


def test_a_column_that_packs_lack_is_named():
    pack = pack_of("clean")
    with pytest.raises(SchemaError, match=r"no column edge_reward: .*\['advantage'\]"):
        pack.column("reward")


def test_packs_with_images_are_refused():
    image = {"kind": "image", "hash": "ab" * 32, "token_id": 7, "start": 1, "stop": 3}
    ids = [1, *content_ids("image", image["hash"], 2).tolist(), 2]
    calls = [
        {"session_id": "a", "prompt_ids": [1, 5], "output_ids": [6]},
        {"session_id": "b", "prompt_ids": ids, "output_ids": [3], "mm_items": [image]},
    ]
    packs = tk.pack(tk.linearize(tk.from_records(calls)), 5)
    (shown,) = packs["mm_items"].is_valid().to_numpy().nonzero()
    with pytest.raises(InvalidTurnsError, match=f"pack {shown[0]} has images"):
        PackDataset(packs)
    plain = 1 - int(shown[0])
    assert len(PackDataset(packs.slice(plain, 1))) == 1


CALL = {"prompt_ids": [1, 2], "output_ids": [3, 4], "output_logprobs": [-0.5, -0.25]}


def test_tensors_are_ids_and_logprobs():
    call = {name: torch.tensor(values) for name, values in CALL.items()}
    logprobs = call["output_logprobs"].to(torch.bfloat16).requires_grad_()
    expected = tk.from_records([{**CALL, "session_id": "a"}])
    for given in (call, {**call, "output_logprobs": logprobs}):
        assert tk.from_records([{**given, "session_id": "a"}]) == expected
        recorder = tk.Recorder()
        recorder.record("a", **given)
        assert tk.linearize(recorder.pop("a")) == tk.linearize(expected)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("prompt_ids", torch.ones(2).bfloat16(), "is of float32"),
        *(
            (name, torch.ones(2, device="meta"), "is a Tensor that cannot be copied")
            for name in ("prompt_ids", "output_logprobs")
        ),
    ],
)
def test_tensors_that_are_no_ids_or_logprobs_are_refused(name, value, said):
    call = {**CALL, name: value}
    match = f"session 'a', turn 0: {name} {said}"
    with pytest.raises(InvalidTurnsError, match=match):
        tk.from_records([{**call, "session_id": "a"}])
    with pytest.raises(InvalidTurnsError, match=match):
        tk.Recorder().record("a", **call)
