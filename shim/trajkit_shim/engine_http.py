"""An inference server that is spoken to in JSON over HTTP: requests, streams, errors."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping

import httpx

from trajkit_shim.engine import EngineError
from trajkit_shim.wire import Json

# a reply may take as long as it takes; a server that is there answers a dial at once
_TIMEOUT = httpx.Timeout(None, connect=10.0)
_NOTHING: Mapping[str, str] = {}

UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a reply raises whose fields are missing, of another type or too large."""


class EngineServer:
    """One server or router.

    Parameters
    ----------
    name : str
        What messages call it.
    base_url : str
        ``http://127.0.0.1:30000``.
    client : httpx.AsyncClient, optional
        Used in place of one made here; closed with this.
    """

    def __init__(
        self, name: str, base_url: str, client: httpx.AsyncClient | None = None
    ) -> None:
        self._name = name
        self._base_url = base_url.rstrip("/")
        # the number of calls under way is the sessions' business, not the pool's
        self.client = client or httpx.AsyncClient(
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def get(self, path: str) -> Json:
        """The object at a path.

        Raises
        ------
        EngineError
            400: the server refuses the request. 5xx: it failed, cannot be reached, or
            gives no object.
        """
        return await self._request("GET", path, None, _NOTHING)

    async def post(
        self, path: str, body: Json, headers: Mapping[str, str] = _NOTHING
    ) -> Json:
        """The object that a request brings. Raises as `get`."""
        return await self._request("POST", path, body, headers)

    async def events(
        self, path: str, body: Json, headers: Mapping[str, str] = _NOTHING
    ) -> AsyncIterator[Json]:
        """The objects of a stream of server-sent events, up to ``[DONE]``.

        Raises
        ------
        EngineError
            As `get`; or an event tells of an error; or the stream breaks off.
        """
        ended = False
        try:
            async with self.client.stream(
                "POST", self._base_url + path, json=body, headers=headers
            ) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise self._refusal(response)
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        ended = True
                        break
                    yield self._event(path, data)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if not ended:
            raise EngineError(f"{path} of the {self._name} server broke off its stream")

    async def tell(self, path: str, body: Json) -> None:
        """Send what needs no answer, and is no loss where it does not arrive."""
        with contextlib.suppress(httpx.HTTPError):
            await self.client.post(self._base_url + path, json=body, timeout=5.0)

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()

    async def _request(
        self, method: str, path: str, body: Json | None, headers: Mapping[str, str]
    ) -> Json:
        try:
            response = await self.client.request(
                method, self._base_url + path, json=body, headers=headers
            )
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code >= 400:
            raise self._refusal(response)
        return self._object(path, response.text)

    def _event(self, path: str, data: str) -> Json:
        value = self._object(path, data)
        if value.get("error") is not None:
            raise self._error(502, _said(value) or data[:400])
        return value

    def _object(self, path: str, text: str) -> Json:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise EngineError(f"{path} of the {self._name} server: {error}") from error
        if not isinstance(value, dict):
            raise EngineError(
                f"{path} of the {self._name} server gave no object: {value!r}"
            )
        return value

    def _unreachable(self, error: httpx.HTTPError) -> EngineError:
        return EngineError(
            f"the {self._name} server at {self._base_url} cannot be reached: "
            f"{type(error).__name__}: {error}"
        )

    def _refusal(self, response: httpx.Response) -> EngineError:
        """The error of an answer with a status of 400 and above."""
        try:
            said = _said(response.json())
        except ValueError:
            said = None
        return self._error(response.status_code, said or response.text[:400])

    def _error(self, status: int, said: str) -> EngineError:
        # a request at fault is the client's business, all else is not
        told = {400: 400, 413: 400, 422: 400, 429: 503, 503: 503}.get(status, 502)
        return EngineError(f"the {self._name} server answered {status}: {said}", told)


def _said(value: object) -> str | None:
    """What an error's body says, in the words of its server."""
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None
