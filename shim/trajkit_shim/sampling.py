"""How a call is sampled: what the client asks for, what the session pins, what results.

A session's pins were set by whoever opened it, the trainer, and win over the client's
wishes, so that an agent cannot change what it is trained under. What shapes the
distribution is the session's alone, pinned or not, unless the session lets its client
set it; then a pin is what holds where the client says nothing.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from typing import TypeVar

from trajkit_shim import wire
from trajkit_shim.engine import Sampling

T = TypeVar("T")

NO_NAMES: Mapping[str, str | None] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Sampling parameters that someone named. ``None``: not named."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None
    # engine-specific parameters; only a session's pins may hold any
    extra: wire.Json = field(default_factory=dict)


PIN_NAMES = tuple(f.name for f in fields_of(Wishes))
WISH_NAMES = (*PIN_NAMES[:-1], "max_completion_tokens")

SHAPING = ("temperature", "top_p", "top_k")
"""Parameters that shape the distribution that a token is drawn from."""


def parse_wishes(
    body: wire.Json, where: str = "", names: Mapping[str, str | None] = NO_NAMES
) -> Wishes:
    """The sampling parameters among ``body``'s fields; the other fields are left alone.

    Parameters
    ----------
    body : dict
        A chat request, or the ``sampling`` object of a session.
    where : str
        The path of ``body``, for messages; empty at the top.
    names : mapping of str to str or None, optional
        The field of ``body`` that a parameter has, where it is not its name here. None:
        it has none.

    Raises
    ------
    GatewayError
        A parameter has the wrong type, lies out of its range, or contradicts another.
    """
    dot = f"{where}." if where else ""
    fields = {name: names.get(name, name) for name in PIN_NAMES[:-1]}
    named = {
        name: None if field is None else body.get(field)
        for name, field in fields.items()
    }
    longer = body.get("max_completion_tokens")
    limits = {
        wire.as_integer(value, f"{dot}{name}", least=1)
        for name, value in (
            (fields["max_tokens"], named["max_tokens"]),
            ("max_completion_tokens", longer),
        )
        if value is not None
    }
    if len(limits) > 1:
        wire.refuse(
            dot + "max_completion_tokens",
            f"{longer} contradicts max_tokens = {named['max_tokens']}",
        )
    return Wishes(
        max_tokens=limits.pop() if limits else None,
        temperature=_number(
            named["temperature"], f"{dot}{fields['temperature']}", most=2.0
        ),
        top_p=_number(named["top_p"], f"{dot}{fields['top_p']}", most=1.0, above=0.0),
        top_k=_top_k(named["top_k"], f"{dot}{fields['top_k']}"),
        stop=_stop(named["stop"], f"{dot}{fields['stop']}"),
        seed=None
        if named["seed"] is None
        else wire.as_integer(
            named["seed"], f"{dot}{fields['seed']}", least=-(2**63), most=2**63 - 1
        ),
    )


def parse_pins(value: object) -> Wishes:
    """The ``sampling`` object of a session that is being opened.

    It takes what a chat request takes and, under ``extra``, parameters that are passed
    on to the engine as they are.
    """
    if value is None:
        return Wishes()
    body = wire.as_object(value, "sampling")
    wire.only(body, PIN_NAMES, "sampling")
    asked = parse_wishes(body, "sampling")
    extra = body.get("extra")
    if extra is None:
        return asked
    return replace(asked, extra=wire.as_object(extra, "sampling.extra"))


def _number(
    value: object, where: str, *, most: float, above: float | None = None
) -> float | None:
    if value is None:
        return None
    number = wire.as_number(value, where, least=0.0, most=most)
    if above is not None and number <= above:
        wire.refuse(where, f"{number:g} is not above {above:g}")
    return number


def _top_k(value: object, where: str) -> int | None:
    if value is None:
        return None
    number = wire.as_integer(value, where, least=-1)
    if number == 0:
        wire.refuse(where, "0 leaves nothing to sample from; -1 takes the limit away")
    return number


def _stop(value: object, where: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return (wire.as_name(value, where),)
    items = wire.as_list(value, where)
    return tuple(wire.as_name(item, f"{where}[{i}]") for i, item in enumerate(items))


def settle(
    asked: Wishes,
    pins: Wishes,
    *,
    most: int,
    room: int,
    end_ids: tuple[int, ...],
    client: Collection[str] = (),
) -> Sampling:
    """The parameters of one engine call.

    Parameters
    ----------
    asked, pins : Wishes
        The client's and the session's. A pin replaces the wish; of the token limits the
        smaller one holds.
    most : int
        The gateway's own limit on new tokens.
    room : int
        Tokens that the context has left after the prompt.
    end_ids : tuple of int
        Token ids that end an assistant message.
    client : collection of str
        What of `SHAPING` the client may set.
    """
    shaping = {name: getattr(pins, name) for name in SHAPING}
    for name in client:
        shaping[name] = _first(getattr(asked, name), shaping[name])
    limits = [asked.max_tokens, pins.max_tokens, most, room]
    return Sampling(
        max_new_tokens=min(limit for limit in limits if limit is not None),
        **shaping,
        stop=_first(pins.stop, asked.stop) or (),
        stop_token_ids=end_ids,
        seed=_first(pins.seed, asked.seed),
        extra=dict(pins.extra),
    )


def overruled(asked: Wishes, settled: Sampling) -> list[str]:
    """What of `SHAPING` a client asked for and did not get."""
    wishes = ((name, getattr(asked, name)) for name in SHAPING)
    return [
        name
        for name, wish in wishes
        if wish is not None and wish != getattr(settled, name)
    ]


def parse_client_sampling(value: object) -> frozenset[str]:
    """The ``client_sampling`` of a session that is being opened: names of `SHAPING`."""
    if value is None:
        return frozenset()
    names = wire.as_list(value, "client_sampling")
    for i, name in enumerate(names):
        if name not in SHAPING:
            wire.refuse(
                f"client_sampling[{i}]", f"{name!r} is none of {', '.join(SHAPING)}"
            )
    return frozenset(map(str, names))


def _first(pinned: T | None, asked: T | None) -> T | None:
    return asked if pinned is None else pinned
