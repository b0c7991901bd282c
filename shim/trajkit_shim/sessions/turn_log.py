"""The turn log: Arrow IPC streams that grow by one batch per turn.

A turn is handed to the operating system before its reply is sent, so a killed gateway
loses no turn that a client has seen. A kill can leave a torn last batch, of a turn that
was never acknowledged. Whether an answer arrived is written to a second stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import schema
from trajkit_shim.chat.request import LoggedMessage
from trajkit_shim.engines.base import WeightSpan
from trajkit_shim.engines.payloads import EXPERTS, MASK, experts_cell, mask_cell
from trajkit_shim.json_input import Json
from trajkit_shim.sessions.append_log import AppendLog

LogForm: TypeAlias = Literal["full", "delta"]
"""Whether the log holds full prompts, or only what each adds to an earlier turn."""

# which message each prompt token belongs to
_SHOWN = schema.ATTRIBUTION.names[2:]
_TYPES: dict[object, pa.DataType] = {
    str: pa.string(),
    str | None: pa.string(),
    int | None: pa.int32(),
    bytes | None: pa.binary(16),
    datetime: pa.timestamp("us", tz="UTC"),
}


@dataclass(kw_only=True)
class Provenance:
    """Where a turn comes from: the gateway's columns of the log, in their order."""

    request_id: str  # the id of the engine call
    # request_id of the session's first turn with an identical request; null: none
    resend_of: str | None = None
    model: str
    protocol: str | None = None  # protocol of the client
    # who called, and what for (client_identity); null: unknown
    harness: str | None = None
    agent_id: str | None = None
    parent_agent_id: str | None = None
    call_kind: str | None = None
    # key of the tools that the request offers (trajkit.turns.tools_key)
    tools_key: str | None = None
    # the turn and the id of the tool call that started the agent of a conversation's
    # first turn (`Conversation.started_by`); null: none, or unknown
    started_by_turn: int | None = None
    started_by_call: str | None = None
    sampling: str  # parameters of the engine call, as JSON
    # append or render; and why it was rendered (prompting.prompts.Reason)
    prompt_built: str | None = None
    render_reason: str | None = None
    # BLAKE2b of prompt_ids as little-endian int32
    prompt_digest: bytes | None = None
    # prompt tokens taken from the engine's prefix cache
    cached_tokens: int | None
    # when the request was read, and when the sample was complete
    started_at: datetime
    ended_at: datetime


_PROVENANCE = [
    *map(schema.ATTRIBUTION.field, _SHOWN),
    *(pa.field(column.name, _TYPES[column.type]) for column in fields(Provenance)),
]

LOG_SCHEMA, DELTA_LOG_SCHEMA = (
    pa.schema([*turns, *_PROVENANCE], metadata=turns.metadata)
    for turns in (schema.TURNS, schema.TURNS_DELTA)
)
"""``turns`` in either form, with the gateway's provenance columns."""

SESSION_LINES = pa.schema(
    [
        *schema.SESSIONS,
        # finish, close, drop, idle or shutdown; null: it is open
        pa.field("ended_by", pa.string()),
        # recorded turns, and tokens of their prompts and outputs
        pa.field("turns", pa.int32()),
        pa.field("prompt_tokens", pa.int64()),
        pa.field("output_tokens", pa.int64()),
        # given when it was opened and finished, as JSON
        pa.field("metadata", pa.string()),
        # what of its requests had no effect, and how often, as JSON
        pa.field("ignored", pa.string()),
        pa.field("written_at", pa.timestamp("us", tz="UTC")),
    ],
    metadata=schema.SESSIONS.metadata,
)
"""``sessions``, with the gateway's columns. A session has one line for its opening and
one for each end or later update; the last line counts."""


@dataclass(kw_only=True)
class LoggedTurn(Provenance):
    """One model call, complete except for its index in the session."""

    session_id: str
    prompt_ids: npt.NDArray[np.int32]
    output_ids: npt.NDArray[np.int32]
    output_logprobs: npt.NDArray[np.float32] | None
    finish_reason: str | None
    messages: list[LoggedMessage]
    response: LoggedMessage | None  # None: no client will send it back
    # for the delta form: an earlier turn (None: none), and how many ids and messages it
    # shares with that turn (`trajkit.schema.DELTA_FIELDS`)
    delta: tuple[int | None, int, int] = (None, 0, 0)
    use_tool: bool
    ill_formed: bool
    trainable: bool
    weight_versions: tuple[WeightSpan, ...]
    # the columns of schema.ATTRIBUTION. None: unknown, or not requested. The index has an
    # element for each of the prompt's last tokens; turns that the prompt extends have
    # those of the tokens before
    prompt_message_index: npt.NDArray[np.int32] | None = None
    message_tool_names: list[str | None] | None = None
    # as in `Sample`
    routed_experts: npt.NDArray[np.int16] | None = None
    sampling_mask: Sequence[Sequence[int]] | None = None
    mm_items: list[Json] | None = None  # the images of the prompt


