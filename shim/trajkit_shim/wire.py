"""Reading a stranger's JSON: each refusal names the place, the value and the rule."""

import json
import math
import re
from collections.abc import AsyncIterator, Collection
from typing import NoReturn, TypeAlias

from trajkit_shim.errors import GatewayError

Json: TypeAlias = dict[str, object]

# what walks over a body may recurse
MAX_DEPTH = 100

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def refuse(where: str, rule: str, *, code: str | None = None) -> NoReturn:
    """Raise a 400 that names the parameter ``where`` and the rule that it breaks."""
    raise GatewayError(f"{where}: {rule}", code=code, param=where)


async def read_body(chunks: AsyncIterator[bytes], most: int) -> bytes:
    """A request's body, of ``most`` bytes at the most.

    Raises
    ------
    GatewayError
        413: it is longer. What lies beyond is not read.
    """
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > most:
            raise GatewayError(
                f"the body is longer than {most} bytes", 413, code="body_too_long"
            )
    return bytes(body)


def parse_object(body: bytes) -> Json:
    """The JSON object that a request body holds.

    Raises
    ------
    GatewayError
        The body is no UTF-8, no JSON, no object, nested too deep to read, or holds NaN,
        an infinity or half of a surrogate pair.
    """
    try:
        value = json.loads(
            body.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite
        )
    except ValueError as error:
        raise GatewayError(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise GatewayError("the body is nested too deep") from error
    if _SURROGATE.search(body):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise GatewayError(
                "the body holds half of a surrogate pair, which no tokenizer can encode"
            ) from error
    if not isinstance(value, dict):
        raise GatewayError(f"the body is {_kind(value)}, not a JSON object")
    _check_depth(value)
    return value


def _check_depth(value: Json) -> None:
    level: list[dict[str, object] | list[object]]
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return
    raise GatewayError(f"the body is nested deeper than {MAX_DEPTH} levels")


def _no_constant(name: str) -> NoReturn:
    raise GatewayError(f"the body is not JSON: it holds {name}")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise GatewayError(f"the body holds {text[:40]}, which is beyond every double")
    return number


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", dict: "an object", list: "a list"}
    return names.get(type(value), "a number")


def as_object(value: object, where: str) -> Json:
    """``value``, which must be a JSON object."""
    if not isinstance(value, dict):
        refuse(where, f"{_kind(value)}, not an object")
    return value


def as_list(value: object, where: str) -> list[object]:
    """``value``, which must be a JSON list."""
    if not isinstance(value, list):
        refuse(where, f"{_kind(value)}, not a list")
    return value


def as_text(value: object, where: str) -> str:
    """``value``, which must be a JSON string."""
    if not isinstance(value, str):
        refuse(where, f"{_kind(value)}, not a string")
    return value


def as_name(value: object, where: str) -> str:
    """``value``, which must be a JSON string with something in it."""
    text = as_text(value, where)
    if not text:
        refuse(where, "an empty string")
    return text


def as_flag(value: object, where: str) -> bool:
    """``value``, which must be true or false."""
    if not isinstance(value, bool):
        refuse(where, f"{_kind(value)}, not a boolean")
    return value


def as_integer(value: object, where: str, *, least: int, most: int = 2**31 - 1) -> int:
    """``value``, which must be an integer in ``[least, most]``."""
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(
            where,
            f"{value if isinstance(value, float) else _kind(value)}, not an integer",
        )
    if not least <= value <= most:
        refuse(where, f"{value} is not in [{least}, {most}]")
    return value


def as_number(value: object, where: str, *, least: float, most: float) -> float:
    """``value``, which must be a finite number in ``[least, most]``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(where, f"{_kind(value)}, not a number")
    try:
        number = float(value)
    # an integer beyond every double
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and least <= number <= most):
        refuse(where, f"{number} is not in [{least:g}, {most:g}]")
    return number


def only(fields: Json, known: Collection[str], where: str) -> None:
    """Refuse a field of ``fields`` that is not null and not one of ``known``.

    Parameters
    ----------
    where : str
        The path of ``fields``; empty at the top of the body.
    """
    for name, value in fields.items():
        if value is not None and name not in known:
            refuse(
                f"{where}.{name}" if where else name,
                "not supported by this gateway",
                code="unsupported_parameter",
            )
