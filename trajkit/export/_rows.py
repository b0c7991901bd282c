"""Rows as trainers take them: the checks and conversions that all formats share."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import TableLike, as_table, canonical_rows, place
from trajkit.errors import ExportError
from trajkit.pipeline.suffix_layout import full_rows
from trajkit.training._checks import session_codes
from trajkit.turns.mm_items import engine_ids
from trajkit.turns.turn_rules import lengths

Array: TypeAlias = npt.NDArray[Any]
Normalize: TypeAlias = Literal["token_mean", "token_sum"]
"""How a trainer reduces the losses of a batch's trained tokens."""

Reduce: TypeAlias = Literal["mean", "sum"]
"""How row weights are meant; see `trajkit.training.reference_loss`."""


_SCALARS = (
    *("session_id", "row_index", "group_id", "prompt_length", "reward", "row_weight"),
    *("finish_reason", "weight_versions", "last_turn"),
)
_FLAGS = ("truncated", "use_tool", "ill_formed")
"""Columns of rows that an `ExportRow` has under their names."""


@dataclass(frozen=True, slots=True)
class ExportRow:
    """One checked row."""

    session_id: str
    row_index: int
    # number of its group and its rollout, from 0 in order of the rows
    group: int
    rollout: int
    group_id: str | None
    # number of its rollout among the rollouts of its group
    repetition: int
    # the last row of its rollout
    is_last: bool
    # int32, shape (n_tokens,)
    input_ids: Array
    # bool, shape (n_tokens,)
    loss_mask: Array
    # float32, shape (n_tokens,); 0.0 where the mask is false
    logprobs: Array
    prompt_length: int
    reward: float | None
    # of the row, or of each token
    advantage: float | list[float] | None
    row_weight: float
    finish_reason: str | None
    truncated: bool
    use_tool: bool
    ill_formed: bool
    # first and last weights, or None
    weight_versions: dict[str, str] | None
    # the turn whose path the row is, if the table says so
    last_turn: int | None
    # as dicts
    spans: list[dict[str, Any]]
    # its images, in order, as dicts
    mm_items: list[dict[str, Any]]
    # the row's line in the table
    line: int

    @property
    def place(self) -> str:
        """Session and row, for errors."""
        return f"session {self.session_id!r}, row {self.row_index}"

    def response(self, values: Array) -> list[Any]:
        """The values after the prompt, as Python objects."""
        found: list[Any] = values[self.prompt_length :].tolist()
        return found


def checked_rows(
    rows: TableLike,
    *,
    response: bool = False,
    logprobs: bool = True,
    images: bool = False,
) -> list[ExportRow]:
    """The rows, checked for what every trainer needs.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS` or ``ROWS_SUFFIX``, with all rows of each session.
    response : bool
        The format has prompt and response, and a mask for the response only.
    logprobs : bool
        Trained tokens need a logprob.
    images : bool
        The format carries images. Token ids are then those of the engine.

    Raises
    ------
    ExportError
        A row has images that the format does not carry, or a part of an image; a row
        trains nothing, trains its first token, trains a token of the prompt
        although the format cannot express it, or lacks a logprob; the lists of a row
        differ in length; the rows of a session are not contiguous.
    """
    table = full_rows(canonical_rows(as_table(rows)))
    items = table.column("mm_items").to_pylist()
    for line in np.flatnonzero(lengths(table.column("mm_items"))):
        where = place(table, int(line))
        if not images:
            raise ExportError(
                f"{where}: the row has images, which this format does not carry. Take "
                "trajkit.turns.engine_ids(rows) and the column mm_items, or "
                "trajkit.export.verl.agent_loop_fields"
            )
        if items[line][-1]["stop"] > len(table.column("input_ids")[line]):
            raise ExportError(
                f"{where}: the row ends in an image, because max_row_tokens cut it. "
                "Linearize with another value"
            )
    return list(_checked(engine_ids(table), response, logprobs, items))


