"""Rows as trainers take them: the checks and conversions that all formats share."""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from types import SimpleNamespace
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arguments import check_choice, chosen_int
from trajkit.errors import ExportError, NoSignalWarning
from trajkit.learn._checks import session_codes, trained_tokens
from trajkit.schema import PAYLOADS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, as_table, canonical_rows, place
from trajkit.tables.ragged import lengths
from trajkit.tables.take import list_values
from trajkit.turns.images import engine_ids

_P = ParamSpec("_P")
_Fields = TypeVar("_Fields")
_Objects = TypeVar("_Objects")
Array: TypeAlias = npt.NDArray[Any]

Reduce: TypeAlias = Literal["mean", "sum"]
"""How row weights are meant; see `trajkit.learn.reference_loss`."""

_LISTS = ("input_ids", "loss_mask", "logprobs")

FLAGS = ("truncated", "use_tool", "ill_formed")
_COLUMNS = (
    *("session_id", "row_index", "group_id", "prompt_length", "reward", "advantage"),
    *("row_weight", "finish_reason", "weight_versions", "last_turn", "spans"),
    *("mm_items", *FLAGS),
)
"""Columns of rows that an `ExportRow` has under their names."""


class ExportRow(SimpleNamespace):
    """One checked row, with the columns above and these attributes.

    group, rollout : number of its group and its rollout, from 0 in order of the rows.
    repetition : number of its rollout among the rollouts of its group.
    is_last : whether it is the last row of its rollout.
    input_ids, loss_mask, logprobs : int32, bool, float32, shape (n_tokens,); a logprob is
    0.0 where the mask is false.
    advantage : of the row, or of each token.
    line : the row's line in the table.
    """

    @property
    def place(self) -> str:
        """Session and row, for errors."""
        return f"session {self.session_id!r}, row {self.row_index}"

    @property
    def uid(self) -> str:
        """The name of its group. That of a session without one is no ``group_id``."""
        if self.group_id is None:
            return f"session {self.session_id}"
        return str(self.group_id)

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


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What a step of the trainer trains, for exports with row weights.

    Attributes
    ----------
    rollouts, tokens : int
        Rollouts and trained tokens of the step, over all ranks.
    """

    rollouts: int
    tokens: int

    def __post_init__(self) -> None:
        chosen_int("rollouts", self.rollouts, 1)
        chosen_int("tokens", self.tokens, 1)


def step_counts(rows: TableLike) -> StepCounts:
    """The counts of a step that trains these rows, and no others."""
    table = canonical_rows(as_table(rows))
    trained = trained_tokens(table)
    session, _ = session_codes(table)
    return StepCounts(len(np.unique(session[trained > 0])), int(trained.sum()))


def sessions_of(rows: TableLike) -> pa.Table:
    """The sessions of rows with their rewards and groups.

    They are what `trajkit.learn.advantages` takes. Sessions without rows are missing,
    but they count in the baseline of their group: take the report of `trajkit.linearize`
    where there are some.

    Raises
    ------
    ExportError
        The rows of a session differ in reward or group.
    """
    table = canonical_rows(as_table(rows)).select(["session_id", "reward", "group_id"])
    session, _ = session_codes(table)
    first = np.unique(session, return_index=True)[1]
    found = table.take(pa.array(first))
    for name in ("reward", "group_id"):
        same = (
            table.column(name)
            .combine_chunks()
            .equals(found.column(name).take(pa.array(session)).combine_chunks())
        )
        if not same:
            raise ExportError(
                f"the rows of a session differ in {name}: pass a table of sessions"
            )
    return found.replace_schema_metadata(None)


def limit(option: str, value: int | None) -> tuple[str, int] | None:
    """A trainer's option and its value, for `checked_rows`; None for no limit."""
    if value is None:
        return None
    return option, chosen_int(option.rpartition(".")[2], value, 1)


