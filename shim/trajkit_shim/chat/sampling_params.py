"""Sampling parameters: of a client's request, of a session, and of an engine call.

Whoever opens a session (the trainer) fixes parameters. They replace the client's values,
so an agent cannot change what it is trained under. Parameters that shape the
distribution are ignored in a client's request even if they are not pinned, unless the
session lets its client set them; a pin is then the default.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from trajkit_shim import json_input
from trajkit_shim.engines.base import Sampling
from trajkit_shim.json_input import Fields, Json, Reader

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
    # engine-specific parameters; only in a session's own
    extra: Json = field(default_factory=dict)


SHAPING = ("temperature", "top_p", "top_k")
"""Parameters that shape the distribution that tokens are drawn from."""

FIXED = ("max_tokens", "stop", "seed", "response_format", "tool_choice")
"""What a client decides unless the session fixes its sampling. Forms that a client
requires of a reply are a grammar, which shapes the distribution too."""

CLIENT = (*SHAPING, *FIXED)
"""What a session may leave to its client."""

_SEEDS = -(2**63), 2**63 - 1


def _not_zero(read: Reader[T], rule: str) -> Reader[T]:
    def checked(value: object, where: str) -> T:
        number = read(value, where)
        if number == 0:
            json_input.refuse(where, f"0 {rule}")
        return number

    return checked


def _stop(value: object, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (json_input.as_name(value, where),)
    return (*json_input.list_of(json_input.as_name)(value, where),)


_READERS: Mapping[str, Reader[Any]] = {
    "max_tokens": partial(json_input.as_integer, minimum=1),
    "temperature": partial(json_input.as_number, minimum=0.0, maximum=2.0),
    "top_p": _not_zero(
        partial(json_input.as_number, minimum=0.0, maximum=1.0), "is not above 0"
    ),
    "top_k": _not_zero(
        partial(json_input.as_integer, minimum=-1),
        "leaves nothing to sample from; -1 removes the limit",
    ),
    "stop": _stop,
    "seed": partial(json_input.as_integer, minimum=_SEEDS[0], maximum=_SEEDS[1]),
}
PARAM_NAMES = (*_READERS, "max_completion_tokens")


def parse_sampling(
    fields: Fields, names: Mapping[str, str | None] | None = None
) -> SamplingParams:
    """Read the sampling parameters of a chat request or a session, and nothing else.

    ``names`` has the fields that are not named as the parameter; None: there is no field.
    """
    named = {**{name: name for name in _READERS}, **(names or {})}
    found: dict[str, Any] = {
        name: fields.get(field, _READERS[name])
        for name, field in named.items()
        if field is not None
    }
    longer = fields.get("max_completion_tokens", _READERS["max_tokens"])
    if longer is not None and found["max_tokens"] not in (None, longer):
        rule = f"{longer} contradicts max_tokens = {found['max_tokens']}"
        fields.refuse("max_completion_tokens", rule)
    return SamplingParams(**{**found, "max_tokens": found["max_tokens"] or longer})


def parse_fixed(value: object) -> SamplingParams:
    """Read a session's ``sampling``: as in a chat request, with ``extra`` as it is."""
    if value is None:
        return SamplingParams()
    fields = Fields(json_input.as_object(value, "sampling"), "sampling")
    fields.only({*_READERS, "extra"})
    return replace(parse_sampling(fields), extra=fields.section("extra").json)


def parse_client_sampling(value: object) -> frozenset[str]:
    """Read the ``client_sampling`` of a session being opened: names of `CLIENT`."""
    names = [] if value is None else json_input.as_list(value, "client_sampling")
    for i, name in enumerate(names):
        if name not in CLIENT:
            rule = f"{name!r} is not one of {', '.join(CLIENT)}"
            json_input.refuse(f"client_sampling[{i}]", rule)
    return frozenset(map(str, names))


def resolve(
    requested: SamplingParams,
    fixed: SamplingParams,
    *,
    max_tokens: int,
    room: int,
    end_ids: tuple[int, ...],
    client: Collection[str] = (),
    structural_tag: Json | None = None,
) -> Sampling:
    """Return the parameters of one engine call.

    The limit on new tokens is the smallest of the client's (``requested``), the
    session's (``fixed``), the gateway's (``max_tokens``) and the ``room`` left in the
    context. ``client`` has the names in `CLIENT` that the client may set.
    """
    shaping = {name: getattr(fixed, name) for name in SHAPING}
    for name in shaping.keys() & client:
        shaping[name] = _first(getattr(requested, name), shaping[name])
    limits = (requested.max_tokens, fixed.max_tokens, max_tokens, room)
    return Sampling(
        max_new_tokens=min(limit for limit in limits if limit is not None),
        **shaping,
        stop=_first(fixed.stop, requested.stop) or (),
        stop_token_ids=end_ids,
        seed=_first(fixed.seed, requested.seed),
        structural_tag=structural_tag,
        extra=dict(fixed.extra),
    )


def without_fixed(
    requested: SamplingParams, fixed: SamplingParams, client: Collection[str]
) -> SamplingParams:
    """Return what a client requested without what a session fixes."""
    names = [name for name in FIXED[:3] if is_fixed(name, fixed, client)]
    nothing: dict[str, Any] = dict.fromkeys(names)
    return replace(requested, **nothing)


def is_fixed(name: str, fixed: SamplingParams, client: Collection[str]) -> bool:
    """Return whether the session decides one of `FIXED`, because it fixes sampling."""
    return name not in client and fixed != SamplingParams()


def ignored_params(requested: SamplingParams, resolved: Sampling) -> list[str]:
    """Return the parameters that a client requested and did not get."""
    given = {
        **{name: getattr(resolved, name) for name in (*SHAPING, "seed")},
        "stop": resolved.stop or None,
    }
    lost = [
        name
        for name, got in given.items()
        if getattr(requested, name) not in (None, got)
    ]
    limit = resolved.max_new_tokens
    return lost + ["max_tokens"] * ((requested.max_tokens or limit) < limit)


def _first(value: T | None, default: T | None) -> T | None:
    return default if value is None else value
