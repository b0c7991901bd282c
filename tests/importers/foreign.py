"""Writers of the formats that `trajkit.importers` reads, for round trips.

Each takes the records of `trajkit.from_records`, calls of a session in order, and writes
files as the system's own code lays them out.
"""

import io
import json
import pickle
import zipfile
from pathlib import Path

import numpy as np

from tests.made_tables import by_session


def chat_response(record, *, ids_in="token_ids"):
    """vLLM's answer on the chat route."""
    output, given = record["output_ids"], record.get("output_logprobs")
    choice = {
        "index": 0,
        "message": record.get("response_message"),
        "finish_reason": record.get("finish_reason"),
    }
    if ids_in == "token_ids":
        choice["token_ids"] = output
    if given is not None:
        content = [
            {"token": f"token_id:{token}", "logprob": value}
            for token, value in zip(output, given, strict=True)
        ]
        choice["logprobs"] = {"content": content}
    answer = {"id": record.get("request_id"), "model": "m"}
    return {**answer, "prompt_token_ids": record["prompt_ids"], "choices": [choice]}


def completion_response(record):
    """vLLM's answer on the route of completions."""
    given = record.get("output_logprobs")
    choice = {
        "text": "",
        "prompt_token_ids": record["prompt_ids"],
        "token_ids": record["output_ids"],
        "finish_reason": record.get("finish_reason"),
    }
    if given is not None:
        choice["logprobs"] = {"tokens": ["a"] * len(given), "token_logprobs": given}
    return {"id": record.get("request_id"), "choices": [choice]}


def meta_info(record):
    """What SGLang says about an answer."""
    given = record.get("output_logprobs")
    meta = {"id": record.get("request_id"), "weight_version": "w"}
    if record.get("finish_reason") is not None:
        meta["finish_reason"] = {"type": record["finish_reason"]}
    if given is not None:
        meta["output_token_logprobs"] = [
            [value, token, None]
            for token, value in zip(record["output_ids"], given, strict=True)
        ]
    return meta


def sglang_chat_response(record):
    """SGLang's answer on the chat route."""
    choice = {
        "message": record.get("response_message"),
        "prompt_token_ids": record["prompt_ids"],
        "response_token_ids": record["output_ids"],
        "finish_reason": record.get("finish_reason"),
        "meta_info": meta_info(record),
    }
    return {"id": record.get("request_id"), "choices": [choice]}


def native_response(record):
    """SGLang's answer on its own route."""
    answer = {"id": record.get("request_id"), "text": ""}
    return {
        **answer,
        "output_ids": record["output_ids"],
        "meta_info": meta_info(record),
    }


RESPONSES = {
    "vllm chat": chat_response,
    "vllm chat without token_ids": lambda r: chat_response(r, ids_in="logprobs"),
    "vllm completions": completion_response,
    "sglang chat": sglang_chat_response,
    "sglang generate": native_response,
}


def request(record, shape):
    """The request that such an answer is one to."""
    if shape == "sglang generate":
        return {"input_ids": record["prompt_ids"], "return_logprob": True}
    if shape == "vllm completions":
        return {"prompt": record["prompt_ids"]}
    return {"model": "m", "messages": record.get("prompt_messages") or []}


def exchange(record, shape="vllm chat"):
    """A request and its answer."""
    return {"request": request(record, shape), "response": RESPONSES[shape](record)}


def write_openai(folder, records, shape="vllm chat"):
    lines = [{"session_id": r["session_id"], **exchange(r, shape)} for r in records]
    write_lines(folder / "log.jsonl", lines)


def write_polar(folder, records, shape="vllm chat"):
    names = [*by_session(records)]
    for number, record in enumerate(records):
        session = f"s{names.index(record['session_id']):02}"
        within = folder / "task_t" / "sessions" / session / "completions"
        within.mkdir(parents=True, exist_ok=True)
        one = polar_completion(record, number, shape)
        path = within / f"{number:04}-{one['completion_id']}.json"
        path.write_text(json.dumps(one))


def polar_completion(record, number, shape="vllm chat"):
    return {
        "completion_id": f"msg_{number:012x}",
        "timestamp": f"2026-01-01T00:00:{number:02}+00:00",
        "session_id": record["session_id"],
        "task_id": "t",
        "original_request": {},
        "transformed_request": request(record, shape),
        "response": RESPONSES[shape](record),
        "metadata": {},
        "__written_at": "2026-01-01T00:01:00+00:00",
    }


def write_nemo(folder, records):
    entries = [nemo_entry(record, number) for number, record in enumerate(records)]
    names = [*by_session(records)]
    for number, name in enumerate(names):
        own = [entry for entry in entries if entry["rollout_id"] == name]
        write_lines(folder / f"r{number}.tokens.jsonl", own)
        state = {"frozen": True, "incomplete": False}
        (folder / f"r{number}.tokens.state.json").write_text(json.dumps(state))


def nemo_entry(record, number):
    return {
        "schema_version": 3,
        "rollout_id": record["session_id"],
        "model_call_id": f"c{number}",
        "model": "m",
        "prompt_token_ids": record["prompt_ids"],
        "generation_token_ids": record["output_ids"],
        "generation_log_probs": record["output_logprobs"],
        "output_items": [],
        "created_at": 1.0 + number,
    }


