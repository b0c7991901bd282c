"""Check whether the text of a reply gives its token ids back."""

import numpy as np
import pyarrow as pa

from trajkit.analysis.tokenizer import Codec, Tokenizer
from trajkit.analysis.turn_lines import turn_lines
from trajkit.schema import ROUNDTRIP
from trajkit.tables.canonical import TableLike
from trajkit.tables.stages import apply, stage
from trajkit.turns.python_lists import lcp
from trajkit.turns.records import as_turns
from trajkit.turns.sessions import Sessions


@stage
def check_roundtrip(turns: TableLike, tokenizer: Tokenizer) -> pa.Table:
    """Check for each turn whether encoding its decoded output gives the same ids.

    If it does not, a client that keeps text cannot return the reply as it was sampled.
    The turns stay unchanged. To mask such turns, replace their ``trainable`` column by
    the result's (see the notes).

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form.
    tokenizer : Tokenizer
        The engine's tokenizer: any object with ``encode(text,
        add_special_tokens=False)`` and ``decode(ids, skip_special_tokens=False)``, such
        as those of transformers and ``tokenizers.Tokenizer``.

    Returns
    -------
    Table
        `trajkit.schema.ROUNDTRIP`, one row per turn, in the order of ``turns``.

    Raises
    ------
    SchemaError
        ``tokenizer`` lacks a method; else as `trajkit.linearize`.
    InvalidTurnsError
        As `trajkit.linearize`.

    Notes
    -----
    To train only outputs with an exact round trip::

        checked = tk.analysis.check_roundtrip(turns, tokenizer)
        at = turns.schema.get_field_index("trainable")
        turns = turns.set_column(at, turns.field(at), checked["trainable"])

    References
    ----------
    slime's first coding agent masked such turns; an empty output passes (slime's
    https://github.com/THUDM/slime/blob/b6764131d/examples/coding_agent_rl/middleware.py).
    """
    codec = Codec(tokenizer)
    return apply(lambda turns: _checked(turns, codec), turns, table_of=as_turns)


check_roundtrip_batches = check_roundtrip.batches


def _checked(turns: pa.Table, codec: Codec) -> pa.Table:
    calls = Sessions.of(turns)

    n_calls = len(calls.calls)
    differs = np.full(n_calls, -1, np.int32)
    n_encoded = np.empty(n_calls, np.int32)
    for call in range(n_calls):
        output = calls.output(call)
        again = codec.ids(codec.text(output)) if len(output) else output
        n_encoded[call] = len(again)
        same = lcp(output, again)
        if same < max(len(output), len(again)):
            differs[call] = same
    exact = differs < 0
    return turn_lines(
        ROUNDTRIP,
        calls,
        range(n_calls),
        exact,
        pa.array(differs, mask=exact),
        calls.calls["out_len"],
        n_encoded,
        exact & calls.calls["trainable"].astype(np.bool_),
    )