def _checked(
    table: pa.Table, response: bool, logprobs: bool, items: list[Any]
) -> Iterator[ExportRow]:
    ids, mask, given = (
        table.column(name).combine_chunks()
        for name in ("input_ids", "loss_mask", "logprobs")
    )
    offsets = [np.asarray(each.offsets) for each in (ids, mask, given)]
    flat_ids = ids.values.to_numpy()
    flat_mask = mask.values.to_numpy(zero_copy_only=False)
    known = np.asarray(given.values.is_valid())
    flat_logprobs = given.values.fill_null(0.0).to_numpy()
    session, _ = session_codes(table)
    groups: dict[object, int] = {}
    rollouts: dict[str, int] = {}
    members: dict[int, int] = {}
    scalars = table.select(
        [
            name
            for name in table.column_names
            if not pa.types.is_large_list(table.schema.field(name).type)
        ]
    ).to_pylist()
    spans = table.column("spans").to_pylist()
    gains: list[Any] = [None] * len(scalars)
    if "advantage" in table.column_names:
        gains = table.column("advantage").to_pylist()
    for line, facts in enumerate(scalars):
        name = facts["session_id"]
        where = f"session {name!r}, row {facts['row_index']}"
        bounds = [(int(each[line]), int(each[line + 1])) for each in offsets]
        sizes = [stop - start for start, stop in bounds]
        if len(set(sizes)) > 1:
            raise ExportError(
                f"{where}: input_ids, loss_mask and logprobs have lengths {sizes}: "
                "expected the same"
            )
        (start, stop), (mask_start, mask_stop), (first, last) = bounds
        trained = flat_mask[mask_start:mask_stop]
        _check_mask(where, trained, facts["prompt_length"] if response else 0)
        values = np.where(trained, flat_logprobs[first:last], np.float32(0.0))
        bad = np.flatnonzero(trained & ~(known[first:last] & np.isfinite(values)))
        if logprobs and len(bad):
            raise ExportError(
                f"{where}: token {bad[0]} is trained and has no finite logprob. Make "
                "rows with missing_logprobs='untrain'"
            )
        if name in rollouts and session[line - 1] != session[line]:
            raise ExportError(
                f"{where}: the rows of the session are not contiguous. Sort them"
            )
        group_key = name if facts["group_id"] is None else ("group", facts["group_id"])
        group = groups.setdefault(group_key, len(groups))
        if name not in rollouts:
            rollouts[name] = len(rollouts)
            members[group] = members.get(group, -1) + 1
        own: dict[str, Any] = {column: facts.get(column) for column in _SCALARS}
        own |= {flag: bool(facts[flag]) for flag in _FLAGS}
        yield ExportRow(
            **own,
            group=group,
            rollout=rollouts[name],
            repetition=members[group],
            is_last=line + 1 == len(session) or session[line + 1] != session[line],
            input_ids=flat_ids[start:stop],
            loss_mask=trained,
            logprobs=values,
            advantage=gains[line],
            spans=spans[line],
            mm_items=items[line] or [],
            line=line,
        )


def _check_mask(where: str, trained: Array, prompt_length: int) -> None:
    if not trained.any():
        raise ExportError(
            f"{where}: no token is trained. Make rows with keep_untrained=False"
        )
    first = int(np.argmax(trained))
    if first == 0:
        raise ExportError(
            f"{where}: token 0 is trained, but no token precedes it to predict it from"
        )
    if first < prompt_length:
        raise ExportError(
            f"{where}: token {first} is trained, but this format trains nothing before "
            f"prompt_length, which is {prompt_length}"
        )


def rewards_of(rows: list[ExportRow]) -> list[float]:
    """The reward of each row.

    Raises
    ------
    ExportError
        A reward is null: it would become 0 in the trainer.
    """
    for row in rows:
        if row.reward is None:
            raise ExportError(
                f"{row.place}: reward is null, which the trainer would take for 0. Give "
                "the session a reward, or filter it out"
            )
    return [row.reward for row in rows if row.reward is not None]