def checked_rows(
    rows: TableLike,
    target: str,
    *,
    response: bool = False,
    logprobs: bool = True,
    images: bool = False,
    carried: Collection[str] = (),
    max_tokens: tuple[str, int] | None = None,
    untrained: bool = False,
) -> list[ExportRow]:
    """The rows, checked for what every trainer needs (see docs/export.md).

    ``target`` is the trainer's name. ``response``: the format has prompt and response, and
    a mask for the response only. ``logprobs``: trained tokens need a logprob. ``images``:
    the format carries images. ``carried``: the payloads that it carries. ``max_tokens``:
    the trainer's option for the length of a row, beyond which it cuts, and its value.
    ``untrained``: rows may train nothing.
    """
    table = canonical_rows(as_table(rows))
    _check_images(table, images)
    for name in PAYLOADS:
        if name not in carried and has_payload(table, name):
            raise ExportError(
                f"the rows have the payload {name}, for which the format of {target} "
                "has no field, so the trainer would compute another loss. Export "
                f"without it on purpose: rows.drop_columns([{name!r}])"
            )
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
            **{"advantage": None} | own | {flag: bool(own[flag]) for flag in FLAGS},
            group=group,
            rollout=int(session[line]),
            repetition=members[group] - 1,
            is_last=line + 1 == len(session) or session[line + 1] != session[line],
            input_ids=flat_ids[tokens].to_numpy(),
            loss_mask=trained[tokens],
            logprobs=values[tokens],
            line=line,
        )
        if row.loss_mask.any() or not untrained:
            _check_mask(row, response)
        if max_tokens is not None and len(row.input_ids) > max_tokens[1]:
            raise ExportError(
                f"{row.place}: {len(row.input_ids)} tokens, but {target} cuts rows at "
                f"{max_tokens[0]} {max_tokens[1]}. Pass the trainer's value as "
                f"{max_tokens[0].rpartition('.')[2]}= (trajkit export: --max-length), "
                "raise it, or linearize with max_row_tokens"
            )
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


def _check_mask(row: ExportRow, response: bool) -> None:
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
    if response and not 0 < row.prompt_length <= first:
        raise ExportError(
            f"{row.place}: token {first} is trained, but this format trains nothing "
            f"before prompt_length, which is {row.prompt_length}: expected 1 to {first}"
        )


def rewards_of(rows: list[ExportRow], *, null: bool = False) -> list[float | None]:
    """The reward of each row, for trainers that compute advantages from it.

    Unless ``null``, none may be null: it would become 0 in the trainer.
    """
    values: dict[int, set[float]] = {}
    for row in rows:
        if row.reward is None and null:
            continue
        if row.reward is None or not np.isfinite(row.reward):
            raise ExportError(
                f"{row.place}: reward is {'null' if row.reward is None else row.reward}, "
                "which the trainer would take for 0 or NaN. Give the session a finite "
                "reward, or filter it out"
            )
        values.setdefault(row.group, set()).add(row.reward)
    if len({row.rollout for row in rows}) > 1 and all(
        math.isclose(min(each), max(each), rel_tol=1e-9, abs_tol=1e-9)
        for each in values.values()
    ):
        warnings.warn(
            f"no group of these {len(rows)} rows has two rewards that differ, so "
            "advantages over groups are all 0 and a training step changes nothing. Set "
            "group_id, so that the rollouts of a task share a group, or take other rows",
            NoSignalWarning,
            stacklevel=3,
        )
    return [row.reward for row in rows]


def _warn_without_signal(rows: list[ExportRow], zero: bool) -> None:
    if zero and len({row.rollout for row in rows}) > 1:
        warnings.warn(
            f"all advantages of these {len(rows)} rows are 0, so a training step changes "
            "nothing: the rewards of each group are equal, or each group has one rollout",
            NoSignalWarning,
            stacklevel=4,
        )


