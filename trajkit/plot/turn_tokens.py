"""The tokens of each turn of a session, by role and by what a policy does with them."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit.analysis.drift import classify_drift
from trajkit.analysis.sampled_tokens import output_spans
from trajkit.analysis.words import OUTPUTS, ROLES
from trajkit.errors import UnknownSessionError
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.rows.links import link
from trajkit.tables.canonical import TableLike, as_table
from trajkit.tables.take import take_session
from trajkit.turns.attribution import SessionCalls
from trajkit.turns.records import as_turns
from trajkit.turns.sessions import Sessions

_ROLE_NAMES = [*ROLES]
_OTHER, _ASSISTANT = _ROLE_NAMES.index("other"), _ROLE_NAMES.index("assistant")
_SYNONYMS = {"developer": "system", "function": "tool"}


@dataclass(frozen=True, slots=True)
class SessionTokens:
    """Counts per turn of a session; each array has shape (n_turns,)."""

    session_id: str
    policy: str
    turns: list[int]
    roles: dict[str, npt.NDArray[Any]]
    kinds: dict[str, npt.NDArray[Any]]


def session_tokens(
    turns: TableLike, policy: str | Policy, session_id: str | None
) -> SessionTokens:
    """Count the prompt tokens of each role and the output tokens of each kind."""
    chosen = named_policy(policy)
    session_id, session = one_session(turns, session_id)
    indices = session["turn_index"].to_pylist()
    kinds = {kind: np.zeros(len(indices), np.int64) for kind in OUTPUTS}
    # as sets, because a policy may train a token twice
    covered: dict[tuple[str, int], set[int]] = {}
    for span in output_spans(session, chosen).to_pylist():
        tokens = covered.setdefault((span["kind"], span["turn_index"]), set())
        tokens.update(range(span["output_start"], span["output_stop"]))
    for (kind, turn), tokens in covered.items():
        kinds[kind][indices.index(turn)] = len(tokens)
    roles = _roles(session, chosen, indices)
    return SessionTokens(session_id, chosen.name, indices, roles, kinds)


def one_session(turns: TableLike, session_id: str | None) -> tuple[str, pa.Table]:
    """A session's turns; by default of the session with the most, the first on ties."""
    table = as_turns(as_table(turns))
    for name, _ in Counter(table["session_id"].to_pylist()).most_common(1):
        session_id = name if session_id is None else session_id
    if session_id is None:
        raise UnknownSessionError("there are no turns, so there is no session to draw")
    return session_id, take_session(table, session_id)


def _roles(
    session: pa.Table, policy: Policy, indices: list[int]
) -> dict[str, npt.NDArray[np.int64]]:
    """Prompt tokens of each turn by role.

    A token without attribution has the role that it has in the parent's path, as far as
    the prompt repeats that path.
    """
    calls = Sessions.of(session)
    attributed = SessionCalls(calls)
    parents = {
        line["turn_index"]: (indices.index(line["parent"]), line["lcp"])
        for line in classify_drift(session, link(session, policy)).to_pylist()
        # under the policy nemo a parent may come later
        if line["parent"] < line["turn_index"]
    }
    counts = np.zeros((len(ROLES), len(indices)), np.int64)
    paths: list[npt.NDArray[np.int8]] = []
    for call, turn in enumerate(indices):
        n_prompt = int(attributed.n_prompt[call])
        path = np.full(attributed.path_len[call], _OTHER, np.int8)
        path[n_prompt:] = _ASSISTANT
        if turn in parents:
            parent, lcp = parents[turn]
            path[:lcp] = paths[parent][:lcp]
        rendered, messages = attributed.rendered(call), attributed.messages(call)
        if rendered is not None and messages is not None:
            codes = np.array(
                [_role(name) for name in messages.roles[rendered.first :]], np.int8
            )
            known = (rendered.message >= 0) & (rendered.message < len(codes))
            path[:n_prompt][known] = codes[rendered.message[known]]
        paths.append(path)
        counts[:, call] = np.bincount(path[:n_prompt], minlength=len(ROLES))
    return dict(zip(_ROLE_NAMES, counts, strict=True))


def _role(name: str) -> int:
    name = _SYNONYMS.get(name, name)
    return _ROLE_NAMES.index(name) if name in ROLES else _OTHER
