"""Rows as trainers take them: one walk that groups and checks rows for every target."""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, ParamSpec

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice, chosen_int
from trajkit.errors import ExportError, NoSignalWarning
from trajkit.learn.loss import Reduce as Reduce
from trajkit.learn.weights import trained_tokens
from trajkit.schema import PAYLOADS
from trajkit.tables.canonical import TableLike as TableLike
from trajkit.tables.canonical import as_table, canonical_rows, place
from trajkit.tables.ragged import Array as Array
from trajkit.tables.ragged import Ragged, codes, lengths
from trajkit.turns.images import engine_ids

_P = ParamSpec("_P")

_LISTS = {"input_ids": 0, "loss_mask": False, "logprobs": np.nan}
FLAGS = ("truncated", "use_tool", "ill_formed")
_COLUMNS = (
    *("session_id", "row_index", "group_id", "prompt_length", "reward", "advantage"),
    *("row_weight", "finish_reason", "weight_versions", "last_turn", "spans"),
    *("mm_items", *FLAGS),
)


class Target(NamedTuple):
    """What a trainer takes."""

    name: str
    # the column that its step needs: "advantages" may be lists per token
    reads: Literal["", "reward", "reward or null", "advantage", "advantages"] = ""
    carried: tuple[str, ...] = ()  # the values per token that it has fields for
    cut: str = ""  # its option for the length at which it cuts rows
    runs: str = ""  # its option for rollouts per group, if it takes runs for groups
    response: bool = False  # it has prompt and response, and a mask for the response
    single: str = ""  # it takes one row per rollout; what to do for that
    by_step: bool = False  # it divides its loss by the trained tokens of a step
    logprobs: bool = True  # it trains with logprobs; without, payloads don't matter
    images: bool = False
    untrained: bool = False


ONE_ROW = "Take a policy that gives one, such as policy('slime', row_selection='main')"


class ExportRow(SimpleNamespace):
    """One checked row: its columns of `_COLUMNS`, what the target carries, and these.

    group, rollout, repetition : number of its group, of its rollout, and of its rollout in
    its group, from 0 in order of the rows. is_last : it is the last of its rollout.
    uid : the name of its group; that of a session without one is no ``group_id``.
    input_ids, loss_mask, logprobs, advantages : int32, bool, float32, float64, shape
    (n_tokens,); the last two are 0.0 where the mask is false.
    prompt_ids, response_ids, response_mask, response_logprobs : lists; the mask of ints.
    scale : what a trained token counts. place : session and row, for errors.
    """

    # where the rows have no such column, or the target carries none
    scale = 1.0
    advantage: Any = None
    routed_experts = sampling_mask = weight_version = advantage
    ref_logprobs = teacher_logprobs = observation_weight = advantage


