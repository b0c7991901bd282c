"""What the gateway answers when it cannot answer."""

from trajkit_shim.engine import EngineError


class GatewayError(Exception):
    """A call that ends in an error answer. Nothing of it is recorded.

    Parameters
    ----------
    message : str
        What is wrong, with the place, the value and the rule.
    status : int
        The HTTP status of the answer.
    code : str, optional
        A word for machines.
    param : str, optional
        The request parameter at fault, as a path: ``messages[3].content``.
    overflow : tuple of int, optional
        Tokens of a prompt that the context has no room for, and the context's length.
    retry_after : int, optional
        Seconds after which it may be different.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        code: str | None = None,
        param: str | None = None,
        overflow: tuple[int, int] | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message, status)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.overflow = overflow
        self.retry_after = retry_after

    def __str__(self) -> str:
        return self.message


class TemplateError(GatewayError):
    """The chat template refuses the messages."""


# What may go away by itself. Clients that obey x-should-retry send no other call again.
_PASSING = frozenset({502, 503, 504})


def as_gateway_error(error: Exception) -> GatewayError:
    """What a client is told of an error, whatever raised it."""
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, EngineError):
        return GatewayError(
            error.message,
            error.status,
            code=error.code,
            overflow=error.overflow,
            retry_after=error.retry_after,
        )
    return GatewayError("the gateway failed", 500, code="internal_error")


def retry_header(error: GatewayError) -> dict[str, str]:
    """The headers that tell the official clients whether to send the call again."""
    headers = {"x-should-retry": "true" if error.status in _PASSING else "false"}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return headers


def error_body(error: GatewayError) -> dict[str, object]:
    """The error as OpenAI's API words it: ``{"error": {...}}``."""
    kinds = {401: "authentication_error", 403: "permission_error"}
    fallback = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": kinds.get(error.status, fallback),
            "param": error.param,
            "code": error.code,
        }
    }