def write_rllm(folder, records, *, chained=False):
    """The gateway's traces; ``chained``: prompts as what follows an earlier path."""
    traces, before = [], None
    for number, record in enumerate(records):
        trace = {
            "trace_id": f"t{number}",
            "session_id": record["session_id"],
            "model": "m",
            "messages": record.get("prompt_messages") or [],
            "prompt_token_ids": record["prompt_ids"],
            "response_message": record.get("response_message") or {},
            "completion_token_ids": record["output_ids"],
            "logprobs": record.get("output_logprobs"),
            "finish_reason": record.get("finish_reason"),
            "weight_version": 3,
            "timestamp": 5.0 + number,
        }
        prompt = record["prompt_ids"]
        if chained and before is not None and prompt[: len(before)] == before:
            trace["prompt_delta_token_ids"] = prompt[len(before) :]
            trace["parent_trace_id"] = f"t{number - 1}"
            trace["prompt_token_ids"] = []
        before = prompt + record["output_ids"]
        traces.append(trace)
    write_lines(folder / "traces.jsonl", traces)


def write_graphs(folder, sessions):
    """Traces of verifiers: ``sessions`` is a list of (name, nodes)."""
    lines = [
        {
            "version": 1,
            "id": name,
            "task": {"type": "T", "data": {}, "key": "k"},
            "agent": {"name": "solver", "trainable": True},
            "nodes": nodes,
            "calls": [],
            "rewards": {"a": {"score": 0.5, "weight": 2.0}, "b": {"score": 1.0}},
        }
        for name, nodes in sessions
    ]
    write_lines(folder / "traces.jsonl", lines)


def write_slime(folder, samples, *, tensors=False):
    dump = {"rollout_id": 3, "samples": samples}
    save(folder / "rollout_3.pt", dump, tensors=tensors)


def write_chats(folder, transcripts):
    write_lines(
        folder / "sft.jsonl", [{"messages": messages} for messages in transcripts]
    )


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


class Named:
    """A name in a pickle: of a class or function that need not be there."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __call__(self):
        """Callable, as `pickle` asks of what it writes as a function."""


class Call:
    """A value that a pickle has made by calling a name."""

    def __init__(self, module, name, *given, state=None):
        self.made = (Named(module, name), given, *([] if state is None else [state]))

    def __reduce__(self):
        return self.made


class _Pickler(pickle._Pickler):
    """As torch writes: names unchecked, the numbers of arrays aside."""

    def __init__(self, file, storages):
        super().__init__(file, protocol=2)
        self._storages = storages

    def persistent_id(self, value):
        if not isinstance(value, np.ndarray):
            return None
        key = str(len(self._storages))
        self._storages[key] = value.tobytes()
        kind = {"int64": "LongStorage", "float32": "FloatStorage"}[value.dtype.name]
        return "storage", Named("torch", kind), key, "cpu", value.size

    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, Named):
            self.write(f"c{obj.module}\n{obj.name}\n".encode())
        else:
            super().save(obj, save_persistent_id)


def tensor(array):
    """A value that is read as torch's tensor of an array."""
    given = 0, array.shape, (1,), False, Call("collections", "OrderedDict")
    return Call("torch._utils", "_rebuild_tensor_v2", array, *given)


def save(path: Path, value, *, tensors=False):
    """As ``torch.save``: a zip of the pickle and of the tensors' numbers."""
    if tensors:
        value = _as_tensors(value)
    file, storages = io.BytesIO(), {}
    _Pickler(file, storages).dump(value)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", file.getvalue())
        archive.writestr("archive/byteorder", "little")
        for key, numbers in storages.items():
            archive.writestr(f"archive/data/{key}", numbers)
        archive.writestr("archive/version", "3\n")


def _as_tensors(value):
    if isinstance(value, dict):
        return {key: _as_tensors(item) for key, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], int | float):
        type_ = np.int64 if isinstance(value[0], int) else np.float32
        return tensor(np.array(value, type_))
    return [_as_tensors(item) for item in value] if isinstance(value, list) else value


# --- formats of agents, evaluations and traces


def write_atif(folder, records):
    """Harbor's trajectory.json, version 1.7: a file per session."""
    for number, (name, own) in enumerate(by_session(records).items()):
        steps = [{"step_id": 1, "source": "user", "message": "q"}]
        for record in own:
            metrics = {
                "prompt_tokens": len(record["prompt_ids"]),
                "completion_tokens": len(record["output_ids"]),
                "prompt_token_ids": record["prompt_ids"],
                "completion_token_ids": record["output_ids"],
                "logprobs": record.get("output_logprobs"),
            }
            step = {"source": "agent", "message": "a", "metrics": metrics}
            steps.append({"step_id": len(steps) + 1, **step})
        trajectory = {
            "schema_version": "ATIF-v1.7",
            "session_id": name,
            "agent": {"name": "terminus-2", "version": "2", "model_name": "m"},
            "steps": steps,
            "final_metrics": {"total_steps": len(steps)},
        }
        path = folder / f"{number}" / "trajectory.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(trajectory))


