"""The formats, each a table: how it is recognised, and where its calls have what."""

from collections.abc import Callable, Iterator

import numpy as np

from trajkit.errors import FormatError, InvalidTurnsError
from trajkit.files.json_numbers import EACH, IDS
from trajkit.importers.calls import Format, is_answer
from trajkit.importers.containers import (
    Head,
    Refused,
    Value,
    is_array,
    list_of,
    number_of,
    object_of,
    text_of,
    unless_empty,
)
from trajkit.turns.mapping import read_map, route
from trajkit.turns.records import from_records

# how engines give token ids
_ENGINES = (
    "record the engine's responses to requests with return_token_ids and logprobs (vLLM), "
    "or with return_token_ids, return_prompt_token_ids, return_meta_info and logprobs "
    "(SGLang); `trajkit serve` asks for them itself"
)
_PROMPT = (
    "prompt_token_ids|prompt_ids|input_token_ids|prompt_tokens|input_ids|input_tokens"
)
_OUTPUT = (
    "output_token_ids|completion_token_ids|response_token_ids|generation_token_ids|"
    "generated_token_ids|token_ids|output_ids|completion_ids|response_ids|output_tokens|"
    "completion_tokens|response_tokens"
)
_LOGPROBS = (
    "output_logprobs|completion_logprobs|response_logprobs|generation_log_probs|"
    "output_token_logprobs|rollout_log_probs|token_logprobs|logprobs|log_probs|"
    "old_log_probs|logprob"
)
_MASK = (
    "output_mask|response_mask|completion_mask|action_mask|loss_mask|env_mask|tool_mask"
)
_NOT_CHAT = ("response", "nodes", "trajectory", "trace_id", "choices", "steps")
_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant"), "assistant"),
    "tool": "tool",
}
# trajectories within trajectories
_MOST_DEEP = 32


# keys that Polar writes instead of a field larger than a mebibyte
_CUT = {"__truncated", "_truncated_keys_omitted"}


def _polar(record: Value) -> Value:
    pending: list[object] = [dict.fromkeys(record)]
    pending += map(record.get, ("transformed_request", "request", "response"))
    while pending:
        within = pending.pop()
        if not _CUT.isdisjoint(object_of(within)):
            raise Refused("truncated", "Polar truncates fields larger than a mebibyte")
        pending += object_of(within).values() or list_of(within)
    return record


# TOKEN_ENTRY_RECORD_SCHEMA_VERSION; a newer version may have other meanings
_NEWEST_GYM = 5


def _gym(record: Value) -> Value:
    version = record.get("schema_version", _NEWEST_GYM)
    if type(version) is not int or not 1 <= version <= _NEWEST_GYM:
        text = f"schema_version {version}: expected 1 to {_NEWEST_GYM}"
        raise Refused("other_version", text)
    if "staging_key" in record:
        text = "its token ids are in another store (staging_key)"
        raise Refused("no_prompt_ids", text)
    if record.get("prompt_is_delta") is not True:
        return record
    return {**record, "prompt_token_ids": None, "delta": record.get("prompt_token_ids")}


# finish reason by Sample.Status of slime
_STATUS = {"completed": "stop", "truncated": "length", "aborted": "abort"}


def _slime(record: Value) -> Value:
    tokens, length = record.get("tokens"), record.get("response_length")
    if not isinstance(tokens, list | np.ndarray):
        raise Refused("no_prompt_ids", "no tokens")
    if type(length) is not int or not 0 <= length <= len(tokens):
        text = f"response_length {length!r} of {len(tokens)} tokens"
        raise Refused("unreadable", text)
    return {
        **record,
        "prompt_ids": tokens[: len(tokens) - length],
        "output_ids": tokens[len(tokens) - length :],
        "finish_reason": _STATUS.get(str(record.get("status"))),
        "trainable": False if record.get("remove_sample") is True else None,
    }


def _atif(record: Value) -> Value | None:
    if record.get("is_copied_context") is True:
        raise Refused("copied", "it was copied from an earlier trajectory")
    calls = record.get("llm_call_count", 1)
    if type(calls) is int and calls > 1:
        raise Refused("unreadable", f"it sums up {calls} calls (llm_call_count)")
    return None if type(calls) is int and calls == 0 else record


