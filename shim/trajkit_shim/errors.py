"""Errors that become error answers."""

from dataclasses import KW_ONLY, dataclass


@dataclass(eq=False, repr=False)
class GatewayError(Exception):
    """A call that ends with an error answer. It is not recorded.

    The message names the place, the value and the rule. ``param`` is the path of the
    invalid request parameter, such as ``messages[3].content``; ``code`` is
    machine-readable.
    """

    message: str
    status: int = 400
    _: KW_ONLY
    code: str | None = None
    param: str | None = None
    # length of a prompt that is too long, and of the context
    overflow: tuple[int, int] | None = None
    retry_after: int | None = None  # seconds after which a retry may succeed

    def __str__(self) -> str:
        return self.message


@dataclass(eq=False, repr=False)
class EngineError(GatewayError):
    """The engine rejected (4xx) or failed (5xx) a call, in its words if it gave any."""

    status: int = 502
    _: KW_ONLY
    code: str | None = "engine_error"


class TemplateError(GatewayError):
    """The chat template rejects the messages."""


def as_gateway_error(error: Exception) -> GatewayError:
    """Return the error that a client sees for any exception."""
    if isinstance(error, GatewayError):
        return error
    return GatewayError("the gateway failed", 500, code="internal_error")


def retry_header(error: GatewayError) -> dict[str, str]:
    """Return the headers that tell the official clients whether to retry."""
    # they obey it, and retry no other call
    passing = error.status in (502, 503, 504) or error.retry_after is not None
    headers = {"x-should-retry": "true" if passing else "false"}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return headers


def error_body(error: GatewayError) -> dict[str, object]:
    """Return the error in the format of OpenAI's API: ``{"error": {...}}``."""
    kinds = {401: "authentication_error", 403: "permission_error"}
    fallback = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = kinds.get(error.status, fallback)
    shown = {"message": error.message, "type": kind, "param": error.param}
    return {"error": {**shown, "code": error.code}}