def inspect_sample(name, records, epoch=1):
    """A sample of an Inspect log, with the provider's raw responses."""
    output = {"model": "m", "choices": [{"message": {"role": "assistant"}}]}
    events = [{"event": "sample_init"}]
    for record in records:
        asked = record.get("prompt_messages") or []
        event = {"event": "model", "model": "m", "input": asked, "output": output}
        event["timestamp"] = "2026-01-01T00:00:00+00:00"
        events.append({**event, "call": exchange(record)})
    return {"id": name, "epoch": epoch, "uuid": f"{name}-{epoch}", "events": events}


def write_inspect(folder, records):
    """Inspect's .eval: a zip file of samples."""
    with zipfile.ZipFile(folder / "log.eval", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, own in by_session(records).items():
            sample = json.dumps(inspect_sample(name, own))
            archive.writestr(f"samples/{name}_epoch_1.json", sample)
        archive.writestr("header.json", json.dumps({"version": 2, "eval": {}}))


def write_sweagent(folder, messages):
    step = {"action": "ls", "observation": "", "response": "a", "query": messages}
    traj = {"environment": "e", "trajectory": [step], "history": messages, "info": {}}
    (folder / "task.traj").write_text(json.dumps(traj))


def write_openhands(folder):
    action = {"id": 1, "source": "agent", "action": "run", "timestamp": "2026-01-01"}
    seen = {"id": 2, "source": "agent", "observation": "run", "content": "x"}
    (folder / "events.json").write_text(json.dumps([action, seen]))


def write_verl(folder):
    """verl's rollout_data_dir: decoded text."""
    line = {"input": "user\nq", "output": "a", "gts": "a", "score": 1.0, "step": 3}
    write_lines(folder / "3.jsonl", [{**line, "acc": True}])


def agent_loop(record, **changes):
    """An AgentLoopOutput of verl."""
    output = record["output_ids"]
    return {
        "prompt_ids": record["prompt_ids"],
        "response_ids": output,
        "response_mask": [1] * len(output),
        "response_logprobs": record.get("output_logprobs"),
        "routed_experts": None,
        "multi_modal_data": {},
        "reward_score": None,
        "num_turns": 2,
        "metrics": {"generate_sequences": 1.0, "tool_calls": 0.0, "num_preempted": -1},
        "extra_fields": {},
        **changes,
    }


def write_langfuse(folder, records):
    """Observations, each with the engine's whole response as its output."""
    lines = [
        {
            "id": f"o{number}",
            "traceId": "t",
            "sessionId": record["session_id"],
            "type": "GENERATION",
            "model": "m",
            "input": request(record, "vllm chat"),
            "output": chat_response(record),
            "startTime": "2026-01-01T00:00:00+00:00",
        }
        for number, record in enumerate(records)
    ]
    write_lines(folder / "observations.jsonl", [{**lines[0], "type": "SPAN"}, *lines])


def write_otel(folder, records):
    """Spans as a collector writes them, with ids as attributes."""
    spans = [span("execute_tool", {"gen_ai.operation.name": "execute_tool"})]
    for record in records:
        named = {
            "gen_ai.operation.name": "chat",
            "gen_ai.conversation.id": record["session_id"],
            "gen_ai.request.model": "m",
            "gen_ai.usage.input_tokens": len(record["prompt_ids"]),
            "gen_ai.response.finish_reasons": [record.get("finish_reason") or "stop"],
            "prompt_token_ids": record["prompt_ids"],
            "response_token_ids": record["output_ids"],
        }
        if record.get("output_logprobs") is not None:
            named["logprobs"] = record["output_logprobs"]
        spans.append({**span("chat", named), "spanId": f"s{len(spans)}"})
    export = {"resourceSpans": [{"scopeSpans": [{"scope": {}, "spans": spans}]}]}
    write_lines(folder / "traces.jsonl", [export])


def span(name, attributes):
    listed = [{"key": key, "value": typed(value)} for key, value in attributes.items()]
    return {"traceId": "t", "spanId": "s", "name": name, "attributes": listed}


def typed(value):
    """A value in the JSON form of OpenTelemetry's protocol: integers are text."""
    if isinstance(value, list):
        return {"arrayValue": {"values": [typed(one) for one in value]}}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": value}


def plain_record(record):
    """A line of a log that someone wrote by hand."""
    return {
        "session_id": record["session_id"],
        "messages": record.get("prompt_messages") or [],
        "prompt_token_ids": record["prompt_ids"],
        "token_ids": record["output_ids"],
        "logprobs": record.get("output_logprobs"),
        "response_message": record.get("response_message"),
        "finish_reason": record.get("finish_reason"),
        "reward": 0.5,
    }


def write_plain(folder, records):
    write_lines(folder / "log.jsonl", [plain_record(record) for record in records])


def write_responses(folder, records):
    """Responses alone, without their requests."""
    lines = [
        {"session_id": record["session_id"], **chat_response(record)}
        for record in records
    ]
    write_lines(folder / "responses.jsonl", lines)