def _atif_roots(root: Value, depth: int = 0) -> Iterator[tuple[str, Value]]:
    """A trajectory and the trajectories of its sub-agents, as of one session."""
    yield "", root
    session = root.get("session_id") or root.get("trajectory_id")
    within = list_of(root.get("subagent_trajectories")) if depth < _MOST_DEEP else []
    for k, below in enumerate(map(object_of, within)):
        agent = below.get("trajectory_id") or object_of(below.get("agent")).get("name")
        own = {"session_id": below.get("session_id") or session, "@agent": agent}
        for where, one in _atif_roots({**below, **own}, depth + 1):
            yield f", subagent {k}{where}", one


_USAGE = {
    name: route(f"attributes.gen_ai.usage.{name}")
    for name in ("input_tokens", "output_tokens", "prompt_tokens", "completion_tokens")
}
_OPERATION = route("attributes.gen_ai.operation.name")


def _span(record: Value) -> Value | None:
    """A span of a model's call; None for any other."""
    named = record.get("attributes")
    names = [object_of(one).get("key") for one in list_of(named)] or object_of(named)
    marks = ("gen_ai." in str(name)[:7] or "token_ids" in str(name) for name in names)
    others = ("execute_tool", "invoke_agent", "create_agent")
    if not any(marks) or _OPERATION.find(record) in others:
        return None
    return {**record, "usage": {name: one.find(record) for name, one in _USAGE.items()}}


# per sampled token of a node, by the orchestrator and the trainer
_TRAINER = (
    *("advantages", "reference_logprobs", "trainer_logprobs", "entropies"),
    *("loss_weights", "routed_experts", "sampling_mask", "kept_tokens"),
    "multi_modal_data",
)
_NO_IDS = np.empty(0, np.int32)


def _nodes(trace: Value) -> Iterator[tuple[str, Value]]:
    """The calls of a trace of verifiers or prime-rl, a graph of messages.

    A node has a message and the ids that it adds. A sampled node is a call, and the ids on
    the path to it are its prompt.
    """
    if not isinstance(trace.get("nodes"), list):
        refused = "unreadable", "its nodes are not a list"
        yield "", {"session_id": None, "@refused": refused}
    agent, task = object_of(trace.get("agent")), object_of(trace.get("task"))
    reward, remarks = _sum_of(object_of(trace.get("rewards")))
    common = {
        "session_id": text_of(trace.get("id")),
        "agent_id": text_of(agent.get("name")),
        "group_id": text_of(task.get("key")) or text_of(task.get("hash")),
        "trainable": False if agent.get("trainable") is False else None,
        "reward": reward,
        "@remarks": remarks,
    }
    # once for the trace
    unread = {"trace.errors": True} if trace.get("errors") else {}
    nodes = list(map(object_of, list_of(trace.get("nodes"))))
    recorded = map(object_of, list_of(trace.get("calls")))
    of_node = {call["node"]: call for call in recorded if type(call.get("node")) is int}
    # ids on the path to each node, including it; None if they are unknown
    paths: list[np.ndarray | None] = []
    for k, node in enumerate(nodes):
        above = _above(nodes, k)
        before = paths[above[0]] if above else None
        before = _NO_IDS if node.get("parent") is None else before
        given = unless_empty(node.get("token_ids"))
        ids = _NO_IDS if given is None else given
        # the ids of a reply without ids cannot be known
        reply = object_of(node.get("message")).get("role") == "assistant"
        known = before is not None and isinstance(ids, np.ndarray)
        known = known and (len(ids) > 0 or not reply)
        paths.append(np.concatenate([before, ids]) if known else None)
        if node.get("sampled") is not True:
            continue
        unread |= {f"nodes.{name}": True for name in _TRAINER if node.get(name)}
        call = of_node.get(k, {})
        time = object_of(call.get("time"))
        # a root has the tools of its requests, from 0.4.0 on
        tools = nodes[above[-1] if above else k].get("tools")
        values = {
            **common,
            "prompt_messages": [nodes[at].get("message") for at in reversed(above)],
            "response_message": node.get("message"),
            "finish_reason": call.get("finish_reason") or node.get("finish_reason"),
            "model": call.get("model"),
            "started_at": time.get("start"),
            "ended_at": time.get("end"),
            "tools": trace.get("tools") if tools is None else tools,
            "usage": _all_prompt(object_of(call.get("usage"))),
            "@unread": unread,
        }
        try:
            values |= _of_node(node, before, ids)
        except Refused as refused:
            values["@refused"] = refused.args
        unread = {}
        yield f", node {k}", values