def advantages_of(rows: list[ExportRow]) -> list[float]:
    """The advantage of each row.

    Raises
    ------
    ExportError
        The rows have no advantages, one is null, or they have one per token.
    """
    found = []
    for row in rows:
        gain = _advantage(row)
        if not isinstance(gain, float):
            raise ExportError(
                f"{row.place}: advantage is a list per token, but this format has one "
                "per row. Compute advantages of rollouts or segments"
            )
        found.append(gain)
    return found


def token_advantages(rows: list[ExportRow]) -> list[Array]:
    """The advantage of each token, float64 of shape (n_tokens,); 0 off the mask.

    Raises
    ------
    ExportError
        The rows have no advantages, one is null, or a list is not as long as its row.
    """
    found = []
    for row in rows:
        gain = np.asarray(_advantage(row), np.float64)
        if gain.ndim and len(gain) != len(row.input_ids):
            raise ExportError(
                f"{row.place}: {len(gain)} advantages for {len(row.input_ids)} tokens"
            )
        found.append(np.where(row.loss_mask, gain, 0.0))
    return found


def _advantage(row: ExportRow) -> Any:
    gain = row.advantage
    if gain is None or (isinstance(gain, list) and None in gain):
        raise ExportError(
            f"{row.place}: advantage is null or absent. Add it with "
            "trajkit.add_advantages, and filter out rows whose advantage is null"
        )
    return gain


def weighted_advantages(
    rows: list[ExportRow], normalize: Normalize, reduce: Reduce
) -> list[float]:
    """Advantages that carry the row weights into a trainer without a slot for them."""
    scales = token_scales(rows, normalize, reduce)
    return [a * scale for a, scale in zip(advantages_of(rows), scales, strict=True)]


def token_scales(
    rows: list[ExportRow], normalize: Normalize, reduce: Reduce
) -> list[float]:
    """What a trained token of each row counts in the trainer's loss, for its advantage.

    The trainer's sum or mean over the batch's trained tokens is then
    `trajkit.training.reference_loss` of the same rows.
    """
    check_choice("normalize", normalize, Normalize)
    check_choice("reduce", reduce, Reduce)
    n_trained = [int(row.loss_mask.sum()) for row in rows]
    scale = 1 / max(len({row.rollout for row in rows}), 1)
    if normalize == "token_mean":
        scale *= sum(n_trained)
    return [
        row.row_weight * scale / (n if reduce == "mean" else 1)
        for row, n in zip(rows, n_trained, strict=True)
    ]


def one_row_per_rollout(rows: list[ExportRow], target: str) -> None:
    """Raise ExportError if a rollout has several rows."""
    for row in rows:
        if not row.is_last:
            raise ExportError(
                f"session {row.session_id!r} has several rows, but {target} takes one "
                "per rollout. Take a policy that gives one, such as "
                "policy('slime', row_selection='main')"
            )


def on_mask(row: ExportRow, value: float) -> list[float]:
    """The value for trained tokens, 0.0 for the others."""
    found: list[float] = np.where(row.loss_mask, value, 0.0).tolist()
    return found


def padded(
    lists: list[list[Any]], value: Any, n: int, *, left: bool = False
) -> list[list[Any]]:
    """The lists at length ``n``."""
    return [
        [value] * (n - len(each)) + each if left else each + [value] * (n - len(each))
        for each in lists
    ]


def routed_experts(rows: TableLike, name: str) -> list[list[Any]] | None:
    """The payload of routed experts per row, or None if the rows have no such column.

    Raises
    ------
    ExportError
        An element other than a row's last is null.
    """
    table = as_table(rows)
    if name not in table.column_names:
        return None
    found: list[list[Any]] = table.column(name).to_pylist()
    for line, each in enumerate(found):
        if each is None or None in each[:-1]:
            raise ExportError(
                f"{place(table, line)}: {name} is null for a token: the trainer needs "
                "the experts of every token but the last"
            )
    return found


def list_column(values: pa.ChunkedArray, type_: pa.DataType) -> pa.Array:
    """A list column with 32-bit offsets, which `datasets` and TRL expect."""
    array = values.combine_chunks()
    return pc.cast(array, pa.list_(type_))
