"""What the gateway answers when it cannot answer: one exception, one wire shape."""


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
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message, status)
        self.message = message
        self.status = status
        self.code = code
        self.param = param

    def __str__(self) -> str:
        return self.message


class TemplateError(GatewayError):
    """The chat template refuses the messages."""


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
