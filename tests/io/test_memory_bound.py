"""Files whose few bytes decompress to many."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trajkit as tk
from trajkit.errors import FormatError
from trajkit.io.memory_bound import MAX_BATCH_BYTES

BOMB_TOKENS = 1 << 20
TURNS = tk.from_records(
    [
        {
            "session_id": "a",
            "prompt_ids": [7] * BOMB_TOKENS,
            "output_ids": [8],
            "prompt_messages": [{"role": "user", "content": "x" * BOMB_TOKENS}],
        }
    ]
)


def ipc(table, codec, new=pa.ipc.new_stream):
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with new(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue()


def parquet(table, **options):
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", **options)
    return sink.getvalue()


def with_dictionary(table):
    """The table with an extra column of one long text, as a dictionary."""
    texts = pa.array(["y" * (8 * BOMB_TOKENS)]).dictionary_encode()
    return table.append_column("note", texts)


SMALL = tk.from_records(
    [{"session_id": "a", "prompt_ids": [7], "output_ids": [8], "output_logprobs": [-1]}]
)
BOMBS = {
    "zstd.arrows": ipc(TURNS, "zstd"),
    "lz4.arrows": ipc(TURNS, "lz4"),
    "zstd.arrow": ipc(TURNS, "zstd", pa.ipc.new_file),
    "lz4.arrow": ipc(TURNS, "lz4", pa.ipc.new_file),
    "dictionary.arrows": ipc(with_dictionary(SMALL), "zstd"),
    "dictionary.arrow": ipc(with_dictionary(SMALL), "zstd", pa.ipc.new_file),
    "plain.parquet": parquet(TURNS, use_dictionary=False),
    "repeated.parquet": parquet(TURNS),
    "v2.parquet": parquet(TURNS, data_page_version="2.0"),
    "dictionary.parquet": parquet(with_dictionary(SMALL)),
}


@pytest.fixture(params=BOMBS)
def bomb(request, tmp_path, monkeypatch):
    content = BOMBS[request.param]
    assert len(content) < BOMB_TOKENS // 16
    path = tmp_path / request.param
    path.write_bytes(content)
    monkeypatch.setenv(MAX_BATCH_BYTES, str(BOMB_TOKENS))
    return path


def refusal(path):
    return (
        rf"{path.name}: .* needs \d+ bytes .* more than {BOMB_TOKENS}: "
        f".*{MAX_BATCH_BYTES}"
    )


def test_a_batch_is_not_decompressed_beyond_the_bound(bomb, monkeypatch):
    with pytest.raises(FormatError, match=refusal(bomb)):
        tk.read_turns(bomb)
    monkeypatch.setenv(MAX_BATCH_BYTES, str(64 * BOMB_TOKENS))
    assert tk.read_turns(bomb).num_rows == 1


def test_the_bound_holds_for_open_files(bomb):
    with (
        bomb.open("rb") as file,
        pytest.raises(FormatError, match=refusal(bomb)),
    ):
        tk.read_turns(file)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrows"])
def test_the_bound_is_of_a_batch_not_of_a_file(kind, tmp_path, monkeypatch):
    path = tmp_path / f"turns.{kind}"
    turns = tk.from_records(
        {"session_id": name, "prompt_ids": [7] * 4096, "output_ids": [8]}
        for name in "abcd"
    )
    with path.open("wb") as file:
        if kind == "parquet":
            pq.write_table(turns, file, row_group_size=1)
        else:
            new = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            with new(file, turns.schema, options=options) as writer:
                writer.write_table(turns, max_chunksize=1)
    monkeypatch.setenv(MAX_BATCH_BYTES, str(turns.nbytes * 2 // 3))
    assert tk.read_turns(path).num_rows == 4


def test_the_bound_is_a_number_of_bytes(tmp_path, monkeypatch):
    path = tmp_path / "turns.arrow"
    tk.write_turns(SMALL, path)
    monkeypatch.setenv(MAX_BATCH_BYTES, "4 GB")
    with pytest.raises(FormatError, match="'4 GB': expected a number of bytes"):
        tk.read_turns(path)
