"""Datasets give what is in the tables, and padded rows say where they are padded."""

import pyarrow as pa
import pytest
from torch.utils.data import DataLoader

import trajkit as tk
from tests.torch.cases import packs_of, rows_of
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.torch.datasets import Pack, PackDataset, RowDataset, pad_rows
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
    pack = PackDataset(packs_of(rows_of("clean")))[0]
    with pytest.raises(SchemaError, match=r"no column edge_reward: .*\['advantage'\]"):
        pack.column("reward")


def test_rows_are_padded_on_the_right():
    rows = rows_of("head_dropped")
    dataset = RowDataset(rows, ["advantage"])
    loader = DataLoader(
        dataset,
        batch_size=2,
        collate_fn=lambda items: pad_rows(items, pad_id=99, multiple_of=16),
    )
    listed = rows.to_pylist()
    seen = 0
    for batch in loader:
        n_rows, length = batch["input_ids"].shape
        assert length % 16 == 0
        for k, row in enumerate(listed[seen : seen + n_rows]):
            n = len(row["input_ids"])
            assert batch["input_ids"][k].tolist() == row["input_ids"] + [99] * (
                length - n
            )
            assert batch["attention_mask"][k].tolist() == [True] * n + [False] * (
                length - n
            )
            assert batch["loss_mask"][k, :n].tolist() == row["loss_mask"]
            assert not batch["loss_mask"][k, n:].any()
            assert batch["position_ids"][k].tolist() == [*range(length)]
            known = [None if x != x else x for x in batch["logprobs"][k].tolist()]
            assert known == row["logprobs"] + [None] * (length - n)
            assert float(batch["advantage"][k]) == row["advantage"]
            assert float(batch["row_weight"][k]) == row["row_weight"]
        assert (
            length - max(len(r["input_ids"]) for r in listed[seen : seen + n_rows]) < 16
        )
        seen += n_rows
    assert seen == len(rows)


def rows_with_images():
    """Two rows of a session that share an image, and one without."""
    image = {"kind": "image", "hash": "ab" * 32, "token_id": 7, "start": 1, "stop": 3}
    ids = [1, *content_ids("image", image["hash"], 2).tolist(), 2]
    calls = [
        {"session_id": "a", "prompt_ids": ids, "output_ids": [3], "mm_items": [image]},
        {"session_id": "a", "prompt_ids": ids, "output_ids": [4], "mm_items": [image]},
        {"session_id": "b", "prompt_ids": [1, 5], "output_ids": [6]},
    ]
    return image, tk.linearize(tk.from_records(calls), "per_call")


def test_images_are_refused_unless_items_are_asked_for():
    _, rows = rows_with_images()
    packs = tk.pack(rows, 6)
    with pytest.raises(InvalidTurnsError, match="session 'a', row 0 has images"):
        RowDataset(rows)
    with pytest.raises(InvalidTurnsError, match=r"pack 0 has images.*images='items'"):
        PackDataset(packs)
    assert len(RowDataset(rows.slice(2))) == len(PackDataset(packs.slice(1))) == 1
    for make in (
        lambda: RowDataset(rows, images="x"),
        lambda: PackDataset(packs, images="x"),
    ):
        with pytest.raises(ArgumentError, match="images='x'"):
            make()


def test_items_come_with_the_ids_of_the_engine():
    image, rows = rows_with_images()
    batch = pad_rows([*RowDataset(rows, images="items")])
    assert batch["input_ids"].tolist() == [
        [1, 7, 7, 2, 3],
        [1, 7, 7, 2, 4],
        [1, 5, 6, 0, 0],
    ]
    assert batch["mm_items"] == [[image], [image], []]
    dataset = PackDataset(tk.pack(rows, 6), images="items")
    shared, plain = dataset
    assert shared.input_ids.tolist() == [1, 7, 7, 2, 3, 4]
    assert shared.to("cpu").mm_items == [image]
    assert plain.mm_items == []
    assert not dataset.empty_pack().mm_items