def _above(nodes: list[Value], k: int) -> list[int]:
    found = []
    at = nodes[k].get("parent")
    while isinstance(at, int) and 0 <= at < k:
        found.append(at)
        k, at = at, nodes[at].get("parent")
    return found


def _of_node(node: Value, before: np.ndarray | None, ids: object) -> Value:
    """Prompt, output and logprobs; the node's mask marks sampled ids."""
    if not isinstance(ids, np.ndarray):
        raise Refused("unreadable", "token_ids are not ids")
    if before is None:
        raise Refused("no_prompt_ids", "a message before it has no ids")
    listed = list_of(node.get("mask"))
    if not all(isinstance(flag, int) for flag in listed):
        raise Refused("unreadable", "a mask that is not of booleans")
    if len(listed) != len(ids):
        text = f"a mask of {len(listed)} for {len(ids)} token_ids"
        raise Refused("unreadable", text)
    start = len(ids) - sum(map(bool, listed))
    if not all(listed[start:]):
        text = "its sampled ids are not at the end of its token_ids"
        raise Refused("unreadable", text)
    return {
        "prompt_ids": np.concatenate([before, ids[:start]]),
        "output_ids": ids[start:] if start < len(ids) else None,
        "output_logprobs": node.get("logprobs"),
    }


def _all_prompt(usage: Value) -> Value:
    """The usage of a call, whose prompt_tokens lack those that were cached."""
    counts = [usage.get("prompt_tokens"), usage.get("cached_input_tokens") or 0]
    if not all(type(count) is int for count in counts):
        return usage
    return {**usage, "prompt_tokens": sum(counts)}


def _sum_of(rewards: Value) -> tuple[float | None, list[tuple[str, str]]]:
    """The sum of a trace's weighted rewards; None, and a remark, if one is missing."""
    total = 0.0
    for name, reward in rewards.items():
        # earlier versions have the weighted number
        parts = reward if isinstance(reward, dict) else {"score": reward}
        score = number_of(parts.get("score"))
        weight = number_of(parts.get("weight", 1.0))
        if score is None or weight is None:
            text = f"rewards.{name} is {reward!r}: expected a score and a weight"
            return None, [("reward_unread", text)]
        total += score * weight
    return total if rewards else None, []


def _talk_at(*names: str) -> Callable[[Value], object]:
    """The messages under the first of the keys that an object has, in OpenAI's form."""

    def messages(root: Value) -> object:
        listed = next((root[name] for name in names if name in root), None)
        if not isinstance(listed, list):
            text = f"its messages are a {type(listed).__name__}, not a list"
            raise Refused("unreadable", text)
        return [_message(k, one) for k, one in enumerate(listed)]

    return messages


def _message(k: int, one: object) -> Value:
    if not isinstance(one, dict):
        text = f"message {k} is a {type(one).__name__}, not an object"
        raise Refused("unreadable", text)
    if "from" in one and "role" not in one:
        role = _ROLES.get(str(one["from"]))
        if role is None:
            text = f"message {k} is from {one['from']!r}: expected one of "
            raise Refused("unreadable", text + ", ".join(_ROLES))
        return {"role": role, "content": one.get("value")}
    if not isinstance(one.get("role"), str):
        raise Refused("unreadable", f"message {k} has no role")
    return one


def _within(prefixes: str, paths: str) -> str:
    below = paths.split("|")
    return "|".join(f"{at}{path}" for at in prefixes.split("|") for path in below)