class TurnLog:
    """The log of one run: its turns, and what becomes known of them later.

    ``turns-*.arrows`` hold one turn per batch, ``amendments-*.arrows`` what became known
    after a turn was written (`trajkit.schema.AMENDMENTS`), ``sessions-*.arrows`` the
    sessions (`SESSION_LINES`). `trajkit.read_turns` and `trajkit.read_sessions` read the
    directory.

    The directory must not contain a log, because session ids and turn numbers of two
    gateways would collide (`FileExistsError`). ``form``: ``delta`` stores only what each
    prompt adds to an earlier turn of its session. ``fsync``: also write each
    turn to disk, so that it survives a crash of the machine; all calls wait for it.
    ``max_file_bytes`` limits one file, ``max_total_bytes`` all files of turns.
    ``routed_experts`` and ``sampling_masks`` add the columns of `engines.payloads`,
    ``attributed`` those of `trajkit.schema.ATTRIBUTION` (columns of nulls would take
    0.4 kB per turn), and ``images`` is for a model that takes images. ``worker`` is in the
    names of the files, for several logs in one directory.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        form: LogForm = "full",
        fsync: bool = False,
        max_file_bytes: int | None = 1 << 30,
        max_total_bytes: int | None = None,
        routed_experts: bool = False,
        sampling_masks: bool = False,
        attributed: bool = True,
        images: bool = False,
        worker: int | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.fsync = fsync
        self.images = images
        self._form = form
        columns = LOG_SCHEMA if form == "full" else DELTA_LOG_SCHEMA
        # columns that the log does not have, and the option that left them out
        self._left_out = {} if images else {"mm_items": "images=False"}
        if not attributed:
            self._left_out |= dict.fromkeys(_SHOWN, "attributed=False")
        kept = [field for field in columns if field.name not in self._left_out]
        self._columns = pa.struct(kept)
        for payload, option, logged in (
            (EXPERTS, "routed_experts", routed_experts),
            (MASK, "sampling_masks", sampling_masks),
        ):
            if logged:
                kept.append(payload)
            else:
                self._left_out[payload.name] = f"{option}=False"
        self._schema = pa.schema(kept, columns.metadata)
        new_log = partial(
            AppendLog, self.directory, fsync=fsync, max_file_bytes=max_file_bytes
        )
        end = "" if worker is None else f"-{worker}"
        limit = max_total_bytes
        self._turns = new_log(f"turns{end}", self._schema, max_total_bytes=limit)
        self._amendments = new_log(f"amendments{end}", schema.AMENDMENTS)
        self._sessions = new_log(f"sessions{end}", SESSION_LINES)
        self._turns.start()
        self.path = self._turns.path_of(0)

    @property
    def full(self) -> bool:
        """Whether no further turn can be written."""
        return self._turns.total_bytes >= self._turns.max_total_bytes

    def append(self, turn: LoggedTurn, turn_index: int, bodies: set[bytes]) -> None:
        """Write one turn; on return the operating system has it.

        ``bodies``: keys of the messages of the session whose bodies the log has; those of
        the turn are added. Raises as `AppendLog.append`.
        """
        for name, option in self._left_out.items():
            if getattr(turn, name, None) is not None:
                raise ValueError(f"the log was opened with {option}: it has no {name}")
        new = set[bytes]()

        def fields_of(message: LoggedMessage) -> dict[str, object]:
            known = message.key in bodies or message.key in new
            new.add(message.key)
            body = None if known else message.body
            return {"key": message.key, "role": message.role, "body": body}

        base_turn, n_ids, n_messages = None, 0, 0
        if self._form == "delta":
            base_turn, n_ids, n_messages = turn.delta
        ids = turn.prompt_ids[n_ids:]
        messages = [*map(fields_of, turn.messages[n_messages:])]
        # with columns of both forms, of which the log has one
        row = {
            **vars(turn),
            **_attribution(turn, n_ids),
            "turn_index": turn_index,
            "base_turn": base_turn,
            "shared_length": n_ids,
            "shared_messages": n_messages,
            "prompt_ids": ids,
            "suffix_ids": ids,
            "messages": messages,
            "suffix_messages": messages,
            "response": None if turn.response is None else fields_of(turn.response),
            "weight_versions": [*map(asdict, turn.weight_versions)] or None,
        }
        # converting all values together takes less time than one by one
        columns = pa.array([row], self._columns).flatten()
        if EXPERTS.name not in self._left_out:
            columns.append(experts_cell(turn.routed_experts))
        if MASK.name not in self._left_out:
            columns.append(mask_cell(turn.sampling_mask))
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self._turns.append(batch.serialize())
        bodies |= new

    def amend(
        self, session_id: str, turns: Sequence[int], reason: str, trainable: bool | None
    ) -> None:
        """Write what became known of turns: `trajkit.schema.AMENDMENTS`."""
        names = schema.AMENDMENTS.names
        rows = ((session_id, turn, reason, trainable) for turn in turns)
        lines = [dict(zip(names, row, strict=True)) for row in rows]
        batch = pa.RecordBatch.from_pylist(lines, schema.AMENDMENTS)
        self._amendments.append(batch.serialize())

    def write_session(self, line: Mapping[str, object]) -> None:
        batch = pa.RecordBatch.from_pylist([line], SESSION_LINES)
        self._sessions.append(batch.serialize())

    def close(self) -> None:
        for log in (self._turns, self._amendments, self._sessions):
            log.close()


def _attribution(turn: LoggedTurn, n_shared: int) -> dict[str, object]:
    """The columns of a turn with an element per token.

    The first ``n_shared`` tokens are left out if they have no message.
    """
    index = turn.prompt_message_index
    if index is None:
        return {}
    n_earlier = len(turn.prompt_ids) - len(index)
    if (index[: max(0, n_shared - n_earlier)] >= 0).any():
        n_shared = 0
    earlier = np.full(max(0, n_earlier - n_shared), -1, np.int32)
    index = np.concatenate([earlier, index[max(0, n_shared - n_earlier) :]])
    return {"prompt_message_index": index, "prompt_is_content": index >= 0}
