"""The gateway as a rollout sees it: sessions are opened and closed, nothing else."""

from collections.abc import Mapping
from typing import Any, Self

import httpx

# opening and closing take no time; a gateway under load may
_TIMEOUT_SECONDS = 60.0


class Gateway:
    """A gateway that listens.

    Parameters
    ----------
    url : str
        Its base URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        # no proxy of the environment stands between the two
        self._client = httpx.Client(
            base_url=url, timeout=_TIMEOUT_SECONDS, trust_env=False
        )

    def model(self) -> str:
        """The name of its model.

        Raises
        ------
        httpx.HTTPError
        """
        name: str = self._asked("GET", "/v1/models")["data"][0]["id"]
        return name

    def open(
        self, session_id: str, max_turns: int | None, metadata: Mapping[str, object]
    ) -> str:
        """Open a session; its API key.

        Raises
        ------
        httpx.HTTPError
        """
        body: dict[str, object] = {"session_id": session_id, "metadata": metadata}
        if max_turns is not None:
            body["max_turns"] = max_turns
        key: str = self._asked("POST", "/sessions", body)["api_key"]
        return key

    def close(self, session_id: str) -> int:
        """Close a session, so that it records no further turn; the turns it answered.

        Raises
        ------
        httpx.HTTPError
        """
        answered: int = self._asked("DELETE", f"/sessions/{session_id}")["answered"]
        return answered

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def _asked(self, method: str, path: str, body: object = None) -> Any:
        answer = self._client.request(method, path, json=body)
        answer.raise_for_status()
        return answer.json()