def _has_ids(value: Value) -> bool:
    return all(is_array(route(paths).find(value)) for paths in (_PROMPT, _OUTPUT))


_SESSION = "session_id|metadata.session_id"

_ALL = (
    Format(
        "openai",
        "a log of requests with the responses of vLLM, SGLang or a server like them",
        keys=("request response", "request_body response_body"),
        test=lambda value: "completion_id" not in value,
        map=f"""
            session_id={_within("|request.|request.body.|request_body.", _SESSION)},
            request=request.body|request|request_body.body|request_body,
            response=response.body|response|response_body.body|response_body""",
        ids=_ENGINES,
    ),
    Format(
        "polar",
        "Polar's completions",
        keys=("completion_id", "session_id completions"),
        # its timestamp is of the complete response
        map="""each=completions, session_id=session_id|/session_id,
            request=transformed_request|request, response=response,
            request_id=completion_id, started_at=started_at, ended_at=timestamp""",
        order="timestamp+completion_id",
        prepare=_polar,
        # the agent received only the first choice
        most_choices=1,
        ids=_ENGINES,
    ),
    Format(
        "nemo",
        "NeMo Gym's token captures",
        keys=("rollout_id model_call_id",),
        map="""session_id=rollout_id, request_id=model_call_id, model=model,
            prompt_ids=prompt_token_ids, output_ids=generation_token_ids,
            output_logprobs=generation_log_probs, started_at=created_at,
            parent=parent_call_id, parent_resolution=parent_resolution,
            delta_ids=delta""",
        prepare=_gym,
        knows=("schema_version", "fingerprint_version", "parent_resolution_reason"),
    ),
    Format(
        "rllm",
        "traces of rLLM's gateway",
        keys=("trace_id completion_token_ids",),
        # its timestamp is of the complete response
        map="""session_id=session_id, request_id=trace_id, model=model,
            prompt_ids=prompt_token_ids, output_ids=completion_token_ids,
            output_logprobs=logprobs, finish_reason=finish_reason,
            prompt_messages=messages, response_message=response_message,
            weight_version=weight_version, usage=raw_response.usage,
            started_at=started_at, ended_at=timestamp,
            parent=parent_trace_id, delta_ids=prompt_delta_token_ids""",
        # a trace without ids has an empty list
        prepare=lambda record: {
            **record,
            "completion_token_ids": unless_empty(record.get("completion_token_ids")),
        },
    ),
    Format(
        "verifiers",
        "traces of verifiers",
        keys=("nodes task",),
        calls=_nodes,
        arrays={"nodes": {EACH: {"token_ids": IDS}}},
        ids='verifiers records token ids for clients of type "renderer" or "train"; its '
        "evaluations through other endpoints have text only",
    ),
    Format(
        "slime",
        "a dump of slime's --save-debug-rollout-data",
        containers=("pickle",),
        map="""session_id=@session, prompt_ids=prompt_ids, output_ids=output_ids,
            output_logprobs=rollout_log_probs, output_mask=loss_mask,
            finish_reason=finish_reason, trainable=trainable,
            group_id=group_index|group_id, weight_versions=weight_versions""",
        prepare=_slime,
        knows=("index", "remove_sample", "response_length", "tokens", "label"),
    ),
    Format(
        "atif",
        "a trajectory of Harbor (ATIF)",
        keys=("schema_version steps",),
        test=lambda value: str(value["schema_version"]).startswith("ATIF"),
        roots=_atif_roots,
        map="""each=steps, only=source=agent, session_id=/session_id|/trajectory_id,
            agent_id=/@agent|/agent.name, model=model_name|/agent.model_name,
            prompt_ids=metrics.prompt_token_ids,
            output_ids=metrics.completion_token_ids, output_logprobs=metrics.logprobs,
            usage=metrics, reward=/extra.reward|/reward,
            started_at=started_at, ended_at=timestamp""",
        prepare=_atif,
        knows=("step_id", "schema_version"),
        ids="Harbor's agents write them with collect_rollout_details, from an engine that "
        "returns token ids",
    ),
    Format(
        "inspect",
        "an Inspect log",
        keys=("eval samples", "epoch events", "epoch messages"),
        containers=("inspect", "json"),
        unfold="samples",
        map="""each=events, only=event=model, session_id=/uuid|/id+/epoch, group_id=/id,
            agent_id=role, model=model, reward=/scores, request=call.request,
            response=call.response|output, started_at=timestamp, ended_at=completed""",
        talk=_talk_at("messages"),
        ids=f"with token ids only where the provider's raw response has them: {_ENGINES}",
    ),
    Format(
        "sweagent",
        "a trajectory of SWE-agent",
        keys=("trajectory history", "trajectory environment"),
        map="session_id=session_id|@name",
        talk=_talk_at("history"),
        ids=f"SWE-agent writes no token ids: {_ENGINES}",
    ),
    Format(
        "openhands",
        "events of OpenHands",
        keys=("source action", "source observation", "source kind timestamp"),
        ids="OpenHands' events have neither token ids nor the complete requests: import "
        f"its completion logs (log_completions) instead, and {_ENGINES}",
    ),
    Format(
        "verl",
        "a rollout dump of verl",
        keys=("input output score", "input output gts"),
        test=lambda value: isinstance(value["output"], str),
        ids="verl's rollout_data_dir has decoded text only: write the AgentLoopOutput of "
        "each trajectory (prompt_ids, response_ids, response_mask, response_logprobs) "
        "as JSON lines, which import as records",
    ),
    Format(
        "langfuse",
        "observations of Langfuse",
        keys=("traceId type input", "traceId type output", "observations"),
        map=f"""each=observations, only=type=GENERATION,
            session_id=sessionId|/sessionId|traceId, request_id=id, model=model,
            prompt_ids={_within("metadata.", _PROMPT)},
            output_ids={_within("metadata.", _OUTPUT)},
            output_logprobs={_within("metadata.", _LOGPROBS)},
            request=input, response=output, prompt_messages=input.messages|input,
            response_message=output, finish_reason=metadata.finish_reason, usage=usage,
            started_at=startTime, ended_at=endTime""",
        ids="Langfuse has them only in an observation's metadata (prompt_token_ids, "
        f"token_ids), or if its output is the engine's whole response: {_ENGINES}",
    ),
    Format(
        "otel",
        "spans of OpenTelemetry",
        keys=(
            "resourceSpans",
            "traceId spanId",
            "trace_id span_id",
            "context attributes kind",
        ),
        unfold="resourceSpans.*.scopeSpans.*.spans",
        map=f"""
            session_id=attributes.session.id|attributes.gen_ai.conversation.id|
            attributes.langfuse.session.id|rollout_id|traceId|trace_id|context.trace_id,
            agent_id=attributes.gen_ai.agent.id|attributes.gen_ai.agent.name,
            request_id=attributes.gen_ai.response.id|spanId|span_id|context.span_id,
            model=attributes.gen_ai.response.model|attributes.gen_ai.request.model,
            prompt_ids={_within("attributes.", f"{_PROMPT}|gen_ai.prompt_token_ids")},
            output_ids={_within("attributes.", f"{_OUTPUT}|gen_ai.token_ids")}|
            attributes.gen_ai.completion_token_ids|attributes.gen_ai.response_token_ids,
            output_logprobs={_within("attributes.", f"{_LOGPROBS}|gen_ai.logprobs")},
            finish_reason=attributes.gen_ai.response.finish_reasons.0,
            usage=usage, reward=attributes.reward""",
        prepare=_span,
        ids="the conventions of OpenTelemetry for gen_ai have no token ids: set the span's "
        f"attributes prompt_token_ids and response_token_ids, and {_ENGINES}",
    ),
    Format(
        "records",
        "records with token ids at their top",
        test=_has_ids,
        generic=True,
        needs_reply=True,
        map=f"""session_id={_SESSION}|extra.session_id, prompt_ids={_PROMPT},
            output_ids={_OUTPUT}, output_logprobs={_LOGPROBS}, output_mask={_MASK},
            prompt_messages=prompt_messages|messages,
            response_message=response_message|message|response|completion,
            finish_reason=finish_reason|stop_reason, weight_version=weight_version,
            weight_versions=weight_versions, model=model, request_id=request_id,
            usage=usage, turn_index=turn_index""",
        ids=_ENGINES,
    ),
    Format(
        "responses",
        "responses of vLLM or SGLang",
        keys=("choices", "output_ids meta_info", "input output", "messages response"),
        test=lambda value: is_answer(value.get("output", value.get("response", value))),
        generic=True,
        map=f"""request=input|@self, response=output|response|@self,
            prompt_messages=input.messages|input|messages,
            session_id={_within("|input.", _SESSION)},
            started_at=started_at|timestamp|created""",
        ids=_ENGINES,
    ),
    Format(
        "chat",
        "chat transcripts",
        keys=("messages", "conversations"),
        test=lambda value: not any(name in value for name in _NOT_CHAT),
        generic=True,
        map="session_id=session_id|id|conversation_id|uuid|uid|@name",
        talk=_talk_at("messages", "conversations"),
    ),
)

