"""Client of the gateway for a rollout: opens and closes sessions."""

from collections.abc import Mapping
from typing import Any, Self

import httpx

# opening and closing are fast, but the gateway may be under load
_TIMEOUT_SECONDS = 60.0


class Gateway:
    """A running gateway, by its base URL. All methods may raise `httpx.HTTPError`."""

    def __init__(self, url: str) -> None:
        self.url = url
        # ignores proxies of the environment
        self._client = httpx.Client(
            base_url=url, timeout=_TIMEOUT_SECONDS, trust_env=False
        )

    def model(self) -> str:
        """Return the name of its model."""
        name: str = self._request("GET", "/v1/models")["data"][0]["id"]
        return name

    def open(
        self, session_id: str, max_turns: int | None, metadata: Mapping[str, object]
    ) -> str:
        """Open a session and return its API key."""
        body: dict[str, object] = {"session_id": session_id, "metadata": metadata}
        if max_turns is not None:
            body["max_turns"] = max_turns
        key: str = self._request("POST", "/sessions", body)["api_key"]
        return key

    def close(self, session_id: str) -> int:
        """Close a session; return the number of turns it answered."""
        answered: int = self._request("DELETE", f"/sessions/{session_id}")["answered"]
        return answered

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def _request(self, method: str, path: str, body: object = None) -> Any:
        answer = self._client.request(method, path, json=body)
        answer.raise_for_status()
        return answer.json()
