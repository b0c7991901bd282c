"""Sampling parameters of a client's request or of a session."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from functools import partial
from typing import TypeVar

from trajkit_shim import json_input

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Named sampling parameters. ``None``: not given."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None
    # engine-specific parameters; only in a session's pins
    extra: json_input.Json = field(default_factory=dict)


PIN_NAMES = tuple(f.name for f in fields_of(SamplingParams))
PARAM_NAMES = (*PIN_NAMES[:-1], "max_completion_tokens")

SHAPING = ("temperature", "top_p", "top_k")
"""Parameters that shape the distribution that tokens are drawn from."""


def parse_sampling(
    fields: json_input.Fields, names: Mapping[str, str | None] | None = None
) -> SamplingParams:
    """Read the sampling parameters of a chat request or a session, and nothing else.

    ``names`` has the fields that are not named as the parameter; None: there is no field.
    """

    def read(name: str, reader: Callable[[object, str], T]) -> T | None:
        field = (names or {}).get(name, name)
        return None if field is None else fields.get(field, reader)

    max_tokens = read("max_tokens", _positive)
    longer = fields.get("max_completion_tokens", _positive)
    if longer is not None and max_tokens not in (None, longer):
        rule = f"{longer} contradicts max_tokens = {max_tokens}"
        fields.refuse("max_completion_tokens", rule)
    return SamplingParams(
        max_tokens=longer if max_tokens is None else max_tokens,
        temperature=read(
            "temperature", partial(json_input.as_number, minimum=0.0, maximum=2.0)
        ),
        top_p=read("top_p", _top_p),
        top_k=read("top_k", _top_k),
        stop=read("stop", _stop),
        seed=read("seed", _seed),
    )


def nth_seed(seed: int, n: int) -> int:
    """Return ``seed`` + ``n``; after the largest seed comes the smallest."""
    least, most = _SEEDS
    return (seed + n - least) % (most + 1 - least) + least


_SEEDS = -(2**63), 2**63 - 1
_seed = partial(json_input.as_integer, minimum=_SEEDS[0], maximum=_SEEDS[1])
_positive = partial(json_input.as_integer, minimum=1)


def _top_p(value: object, where: str) -> float:
    number = json_input.as_number(value, where, minimum=0.0, maximum=1.0)
    if number == 0:
        json_input.refuse(where, "0 is not above 0")
    return number


def _top_k(value: object, where: str) -> int:
    number = json_input.as_integer(value, where, minimum=-1)
    if number == 0:
        rule = "0 leaves nothing to sample from; -1 removes the limit"
        json_input.refuse(where, rule)
    return number


def _stop(value: object, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (json_input.as_name(value, where),)
    return tuple(
        json_input.as_name(item, f"{where}[{i}]")
        for i, item in enumerate(json_input.as_list(value, where))
    )