FORMATS: dict[str, Format] = {one.name: one for one in _ALL}
"""The formats by name."""


def fitting(head: Head) -> list[Format]:
    """The formats that a file seems to have; a generic one only if no other fits."""
    values = head.values or (None,)
    fits = [[one for one in _ALL if _fits(one, head, value)] for value in values]
    for several in fits:
        if found := [one for one in several if not one.generic]:
            return found
    every = [one for one in _ALL if any(one in several for several in fits)]
    return [] if _is_turn(values[0]) else every[:1]


def _fits(format: Format, head: Head, value: Value | None) -> bool:
    if head.container in ("pickle", "inspect"):
        return head.container in format.containers
    if value is None or head.container not in format.containers:
        return False
    has_keys = any(value.keys() >= {*names.split()} for names in format.keys or ("",))
    return has_keys and format.test(value)


_TURN = {"session_id", "prompt_ids", "output_ids"}


def _is_turn(value: Value | None) -> bool:
    if value is None or not _TURN <= value.keys():
        return False
    try:
        from_records([value])
    except InvalidTurnsError:
        return False
    return True


def unknown(head: Head) -> Exception:
    """The error of a file of no known format: what it has, and what would be right."""
    if head.trouble:
        return FormatError(head.trouble)
    if not any(head.values) and head.container in ("json", "rows"):
        return InvalidTurnsError(f"{head.name}: no calls, nothing to do")
    value = head.values[0]
    if _is_turn(value):
        return FormatError(f"{head.name} contains turns of trajkit: use read_turns")
    own = read_map(FORMATS["records"].map).fields
    lacks = [
        f"{name} ({', '.join(own[name].text.split('|')[:3])}, ...)"
        for name in ("prompt_ids", "output_ids")
        if own[name].find(value) is None
    ]
    near = (
        (len(value.keys() & {*keys} - {"session_id"}), -len(keys), one.name, keys)
        for one in _ALL
        for keys in map(str.split, one.keys)
    )
    n_same, _, like, keys = max(near, key=lambda each: each[:2])
    if n_same and len(lacks) == 2:
        lacks = [name for name in keys if name not in value]
    else:
        like = "records"
    reason = f"lacks {', '.join(lacks)}" if lacks else "has values of other kinds"
    return FormatError(
        f"{head.name} has an unknown format: its first record has the keys "
        f"{', '.join(value)}. It is most like {like} ({FORMATS[like].title}), but "
        f"{reason}. Name its fields, as in --map session_id=PATH,prompt_ids=PATH,"
        "output_ids=PATH, or request=PATH,response=PATH for whole responses of an engine "
        "(and each=PATH if the records are in a list of each object). Records without "
        "token ids allow only the import of text (--from chat with --tokenizer): "
        f"{_ENGINES}"
    )


def text_only(format: Format) -> str:
    """Why a format gives no turns without a tokenizer."""
    how = "pass a tokenizer with a chat template (--tokenizer) to import its text"
    ways = [how] if format.talk is not None else []
    ways += [format.ids] if format.ids else []
    return f"it is {format.title}, without token ids: {'; '.join(ways)}"
