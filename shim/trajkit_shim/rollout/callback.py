"""Notifies a trainer of each finished rollout."""

import time
from contextlib import suppress
from dataclasses import asdict

import httpx

from trajkit_shim.rollout.run_log import Rollout

_TIMEOUT_SECONDS = 10.0
_PAUSES_SECONDS = (0.5, 2.0, 0.0)


class Callback:
    """Posts each rollout to a URL, at most three times.

    Failed posts are counted; the ``sessions`` table still has the rollout. An invalid
    URL raises `ValueError`.
    """

    def __init__(self, url: str) -> None:
        try:
            self._url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"{url!r}: {error}") from error
        self._client = httpx.Client(timeout=_TIMEOUT_SECONDS, trust_env=False)
        self.missed = 0

    def __call__(self, rollout: Rollout) -> None:
        """Send one."""
        for pause in _PAUSES_SECONDS:
            with suppress(httpx.HTTPError):
                answer = self._client.post(self._url, json=asdict(rollout))
                if answer.is_success:
                    return
            time.sleep(pause)
        self.missed += 1
