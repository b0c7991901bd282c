"""The sampling parameters of a call, from the client's request and the session's pins.

Whoever opens a session (the trainer) pins parameters. Pins replace the client's values,
so an agent cannot change what it is trained under. Parameters that shape the
distribution are ignored in a client's request even if they are not pinned, unless the
session lets its client set them; a pin is then the default.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

from trajkit_shim.chat.sampling_params import (
    PIN_NAMES,
    SHAPING,
    SamplingParams,
    parse_sampling,
)
from trajkit_shim.engines.base import Sampling
from trajkit_shim.json_input import Fields, Json, as_list, as_object, refuse

T = TypeVar("T")


def parse_pins(value: object) -> SamplingParams:
    """Read a session's ``sampling``: as in a chat request, with ``extra`` as it is."""
    if value is None:
        return SamplingParams()
    fields = Fields(as_object(value, "sampling"), "sampling")
    fields.only(PIN_NAMES)
    return replace(parse_sampling(fields), extra=fields.section("extra").json)


def parse_client_sampling(value: object) -> frozenset[str]:
    """Read the ``client_sampling`` of a session being opened: names of `SHAPING`."""
    if value is None:
        return frozenset()
    names = as_list(value, "client_sampling")
    for i, name in enumerate(names):
        if name not in SHAPING:
            rule = f"{name!r} is not one of {', '.join(SHAPING)}"
            refuse(f"client_sampling[{i}]", rule)
    return frozenset(map(str, names))


def resolve(
    requested: SamplingParams,
    pins: SamplingParams,
    *,
    max_tokens: int,
    room: int,
    end_ids: tuple[int, ...],
    client: Collection[str] = (),
    structural_tag: Json | None = None,
) -> Sampling:
    """Return the parameters of one engine call.

    The limit on new tokens is the smallest of the client's (``requested``), the
    session's (``pins``), the gateway's (``max_tokens``) and the ``room`` left in the
    context. ``client`` has the names in `SHAPING` that the client may set.
    """
    shaping = {name: getattr(pins, name) for name in SHAPING}
    for name in client:
        shaping[name] = _first(getattr(requested, name), shaping[name])
    limits = (requested.max_tokens, pins.max_tokens, max_tokens, room)
    return Sampling(
        max_new_tokens=min(limit for limit in limits if limit is not None),
        **shaping,
        stop=_first(pins.stop, requested.stop) or (),
        stop_token_ids=end_ids,
        seed=_first(pins.seed, requested.seed),
        structural_tag=structural_tag,
        extra=dict(pins.extra),
    )


def ignored_params(requested: SamplingParams, resolved: Sampling) -> list[str]:
    """Return the names in `SHAPING` that a client requested and did not get."""
    return [
        name
        for name in SHAPING
        if getattr(requested, name) not in (None, getattr(resolved, name))
    ]


def _first(value: T | None, default: T | None) -> T | None:
    return default if value is None else value
