"""Rows as trainers take them: the checks and conversions that all formats share."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit._arrow.canonical import TableLike, as_table, canonical_rows, place
from trajkit._arrow.take import list_values
from trajkit.errors import ExportError
from trajkit.pipeline.suffix_layout import full_rows
from trajkit.training._checks import session_codes
from trajkit.turns.mm_items import engine_ids
from trajkit.turns.turn_rules import lengths

_P = ParamSpec("_P")
_Fields = TypeVar("_Fields")
_Objects = TypeVar("_Objects")
Array: TypeAlias = npt.NDArray[Any]

Reduce: TypeAlias = Literal["mean", "sum"]
"""How row weights are meant; see `trajkit.training.reference_loss`."""

_LISTS = ("input_ids", "loss_mask", "logprobs")
FLAGS = ("truncated", "use_tool", "ill_formed")
_COLUMNS = (
    *("session_id", "row_index", "group_id", "prompt_length", "reward", "advantage"),
    *("row_weight", "finish_reason", "weight_versions", "last_turn", "spans"),
    *("mm_items", *FLAGS),
)
"""Columns of rows that an `ExportRow` has under their names."""


@dataclass(frozen=True, slots=True)
class ExportRow:
    """One checked row; what is not explained here is as in `trajkit.schema.ROWS`."""

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
    row_weight: float
    finish_reason: str | None
    truncated: bool
    use_tool: bool
    ill_formed: bool
    weight_versions: dict[str, str] | None
    last_turn: int | None
    spans: list[dict[str, Any]]
    mm_items: list[dict[str, Any]] | None
    # the row's line in the table
    line: int
    # of the row, or of each token
    advantage: float | list[float] | None = None

    @property
    def place(self) -> str:
        """Session and row, for errors."""
        return f"session {self.session_id!r}, row {self.row_index}"

    @property
    def uid(self) -> str:
        """Its ``group_id``, or its session without one."""
        return self.session_id if self.group_id is None else self.group_id

    @property
    def prompt(self) -> list[int]:
        """The ids of the prompt."""
        found: list[int] = self.input_ids[: self.prompt_length].tolist()
        return found

    def response(self, values: Array) -> list[Any]:
        """The values after the prompt, as Python objects; a mask as 0 and 1."""
        own = values[self.prompt_length :]
        found: list[Any] = (own.astype(np.int64) if own.dtype == bool else own).tolist()
        return found


def objects_of(
    fields: Callable[_P, _Fields],
) -> Callable[[Callable[[_Fields], _Objects]], Callable[_P, _Objects]]:
    """Make a function of the result of ``fields`` take the arguments of ``fields``."""

    def decorate(make: Callable[[_Fields], _Objects]) -> Callable[_P, _Objects]:
        @wraps(make)
        def made(*args: _P.args, **kwargs: _P.kwargs) -> _Objects:
            return make(fields(*args, **kwargs))

        made.__dict__["__wrapped__"] = fields  # whose signature it has
        return made

    return decorate


def checked_rows(
    rows: TableLike,
    *,
    response: bool = False,
    logprobs: bool = True,
    images: bool = False,
) -> list[ExportRow]:
    """The rows, checked for what every trainer needs (see docs/export.md).

    ``response``: the format has prompt and response, and a mask for the response only.
    ``logprobs``: trained tokens need a logprob. ``images``: the format carries images.
    """
    table = full_rows(canonical_rows(as_table(rows)))
    _check_images(table, images)
    table = engine_ids(table)
    sizes = np.stack([lengths(table[name]) for name in _LISTS])
    for uneven in np.flatnonzero((sizes != sizes[0]).any(0)):
        raise ExportError(
            f"{place(table, int(uneven))}: input_ids, loss_mask and logprobs have lengths "
            f"{sizes[:, uneven].tolist()}: expected the same"
        )
    ends = np.cumsum(sizes[0])
    flat_ids, mask, given = (list_values(table[name]) for name in _LISTS)
    trained = mask.to_numpy(zero_copy_only=False)
    values = np.where(trained, given.fill_null(0.0).to_numpy(), np.float32(0.0))
    unknown = trained & ~(np.asarray(given.is_valid()) & np.isfinite(values))
    session, _ = session_codes(table)
    for again in 1 + np.flatnonzero(np.diff(session) < 0):
        raise ExportError(
            f"{place(table, int(again))}: the rows of the session are not contiguous. Sort "
            "them"
        )
    groups: dict[object, int] = {}
    members = Counter[int]()
    found = []
    facts = table.select([name for name in _COLUMNS if name in table.column_names])
    for line, own in enumerate(facts.to_pylist()):
        tokens = slice(int(ends[line] - sizes[0, line]), int(ends[line]))
        key = own["session_id"], None
        if own["group_id"] is not None:
            key = None, own["group_id"]
        group = groups.setdefault(key, len(groups))
        members[group] += line == 0 or session[line - 1] != session[line]
        row = ExportRow(
            **{**own, **{flag: bool(own[flag]) for flag in FLAGS}},
            group=group,
            rollout=int(session[line]),
            repetition=members[group] - 1,
            is_last=line + 1 == len(session) or session[line + 1] != session[line],
            input_ids=flat_ids[tokens].to_numpy(),
            loss_mask=trained[tokens],
            logprobs=values[tokens],
            line=line,
        )
        _check_mask(row, row.prompt_length if response else 0)
        if logprobs and unknown[tokens].any():
            raise ExportError(
                f"{row.place}: token {unknown[tokens].argmax()} is trained and has no "
                "finite logprob. Make rows with missing_logprobs='untrain'"
            )
        found.append(row)
    return found


def _check_images(table: pa.Table, allowed: bool) -> None:
    items = table.column("mm_items")
    for line in np.flatnonzero(lengths(items)):
        where = place(table, int(line))
        if not allowed:
            raise ExportError(
                f"{where}: the row has images, which this format does not carry. Take "
                "trajkit.turns.engine_ids(rows) and the column mm_items, or "
                "trajkit.export.verl.agent_loop_fields"
            )
        if items[line][-1]["stop"].as_py() > len(table.column("input_ids")[line]):
            raise ExportError(
                f"{where}: the row ends in an image, because max_row_tokens cut it. "
                "Linearize with another value"
            )


def _check_mask(row: ExportRow, prompt_length: int) -> None:
    if not row.loss_mask.any():
        raise ExportError(
            f"{row.place}: no token is trained. Make rows with keep_untrained=False"
        )
    first = int(np.argmax(row.loss_mask))
    if first == 0:
        raise ExportError(
            f"{row.place}: token 0 is trained, but no token precedes it to predict it "
            "from"
        )
    if first < prompt_length:
        raise ExportError(
            f"{row.place}: token {first} is trained, but this format trains nothing "
            f"before prompt_length, which is {prompt_length}"
        )


def rewards_of(rows: list[ExportRow]) -> list[float]:
    """The reward of each row. None may be null: it would become 0 in the trainer."""
    for row in rows:
        if row.reward is None:
            raise ExportError(
                f"{row.place}: reward is null, which the trainer would take for 0. Give "
                "the session a reward, or filter it out"
            )
    return [row.reward for row in rows if row.reward is not None]


def advantages_of(rows: list[ExportRow], weighted: bool) -> list[float]:
    """The advantage of each row; ``weighted``: with the row weight folded in."""
    found = []
    for row in rows:
        gain = _advantage(row)
        if not isinstance(gain, float):
            raise ExportError(
                f"{row.place}: advantage is a list per token, but this format has one "
                "per row. Compute advantages of rollouts or segments"
            )
        found.append(gain)
    scales = token_scales(rows) if weighted else [1.0] * len(rows)
    return [gain * scale for gain, scale in zip(found, scales, strict=True)]


def token_advantages(rows: list[ExportRow]) -> list[Array]:
    """The advantage of each token, float64 of shape (n_tokens,); 0 off the mask."""
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


def token_scales(
    rows: list[ExportRow], reduce: Reduce = "mean", *, divided: bool = True
) -> list[float]:
    """What a trained token of each row counts in the trainer's loss, for its advantage.

    The trainer's sum over the batch's trained tokens, which it divides by their number if
    ``divided``, is then `trajkit.training.reference_loss` of the same rows.
    """
    check_choice("reduce", reduce, Reduce)
    n_trained = [int(row.loss_mask.sum()) for row in rows]
    scale = 1 / max(len({row.rollout for row in rows}), 1)
    if divided:
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


def optional_column(rows: TableLike, name: str) -> list[Any]:
    """A column of rows as Python objects; None for each row if it is missing."""
    table = as_table(rows)
    if name not in table.column_names:
        return [None] * table.num_rows
    found: list[Any] = table.column(name).to_pylist()
    return found


def routed_experts(rows: TableLike) -> list[list[Any]] | None:
    """The payload ``routed_experts`` per row, or None if the rows have no such column."""
    table = as_table(rows)
    if "routed_experts" not in table.column_names:
        return None
    found: list[list[Any]] = optional_column(table, "routed_experts")
    for line, each in enumerate(found):
        if each is None or None in each[:-1]:
            raise ExportError(
                f"{place(table, line)}: routed_experts is null for a token: the trainer "
                "needs the experts of every token but the last"
            )
    return found
