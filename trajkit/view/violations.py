"""What `trajkit.verify` finds in rows, with the tokens around each violation."""

from collections import Counter
from typing import Any

import pyarrow as pa

from trajkit.policies import Policy
from trajkit.tables.take import tuples
from trajkit.verification.run import verify

# tokens shown before and after the first wrong one
_AROUND = 8
# of one session
_MOST = 200


class Violations:
    """The violations of rows of these turns, by session; see `trajkit.verify`."""

    def __init__(
        self,
        rows: pa.Table,
        turns: pa.Table,
        policy: Policy | None = None,
        sessions: pa.Table | None = None,
    ) -> None:
        self._lines = verify(rows, turns, policy, sessions=sessions).to_pylist()
        self._by_session: dict[str | None, list[dict[str, Any]]] = {}
        for line in self._lines:
            self._by_session.setdefault(line["session_id"], []).append(line)
        self._rows = rows
        self._line_of: dict[tuple[str, int], int] = {}
        # rows of another system may have no ids; their tokens are not shown then
        if {"session_id", "row_index"} <= set(rows.column_names):
            keys = enumerate(tuples(rows, "session_id", "row_index"))
            self._line_of = {(session, row): k for k, (session, row) in keys}

    def rules(self) -> list[tuple[str, int]]:
        """Each rule that is broken and how often, the most frequent first."""
        return Counter(line["rule"] for line in self._lines).most_common()

    def count(self, session_id: str) -> int:
        """The number of violations of a session."""
        return len(self._by_session.get(session_id, ()))

    def of(self, session_id: str) -> list[dict[str, Any]]:
        """The first violations of a session, each with the row's tokens around it."""
        found = self._by_session.get(session_id, [])[:_MOST]
        return [{**line, **self._tokens(line)} for line in found]

    def _tokens(self, line: dict[str, Any]) -> dict[str, Any]:
        """Ids and mask of the row around the first wrong token."""
        k = self._line_of.get((line["session_id"], line["row_index"]))
        if k is None:
            return {"ids": None}
        ids = self._rows["input_ids"][k].values
        mask = self._rows["loss_mask"][k].values
        # a mask may cover the response only
        before = len(ids) - len(mask)
        token = line["token"] or 0
        start, stop = max(token - _AROUND, 0), min(token + _AROUND + 1, len(ids))
        return {
            "start": start,
            "ids": ids.slice(start, stop - start).to_pylist(),
            "mask": [
                at >= before and bool(mask[at - before].as_py())
                for at in range(start, stop)
            ],
        }