def objects_of(
    fields: Callable[_P, Any], make: str | Callable[[Any], Any]
) -> Callable[_P, Any]:
    """A function like ``fields`` that makes an object of each dict in its result.

    ``make`` takes the dict, also as "module:Class.method"; a "module:Class" its keywords.
    """

    def made(value: Any) -> Any:
        if isinstance(value, list):
            return [made(each) for each in value]
        if not isinstance(make, str):
            return make(value)
        factory = resolve_name(make)
        return factory(**value) if isinstance(factory, type) else factory(value)

    @wraps(fields)
    def objects(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        return made(fields(*args, **kwargs))

    kind = f"objects of ``{make}``" if isinstance(make, str) else make.__doc__
    objects.__doc__ = f"`{fields.__name__}` as {kind}"
    return objects


def tensors(fields: dict[str, Any]) -> dict[str, Any]:
    """dicts with torch tensors in place of arrays."""
    import torch

    return {
        name: torch.tensor(value) if isinstance(value, np.ndarray) else value
        for name, value in fields.items()
    }


class StepCounts(NamedTuple):
    """Rollouts and trained tokens of a trainer's step, over all ranks."""

    rollouts: int
    tokens: int


def step_counts(rows: TableLike) -> StepCounts:
    """The counts of a step that trains these rows, and no others."""
    table = canonical_rows(as_table(rows))
    trained = trained_tokens(table)
    session = codes(table.column("session_id"))
    return StepCounts(len(np.unique(session[trained > 0])), int(trained.sum()))


def sessions_of(rows: TableLike) -> pa.Table:
    """The sessions of rows with their rewards and groups, for `trajkit.learn.advantages`.

    Sessions without rows are missing, but they count in the baseline of their group: take
    the report of `trajkit.linearize` where there are some. Raises ExportError if the rows
    of a session differ in reward or group.
    """
    table = canonical_rows(as_table(rows)).select(["session_id", "reward", "group_id"])
    found = table.group_by(table.column_names, use_threads=False).aggregate([])
    if len(found) > len(found.column("session_id").unique()):
        raise ExportError(
            "the rows of a session differ in reward or group_id: pass a table of sessions"
        )
    return found.replace_schema_metadata(None)


def checked_rows(
    rows: TableLike,
    target: Target,
    *,
    cut: int | None = None,
    group_size: int | None = None,
    weighted: bool | StepCounts = False,
    reduce: Reduce = "mean",
) -> list[ExportRow]:
    """The rows, checked for what every trainer needs (see docs/export.md).

    ``cut`` and ``group_size`` are the values of the target's options, None for any.
    ``weighted``: rows have a scale. The sum over tokens with it is the ``rl_sum`` of
    `trajkit.learn.reference_loss`, or its total in a mean over the tokens of a step. It
    doesn't depend on the other rows of the table. ``reduce``: how row weights are meant.
    """
    check_choice("reduce", reduce, Reduce)
    if weighted and target.by_step and not isinstance(weighted, StepCounts):
        raise ExportError(
            f"weighted={weighted!r}: {target.name} divides by the trained tokens of its "
            "step, which these rows alone do not tell. Pass weighted=step_counts(all rows "
            "of the step), from trajkit.export"
        )
    for option, value in ((target.cut, cut), (target.runs, group_size)):
        if value is not None:
            chosen_int(option.rpartition(".")[2], value, 1)
    table = canonical_rows(as_table(rows))
    filled = [
        name for name in table.column_names if table[name].null_count < len(table)
    ]
    lost = [name for name in filled if name in PAYLOADS and name not in target.carried]
    for name in lost if target.logprobs else ():
        raise ExportError(
            f"the rows have the payload {name}, for which the format of {target.name} has "
            "no field, so the trainer would compute another loss. Export without it on "
            f"purpose: rows.drop_columns([{name!r}])"
        )
    table = engine_ids(table)
    lists = [Ragged.of(table[name], fill) for name, fill in _LISTS.items()]
    sizes = np.stack([each.lengths for each in lists])
    for uneven in np.flatnonzero((sizes != sizes[0]).any(0)):
        raise ExportError(
            f"{place(table, int(uneven))}: input_ids, loss_mask and logprobs have lengths "
            f"{sizes[:, uneven].tolist()}: expected the same"
        )
    session = codes(table.column("session_id"))
    for again in 1 + np.flatnonzero(np.diff(session) < 0):
        raise ExportError(
            f"{place(table, int(again))}: the rows of the session are not contiguous. Sort "
            "them"
        )
    # where a row is of another session than the one before it
    edges = np.diff([-1, *session, -1]) != 0
    groups: dict[object, int] = {}
    members = Counter[int]()
    found = []
    facts = table.select([name for name in _COLUMNS if name in table.column_names])
    for line, own in enumerate(facts.to_pylist()):
        # a session without a group is one of its own, whatever others are called
        alone = own["group_id"] is None
        uid = f"session {own['session_id']}" if alone else own["group_id"]
        group = groups.setdefault((alone, uid), len(groups))
        members[group] += int(edges[line])
        row = ExportRow(
            **own | {flag: bool(own[flag]) for flag in FLAGS},
            group=group,
            rollout=int(session[line]),
            repetition=members[group] - 1,
            is_last=bool(edges[line + 1]),
            place=f"session {own['session_id']!r}, row {own['row_index']}",
            uid=uid,
        )
        row.input_ids, row.loss_mask, row.logprobs = (each[line] for each in lists)
        for fault in _faults(row, target, cut, weighted is not False):
            raise ExportError(f"{row.place}: {fault}")
        row.logprobs = np.nan_to_num(np.where(row.loss_mask, row.logprobs, 0.0))
        if target.reads.startswith("advantage"):
            gains = np.asarray(row.advantage, np.float64)
            row.advantages = np.where(row.loss_mask, gains, 0.0)
        if weighted:
            row.scale = row.row_weight
            if reduce == "mean":
                row.scale /= int(row.loss_mask.sum())
            if isinstance(weighted, StepCounts):
                row.scale *= weighted.tokens / weighted.rollouts
        if target.response:
            n = row.prompt_length
            row.prompt_ids = row.input_ids[:n].tolist()
            row.response_ids = row.input_ids[n:].tolist()
            row.response_mask = row.loss_mask[n:].astype(int).tolist()
            row.response_logprobs = row.logprobs[n:].tolist()
        for name in filter(filled.__contains__, target.carried):
            setattr(row, name, _carried(row, name, table[name][line]))
        found.append(row)
    if target.runs:
        _check_groups(found, target, group_size)
    _warn_without_signal(found, target)
    return found


def _faults(
    row: ExportRow, target: Target, cut: int | None, weighted: bool
) -> Iterator[str]:
    """What the target would take wrongly of a row."""
    n, mask = len(row.input_ids), row.loss_mask
    first = int(mask.argmax()) if mask.any() else n
    if row.mm_items and not target.images:
        yield "the row has images, which only trajkit.export.verl.agent_loop_fields takes"
    if row.mm_items and row.mm_items[-1]["stop"] > n:
        yield "the row ends in an image, cut by max_row_tokens: take another value"
    if first == n and not target.untrained:
        yield "no token is trained. Make rows with keep_untrained=False"
    if 0 == first < n:
        yield "token 0 is trained, but no token precedes it to predict it from"
    if target.response and first < n and not 0 < row.prompt_length <= first:
        yield (
            f"token {first} is trained, but this format trains nothing before "
            f"prompt_length, which is {row.prompt_length}: expected 1 to {first}"
        )
    if cut is not None and n > cut:
        yield (
            f"{n} tokens, but {target.name} cuts rows at {target.cut} {cut}. Pass the "
            f"trainer's value as {target.cut.rpartition('.')[2]}= (trajkit export: "
            "--max-length), raise it, or linearize with max_row_tokens"
        )
    unknown = mask & ~np.isfinite(row.logprobs)
    if target.logprobs and unknown.any():
        yield (
            f"token {unknown.argmax()} is trained and has no finite logprob. Make rows "
            "with missing_logprobs='untrain'"
        )
    reward, gain, weight = row.reward, row.advantage, row.row_weight
    if weighted and (weight is None or not 0 <= weight < math.inf):
        yield f"row_weight is {weight}: set it with trajkit.add_weights"
    null = math.nan if target.reads == "reward" else 0.0
    if "reward" in target.reads and not np.isfinite(null if reward is None else reward):
        yield (
            f"reward is {'null' if reward is None else reward}, which the trainer would "
            "take for 0 or NaN. Give the session a finite reward, or filter it out"
        )
    if target.reads.startswith("advantage"):
        if gain is None or (isinstance(gain, list) and None in gain):
            yield (
                "advantage is null or absent. Add it with trajkit.add_advantages (trajkit "
                "export: --advantage), and filter out rows whose advantage is null: those "
                "without a reward, and, but for group_mean, with the only one of a group"
            )
        if not np.isfinite(gain).all():
            yield f"advantage is {gain}: expected finite numbers"
        if isinstance(gain, list) and target.reads == "advantage":
            yield "advantage is a list per token, but this format has one per row"
        if isinstance(gain, list) and len(gain) != n:
            yield f"{len(gain)} advantages for {n} tokens"
    if (target.single or target.runs) and not row.is_last:
        yield (
            f"the rollout has several rows, but {target.name} takes one. "
            f"{target.single or ONE_ROW}"
        )


def _check_groups(rows: list[ExportRow], target: Target, size: int | None) -> None:
    # groups have their numbers in the order in which they begin
    numbers = np.array([row.group for row in rows], int)
    rule = f"{target.name} takes each run of {target.runs} rows for a group"
    for line in 1 + np.flatnonzero(np.diff(numbers) < 0):
        raise ExportError(
            f"{rows[line].place}: other groups lie between the rows of group "
            f"{rows[line].uid!r}, but {rule}. Sort the rows by group, as the trainer "
            "repeats its prompts"
        )
    sizes = np.bincount(numbers)
    for row in rows:
        expected = size or int(sizes[0])
        if sizes[row.group] != expected:
            raise ExportError(
                f"{row.place}: group {row.uid!r} has {sizes[row.group]} rows, but "
                f"{expected} were expected: {rule}"
            )


def _warn_without_signal(rows: list[ExportRow], target: Target) -> None:
    if target.reads.startswith("advantage"):
        some, what = any(np.any(row.advantage) for row in rows), "all advantages are 0"
    else:
        what, first = "no group has two rewards that differ", dict[int, float]()
        rewards = [(row.group, row.reward) for row in rows if row.reward is not None]
        some = not all(
            math.isclose(first.setdefault(k, value), value, rel_tol=1e-9, abs_tol=1e-9)
            for k, value in rewards
        )
    # the group of one rollout may be elsewhere
    if target.reads and not some and len({row.rollout for row in rows}) > 1:
        warnings.warn(
            f"a training step on these {len(rows)} rows changes nothing: {what}. Set "
            "group_id, so that the rollouts of a task share a group, or take other rows",
            NoSignalWarning,
            stacklevel=4,
        )


def _carried(row: ExportRow, name: str, given: pa.Scalar) -> Any:
    """A row's values per token.

    routed_experts : int32, shape (n_tokens - 1, layers, experts); the last token was not
    forwarded. sampling_mask : the ids from which each token was sampled, or []. Others :
    floats, or texts and None in weight_version; None for no observation_weight.
    """
    n = len(row.input_ids)
    if name == "routed_experts":
        return _experts(row, given.values)
    if given.values is None and name == "observation_weight":
        return None
    values = [None] * n if given.values is None else given.as_py()
    if len(values) != n:
        raise ExportError(f"{row.place}: {len(values)} values of {name} for {n} tokens")
    if name == "weight_version":
        return values
    if name == "sampling_mask":
        pairs = zip(row.loss_mask, values, strict=True)
        values = [list(ids or ()) if trained else [] for trained, ids in pairs]
        for k, ids in enumerate(values):
            if ids and row.input_ids[k] not in ids:
                raise ExportError(
                    f"{row.place}: the sampling_mask of token {k} lacks the token itself, "
                    f"{row.input_ids[k]}, so it belongs to another token"
                )
        return values
    floats = np.array(values, np.float64)  # null: NaN
    if name != "observation_weight":
        floats[~row.loss_mask & [value is None for value in values]] = 0.0
    for bad in np.flatnonzero(~np.isfinite(floats)):
        raise ExportError(
            f"{row.place}: {name} of token {bad} is {values[bad]}: expected a finite number"
        )
    return floats.tolist()


def _experts(row: ExportRow, tokens: pa.Array | None) -> Array:
    n = len(row.input_ids) - 1
    if tokens is not None and len(tokens) in (n, n + 1):
        layers = tokens[:n].flatten()  # of the slice alone
        sizes = lengths(tokens[:n]), lengths(layers)
        numbers = np.asarray(layers.flatten().fill_null(-1), np.int32)
        shape = n, *(int(each.max(initial=0)) for each in sizes)
        if len(numbers) == math.prod(shape) > 0 <= numbers.min():
            return numbers.reshape(shape)
    raise ExportError(
        f"{row.place}: routed_experts is null, or does not have as many layers and experts "
        f"for every token but the last ({n}), or has nulls or numbers below 0"
    )