def advantages_of(
    rows: list[ExportRow], scales: Sequence[float] | None = None
) -> list[float]:
    """The advantage of each row, times its scale if there are scales."""
    found = []
    for row in rows:
        gain = _advantage(row)
        if not isinstance(gain, float):
            raise ExportError(
                f"{row.place}: advantage is a list per token, but this format has one "
                "per row. Compute advantages of rollouts or segments"
            )
        found.append(gain)
    _warn_without_signal(rows, not any(found))
    if scales is None:
        return found
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
    _warn_without_signal(rows, not any(each.any() for each in found))
    return found


def _advantage(row: ExportRow) -> Any:
    gain = row.advantage
    if gain is None or (isinstance(gain, list) and None in gain):
        raise ExportError(
            f"{row.place}: advantage is null or absent. Add it with "
            "trajkit.add_advantages (trajkit export: --advantage), and filter out rows "
            "whose advantage is null"
        )
    if not np.isfinite(gain).all():
        raise ExportError(f"{row.place}: advantage is {gain}: expected finite numbers")
    return gain


def token_scales(rows: list[ExportRow], reduce: Reduce = "mean") -> list[float]:
    """What a trained token of each row counts in the sum over rollouts.

    A sum over tokens with these scales is the ``rl_sum`` of
    `trajkit.learn.reference_loss`. They don't depend on the other rows of the table.
    """
    check_choice("reduce", reduce, Reduce)
    for row in rows:
        if row.row_weight is None or not 0 <= row.row_weight < float("inf"):
            raise ExportError(
                f"{row.place}: row_weight is {row.row_weight}, but the row trains tokens. "
                "Set it with trajkit.add_weights"
            )
    return [
        float(row.row_weight) / (int(row.loss_mask.sum()) if reduce == "mean" else 1)
        for row in rows
    ]


def step_scales(
    rows: list[ExportRow], weighted: bool | StepCounts, target: str
) -> list[float] | None:
    """What a trained token counts in a trainer's mean over the tokens of a step.

    That mean is then `trajkit.learn.reference_loss` of the step's rows. None without
    weights.
    """
    if weighted is False:
        return None
    if not isinstance(weighted, StepCounts):
        raise ExportError(
            f"weighted={weighted!r}: {target} divides by the trained tokens of its step, "
            "which these rows alone do not tell. Pass weighted=step_counts(all rows of "
            "the step), from trajkit.export"
        )
    factor = weighted.tokens / weighted.rollouts
    return [scale * factor for scale in token_scales(rows)]


def one_row_per_rollout(rows: list[ExportRow], target: str) -> None:
    """Raise ExportError if a rollout has several rows."""
    for row in rows:
        if not row.is_last:
            raise ExportError(
                f"session {row.session_id!r} has several rows, but {target} takes one "
                "per rollout. Take a policy that gives one, such as "
                "policy('slime', row_selection='main')"
            )


def groups_in_order(
    rows: list[ExportRow], target: str, option: str, size: int | None
) -> None:
    """Raise ExportError unless groups are consecutive rows, and equally many each."""
    if size is not None:
        size = chosen_int(option, size, 1)
    seen: dict[int, int] = {}
    for group, members in groupby(rows, lambda row: row.group):
        first, *others = members
        if group in seen:
            raise ExportError(
                f"{first.place}: other groups lie between the rows of group "
                f"{first.uid!r}, but {target} takes each run of {option} rows for a "
                "group. Sort the rows by group, as the trainer repeats its prompts"
            )
        seen[group] = 1 + len(others)
        expected = size or next(iter(seen.values()))
        if seen[group] != expected:
            raise ExportError(
                f"{first.place}: group {first.uid!r} has {seen[group]} rows, but "
                f"{expected} were expected: {target} takes each run of {option} rows for "
                "a group"
            )


def has_payload(table: pa.Table, name: str) -> bool:
    """Whether some row has the payload."""
    return name in table.column_names and table.column(name).null_count < len(table)


def optional_column(rows: TableLike, name: str) -> list[Any]:
    """A column of rows as Python objects; None for each row if it is missing."""
    table = as_table(rows)
    if name not in table.column_names:
        return [None] * table.num_rows
    found: list[Any] = table.column(name).to_pylist()
    return found


def routed_experts(rows: TableLike, checked: list[ExportRow]) -> list[Array] | None:
    """The payload ``routed_experts``, or None if the rows have none.

    Per row an int array of shape (n_tokens - 1, layers, experts): the last token of a row
    was not forwarded, or its experts are of no use.
    """
    table = as_table(rows)
    if not has_payload(table, "routed_experts"):
        return None
    found = []
    for row in checked:
        n, tokens = len(row.input_ids), table["routed_experts"][row.line].values
        if (
            tokens is None
            or len(tokens) not in (n - 1, n)
            or tokens[: n - 1].null_count
        ):
            raise ExportError(
                f"{row.place}: routed_experts is null or has another length than the "
                f"{n} tokens: the trainer needs the experts of every token but the last"
            )
        # flatten looks at the slice alone
        layers = tokens[: n - 1].flatten()
        experts = layers.flatten()
        shape = n - 1, len(layers) // max(n - 1, 1), len(experts) // max(len(layers), 1)
        even = all(
            pc.all(pc.equal(pc.list_value_length(lists), size)).as_py()
            for lists, size in ((tokens[: n - 1], shape[1]), (layers, shape[2]))
        )
        if not even or experts.null_count or pc.min(experts).as_py() < 0:
            raise ExportError(
                f"{row.place}: routed_experts has other layers or numbers of experts in "
                "some tokens, or numbers below 0"
            )
        found.append(np.asarray(experts, np.int32).reshape(shape))
    return found


def sampling_masks(rows: TableLike, checked: list[ExportRow]) -> list[Any] | None:
    """The payload ``sampling_mask``, or None if the rows have none.

    Per row a list with the ids that each token was sampled from; [] for tokens that are
    not trained, or whose support was not cut.
    """
    if not has_payload(as_table(rows), "sampling_mask"):
        return None
    given = optional_column(rows, "sampling_mask")
    found = []
    for row in checked:
        each = given[row.line] or [None] * len(row.input_ids)
        if len(each) != len(row.input_ids):
            raise ExportError(
                f"{row.place}: sampling_mask has {len(each)} entries for "
                f"{len(row.input_ids)} tokens"
            )
        masks = [
            list(ids or []) if trained else []
            for ids, trained in zip(each, row.loss_mask, strict=True)
        ]
        for k, ids in enumerate(masks):
            if ids and row.input_ids[k] not in ids:
                raise ExportError(
                    f"{row.place}: the sampling_mask of token {k} lacks the token itself, "
                    f"{row.input_ids[k]}, so it belongs to another token"
                )
        found.append(masks)
    return found


def token_values(
    rows: TableLike, checked: list[ExportRow], name: str, *, null: bool = True
) -> list[Any]:
    """A column of one float per token; None for rows without it.

    ``null``: values off the loss mask may be null, and become 0.0.
    """
    given = optional_column(rows, name)
    found: list[Any] = []
    for row in checked:
        values = given[row.line]
        if values is not None:
            if len(values) != len(row.input_ids):
                raise ExportError(
                    f"{row.place}: {len(values)} values of {name} for "
                    f"{len(row.input_ids)} tokens"
                )
            array = np.array(values, np.float64)  # null: NaN
            needed = np.array([v is not None or not null for v in values])
            needed |= row.loss_mask
            for k in np.flatnonzero(needed & ~np.isfinite(array))[:1]:
                raise ExportError(
                    f"{row.place}: {name} of token {k} is {values[k]}: expected a finite "
                    "number"
                )
            values = np.where(needed, array, 0.0).tolist()
        found.append(values)
    return found


def padded(
    rows: Sequence[Array], width: int, fill: float = 0, dtype: Any = None
) -> Array:
    """Arrays as the lines of one, of shape (len(rows), width), padded right."""
    kind = dtype or (rows[0].dtype if rows else np.int64)
    found = np.full((len(rows), width), fill, kind)
    for line, values in zip(found, rows, strict=True):
        line[: len(values)] = values
    return found
