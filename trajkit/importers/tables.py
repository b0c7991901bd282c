"""A format as a table, and how records become calls by it."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from trajkit.errors import ArgumentError
from trajkit.files.json_numbers import EACH, IDS, ITEMS, Shape
from trajkit.importers.containers import stem_of
from trajkit.importers.findings import (
    Finding,
    Refused,
    has_items,
    is_array,
    list_of,
    object_of,
    reward_of,
    text_of,
    time_of,
    unless_empty,
)
from trajkit.importers.responses import (
    REQUEST,
    RESPONSE,
    STREAMED,
    Source,
    aligned,
    answers,
    is_answer,
    logprobs_of,
    usage_claims,
)
from trajkit.importers.transcripts import Encoder
from trajkit.turns.mapping import Map, Route, route

Value: TypeAlias = dict[str, Any]
"""A record, or an object of records."""

TARGETS = (
    *("session_id", "turn_index", "agent_id", "group_id", "reward", "request_id"),
    *("model", "started_at", "ended_at", "prompt_messages", "response_message"),
    *("prompt_ids", "output_ids", "output_logprobs", "output_mask", "finish_reason"),
    *("trainable", "weight_version", "weight_versions", "usage", "tools"),
    # a request and a response of an engine, which have many of the others
    *("request", "response"),
    # a prompt that continues the path of an earlier call
    *("parent", "delta_ids", "parent_resolution"),
)
"""The fields of a mapping."""

COMMON = {
    **{
        name: f"{name}|metadata.{name}|extra.{name}|/{name}|/metadata.{name}"
        for name in ("session_id", "agent_id", "group_id", "reward", "trainable")
    },
    "started_at": "started_at|timestamp",
    "ended_at": "ended_at",
}
"""What records of any format may have under trajkit's own names."""

# fields that some systems write as the text of JSON
_STRUCTURED = {
    *("request", "response", "usage", "prompt_ids", "output_ids", "output_logprobs"),
    *("output_mask", "prompt_messages", "response_message"),
}
# objects beside a call that hold facts of its run
_ASIDE = (
    *("metadata", "meta", "extra", "extra_info", "extra_body", "info", "tags"),
    *("attributes", "headers", "sent_headers", "context", "non_tensor_batch"),
    "metrics",
)
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_RUN = re.compile(
    r"(x_)?((agent|parent|root|task|source|user)_)?(session|trajectory|traj|rollout|run|"
    r"episode|conversation|conv|thread|trace|task|sample|instance|attempt|trial|"
    r"example|chat|dialog|dialogue|problem|question|prompt|group|env|game|user|job|"
    r"workflow|experiment)(_(id|ids|uid|uuid|name|key|index|idx|no|num|number|hash))"
    r"|uid|index|idx|session|trajectory|rollout|run|episode|trial|attempt"
)
_MATTERS = re.compile(
    r"(^|_)(rewards?|scores?|returns?|advantages?|groups?|uid|masks?|weights?|parents?|"
    r"trainable|versions?|error|errors|truncated|aborted|agent|turn|step|experts?|"
    r"teacher|entropies|entropy|images?|modal|mm|label|labels|success|resolved|"
    r"log_?probs?|kept_tokens|remove|loss)(_|$)"
)
_TAKES = {
    "reward|score|success|resolved": "reward",
    "group|uid": "group_id",
    "agent": "agent_id",
    "mask": "output_mask",
    "trainable": "trainable",
    "version": "weight_version",
    "log_?prob": "output_logprobs",
}


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """How a format is recognised, and where its calls have what."""

    name: str
    # in words, for errors
    title: str
    # sets of keys by which an object is recognised; one of them is enough
    keys: tuple[tuple[str, ...], ...] = ()
    # whether an object with these keys has the format
    test: Callable[[Value], bool] = lambda value: True
    # the containers that it may be in
    containers: tuple[str, ...] = ("json", "rows")
    # takes what no other format does
    generic: bool = False
    # path of the objects in a larger one, and of the records in an object; "*" is each
    # element of a list
    unfold: str = ""
    each: str = ""
    # places and objects in an object, which has a name of its own
    roots: Callable[[Value, str], Iterator[tuple[str, Value]]] | None = None
    # `roots` made them for this table: a user's mapping has no paths to change
    fixed: bool = False
    # what a record of `each` is called in a place
    item: str = "item"
    # "path=value": the records that are calls
    only: str = ""
    # sort key of an object's records
    order: Callable[[Value], Any] | None = None
    # the paths of the fields, by `TARGETS`
    fields: Mapping[str, str] = field(default_factory=dict)
    # changes a record, refuses it, or passes over it (None)
    prepare: Callable[[Value], Value | None] | None = None
    # the conversation of an object, for formats of text
    talk: Callable[[Value], object] | None = None
    # long arrays besides those of the fields
    arrays: Shape = field(default_factory=dict)
    # findings about a file besides its records
    beside: Callable[[Path, str | None, set[str]], Iterator[Finding]] | None = None
    # how the name of a file without records ends
    file_suffix: str = ""
    # its records may have the messages of requests without replies
    needs_reply: bool = False
    # only the first choice of a response is a call
    first_choice: bool = False
    # keys that are known and need no line
    knows: tuple[str, ...] = ()
    # how token ids get into such records
    ids: str = ""


class Table:
    """A format with a user's mapping: reads objects."""

    def __init__(
        self, format: Format, given: Map | None, encoder: Encoder | None
    ) -> None:
        self.format, self.encoder = format, encoder
        self.own: Mapping[str, Route] = given.fields if given else {}
        if self.own and format.fixed:
            raise ArgumentError(
                f"map: the format {format.name} is read by its own rules, and has no "
                "paths to change"
            )
        fields = {**COMMON, **format.fields}
        self.routes = {name: route(path) for name, path in fields.items() if path}
        self.routes |= self.own
        self.each = (given and given.each) or format.each
        only = (given and given.only) or format.only
        self.only = tuple(only.split("=", 1)) if only else ()
        parts = [part for one in self.routes.values() for part in one.parts()]
        self.known = {part.keys for part in parts}
        self.known_outside = {part.keys for part in parts if part.outer}
        self.known_outside |= {tuple(_keys(path)[:1]) for path in (self.each,) if path}
        # fields of the user's mapping that some record had
        self.found: set[str] = set()
        with_ids = {"output_ids", "output_logprobs", "response"}
        self.has_ids = not with_ids.isdisjoint(self.routes)

    def shape(self) -> Shape:
        """The long arrays of an object (see `trajkit.files.json_numbers`)."""
        shape: dict[str, Any] = {**self.format.arrays}
        kinds: dict[str, Any] = {
            **dict.fromkeys(("prompt_ids", "output_ids", "delta_ids"), IDS),
            "prompt_messages": ITEMS,
            "request": REQUEST,
            "response": {**RESPONSE, EACH: RESPONSE},
        }
        prefix = [key for one in (self.format.unfold, self.each) for key in _keys(one)]
        routes = {} if self.format.fixed else self.routes
        for target in kinds:
            for part in routes[target].parts() if target in routes else ():
                _put(shape, [*prefix, *part.keys], kinds[target])
                if part.outer:
                    _put(shape, list(part.keys), kinds[target])
        return shape

    def calls(self, file: Path, place: str, value: Value) -> Iterator[Finding]:
        """The calls of an object of a file."""
        for where, root in _elements(value, self.format.unfold, place, "span"):
            if not isinstance(root, dict):
                yield Finding(where).refuse("unreadable", _not_object(root))
            elif self.format.roots is not None:
                for below, one in self.format.roots(root, f"{file.name}, {where}"):
                    yield from self._object(file, f"{where}{below}", one)
            else:
                yield from self._object(file, where, root)

    def _object(self, file: Path, place: str, root: Value) -> Iterator[Finding]:
        if not self.has_ids:
            yield from self._talk(file, place, root)
            return
        records = list(_elements(root, self.each, place, self.format.item))
        if self.format.order is not None and self.each:
            order = self.format.order
            records.sort(key=lambda pair: order(object_of(pair[1])))
        calls = [
            one
            for at, record in records
            for one in self._record(file, at, record, root)
        ]
        if self.encoder is not None and not any(map(_has_ids, calls)):
            # text for supervised training
            if self.format.talk is not None:
                yield from self._talk(file, place, root)
                return
            calls = [one if one.problem else self.encoder.encoded(one) for one in calls]
        for one in calls:
            if not one.problem and not _has_ids(one):
                one.detail = self.format.ids
            yield one

    def _talk(self, file: Path, place: str, root: Value) -> Iterator[Finding]:
        """The replies of a conversation, as text."""
        found = Finding(place, origin=place)
        with found:
            self._session(found, file, root, root)
            # each transcript is a session; the file's name makes its name unique
            found.session = found.session or f"{file.name}, {place}"
            self._beside(found, root, root)
            self._common(found, self._values(file, root, root))
            found.tools = root.get("tools")
            messages = self.format.talk(root)  # type: ignore[misc]
            yield from self.encoder.replies(found, messages)  # type: ignore[union-attr]
            return
        yield found

    def _record(
        self, file: Path, place: str, record: object, root: Value
    ) -> Iterator[Finding]:
        """The calls of a record: each choice of a response, or each span of a mask."""
        found = Finding(place)
        with found:
            if not isinstance(record, dict):
                self._session(found, file, {}, root)
                raise Refused("unreadable", _not_object(record))
            if self.only:
                value = route(self.only[0]).find(record, root)
                # an object without records may be one itself
                alone = self.each and record is root and value is None
                if str(value) != self.only[1] and not alone:
                    return
            self._session(found, file, record, root)
            if "request_id" in self.routes:
                named = self.routes["request_id"].find(record, root)
                found.fields["request_id"] = text_of(named)
            if self.format.prepare is not None:
                prepared = self.format.prepare(record)
                if prepared is None:
                    return
                root = prepared if record is root else root
                record = prepared
            self._beside(found, record, root)
            if self.format.fixed:
                found.remarks += record.get("@remarks", ())
                if "@refused" in record:
                    raise record["@refused"]
            values = self._values(file, record, root)
            self.found |= {name for name in self.own if values.get(name) is not None}
            self._common(found, values)
            response = values.get("response")
            if is_answer(response) or (
                isinstance(response, dict | list) and "output_ids" not in self.routes
            ):
                yield from [*self._answers(found, values)]
                return
            if "response" in self.routes and "output_ids" not in self.routes:
                if isinstance(response, str) and response.lstrip().startswith("data:"):
                    raise Refused("unreadable", STREAMED)
                raise Refused("unreadable", "no request, or no response")
            self._direct(found, values)
            yield from _spans(found, values.get("output_mask"))
            return
        yield found

    def _answers(self, found: Finding, values: Value) -> Iterator[Finding]:
        """A call for each choice of a response, with what is known of the record."""
        choices = answers(object_of(values.get("request")), values["response"])
        # what a mapping names counts before what a response has
        own = {name: values[name] for name in self.own if name in values}
        for suffix, choice in islice(choices, 1 if self.format.first_choice else None):
            one = found.copy(suffix, first=not suffix)
            one.claims, one.tools = choice["claims"], choice.get("tools")
            one.remarks += choice["remarks"]
            for name in ("request_id", "model", "prompt_messages"):
                if one.fields.get(name) is None:
                    one.fields[name] = choice.get(name)
            if "@refused" in choice:
                one.refuse(*choice["@refused"].args)
            source = None if "output_logprobs" in own else choice.get("source")
            self._direct(one, {**choice, **own}, source)
            yield one

    def _values(self, file: Path, record: Value, root: Value) -> Value:
        values = {
            name: one.find(record, root, stem_of(file))
            for name, one in self.routes.items()
            if name != "session_id"
        }
        for name in _STRUCTURED & values.keys():
            values[name] = _parsed(values[name])
        return values

    def _session(self, found: Finding, file: Path, record: Value, root: Value) -> None:
        one = self.routes.get("session_id")
        value = None if one is None else one.find(record, root, stem_of(file))
        if value is not None and value != "":
            found.session = text_of(value)
            if found.session is None:
                text = f"its session is {value!r}: expected text or an integer"
                raise Refused("unreadable", text)
            self.found.add("session_id")
        elif "session_id" in self.own:
            raise Refused("no_session_id", f"it has no {self.own['session_id'].text}")

    def _beside(self, found: Finding, record: Value, root: Value) -> None:
        """Keep what may name the run, and what no field reads."""
        for outer in (root, record) if root is not record else (record,):
            slash = "" if outer is record else "/"
            known = self.known_outside if slash else self.known
            aside = dict(_all_beside(outer))
            named = aside | {
                f"{name}.metadata.{key}": value
                for name in ("request", "request_body", "input")
                for key, value in object_of(
                    object_of(outer.get(name)).get("metadata")
                ).items()
            }
            for path, value in named.items():
                name, keys = _word(path), tuple(path.split("."))
                if found.session is None and text_of(value) and _RUN.fullmatch(name):
                    found.run_keys[slash + path] = value
                if path not in aside or path in self.format.knows:
                    continue
                read = any(keys[: len(k)] == k or k[: len(keys)] == keys for k in known)
                if not read and _MATTERS.search(name):
                    found.unread[slash + path] = value

    def _common(self, found: Finding, values: Value) -> None:
        """Fields of any call, with or without a response of an engine."""
        fields = found.fields
        for name in ("agent_id", "group_id", "request_id", "model"):
            value = values.get(name)
            fields[name] = text_of(value)
            if fields[name] is None and value not in (None, "") and name in self.routes:
                found.unread[self._text(name)] = value
        fields["started_at"] = time_of(values.get("started_at"))
        fields["ended_at"] = time_of(values.get("ended_at"))
        fields["reward"] = reward_of(found, values.get("reward"), self._text("reward"))
        flag = values.get("trainable")
        if isinstance(flag, bool | np.bool_) or (type(flag) is int and flag in (0, 1)):
            fields["trainable"] = bool(flag)
        elif flag is not None:
            found.unread[self._text("trainable")] = flag
        if values.get("turn_index") is not None:
            fields["turn_index"] = values["turn_index"]
        messages = values.get("prompt_messages")
        # an empty list is no request's, but at the root of a graph
        messages = messages if self.format.fixed else unless_empty(messages)
        if isinstance(messages, list) or "prompt_messages" in self.own:
            fields["prompt_messages"] = messages
        usage = object_of(values.get("usage"))
        found.claims += usage_claims(usage, self._text("usage"))
        found.tools = values.get("tools")

    def _text(self, name: str) -> str:
        return self.routes[name].text if name in self.routes else name

    def _direct(
        self, found: Finding, values: Value, source: Source | None = None
    ) -> None:
        """Ids, logprobs, the reply, and what is known of the output."""
        fields = found.fields
        source = source or logprobs_of(values.get("output_logprobs"))
        output, logprobs, remarks = aligned(values.get("output_ids"), source)
        found.remarks += remarks
        fields["prompt_ids"] = values.get("prompt_ids")
        fields["output_ids"], fields["output_logprobs"] = output, logprobs
        reply = values.get("response_message")
        reply = reply[0] if isinstance(reply, list) and len(reply) == 1 else reply
        fields["response_message"] = object_of(reply) or None
        reason = values.get("finish_reason")
        # SGLang's is an object with a type
        fields["finish_reason"] = text_of(
            reason.get("type") if isinstance(reason, dict) else reason
        )
        n = len(output) if is_array(output) else 0
        for path, value in found.unread.items():
            marks = "mask" in path and isinstance(value, list) and len(value) == n
            if marks and not all(list_of(value)):
                text = f"{path} marks some of its tokens: --map output_mask={path} takes it"
                found.remarks.append(("mask_unread", text))
                fields["trainable"] = False
        _set_versions(found, values, n)
        fields["parent"] = text_of(values.get("parent"))
        fields["delta_ids"] = values.get("delta_ids")
        fields["parent_resolution"] = text_of(values.get("parent_resolution"))


def advice(path: str) -> str:
    """How to take a key that no field reads."""
    name = _word(path)
    for pattern, target in _TAKES.items():
        if re.search(pattern, name):
            return f": --map {target}={path} takes it"
    return ""


def _has_ids(found: Finding) -> bool:
    names = ("prompt_ids", "output_ids", "delta_ids")
    return any(has_items(found.fields.get(name)) for name in names)


def _word(path: str) -> str:
    """The last key of a path in lower case, with underscores between its words."""
    return "_".join(_WORD.findall(path.rpartition(".")[2])).lower()


def _parsed(value: object) -> object:
    """The value of a text of JSON; anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _set_versions(found: Finding, values: Value, n: int) -> None:
    """The weight versions of an output; several without lengths have no place."""
    given: Any = values.get("weight_versions")
    version = values.get("weight_version")
    if n and is_array(given) and len(given):
        if all(isinstance(one, dict) for one in given):
            found.fields["weight_versions"] = given
            return
        distinct = {text_of(one) for one in given}
        if len(distinct) > 1:
            listed = ", ".join(sorted(map(str, distinct)))
            found.remarks.append(("versions_unplaced", listed))
            return
        version = distinct.pop()
    if not isinstance(version, list):
        name = text_of(version)
        version = [] if name is None else [name] * n
    # one per token
    names = [text_of(one) for one in version] if len(version) == n else []
    starts = [k for k in range(len(names)) if k == 0 or names[k] != names[k - 1]]
    found.fields["weight_versions"] = [
        {"version": names[start], "start": start, "stop": stop}
        for start, stop in zip(starts, [*starts[1:], n], strict=False)
    ] or None


def _spans(found: Finding, mask: Any) -> Iterator[Finding]:
    """The calls of a training row: the spans under its mask, each with what is before."""
    output: Any = found.fields.get("output_ids")
    prompt: Any = found.fields.get("prompt_ids")
    if mask is None or not is_array(output) or not is_array(prompt):
        yield found
        return
    flags = mask if isinstance(mask, np.ndarray) else np.array(list_of(mask), object)
    good = is_array(mask) and flags.ndim == 1
    if not good or any(flag not in (0, 1) for flag in flags.tolist()):
        raise Refused("unreadable", "a mask that is not of 0 and 1")
    flags = flags.astype(np.bool_)
    if len(flags) == len(prompt) + len(output) and not flags[: len(prompt)].any():
        flags = flags[len(prompt) :]
    if len(flags) != len(output):
        text = f"a mask of {len(flags)} for {len(output)} output ids"
        raise Refused("unreadable", text)
    if len(output) and not flags.any():
        raise Refused("no_output_ids", "its mask is empty")
    if flags.all():
        yield found
        return
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)).reshape(-1, 2)
    row, first = np.array([*prompt, *output], object), len(prompt)
    logprobs: Any = found.fields.get("output_logprobs")
    versions: Any = found.fields.get("weight_versions")
    for k, (start, stop) in enumerate(edges.tolist()):
        # counts of the source are those of the row; its reply is none of one span
        one = found.copy(f", span {k}" if len(edges) > 1 else "")
        one.fields |= {
            "prompt_ids": row[: first + start].tolist(),
            "output_ids": row[first + start : first + stop].tolist(),
            "output_logprobs": logprobs[start:stop] if has_items(logprobs) else None,
            **dict.fromkeys(("response_message", "prompt_messages")),
        }
        if versions is not None:
            whole = {"version": versions[0].get("version"), "start": 0}
            one.fields["weight_versions"] = [{**whole, "stop": stop - start}]
        if stop < len(output):
            one.fields["finish_reason"] = None
        yield one


def _elements(
    value: object, path: str, place: str, item: str
) -> Iterator[tuple[str, object]]:
    """The values at a path with "*" for the elements of lists; without it, the value."""
    found = [(place, value)]
    for key in _keys(path):
        deeper: list[tuple[str, object]] = []
        for where, within in found:
            if key == EACH:
                several = enumerate(list_of(within))
                deeper += [(f"{where}, {item} {k}", one) for k, one in several]
            elif isinstance(within, dict) and key in within:
                deeper.append((where, within[key]))
            elif within is value:
                # an object that is a record itself
                yield place, value
                return
        found = deeper
    yield from found


def _keys(path: str) -> list[str]:
    keys = path.split(".") if path else []
    return [*keys, EACH] if keys and keys[-1] != EACH else keys


def _put(shape: dict[str, Any], keys: list[str], kind: Any) -> None:
    for key in keys[:-1]:
        shape = shape.setdefault(key, {})
        if not isinstance(shape, dict):
            return
    old = shape.get(keys[-1])
    if isinstance(kind, dict) and (old is None or isinstance(old, dict)):
        shape[keys[-1]] = {**kind, **(old or {})}
    elif not isinstance(kind, dict):
        shape.setdefault(keys[-1], kind)


def _all_beside(value: Value, depth: int = 0) -> Iterator[tuple[str, object]]:
    """The keys of a record and of the objects beside its call, with values."""
    for name, one in value.items():
        if name in _ASIDE and isinstance(one, dict) and depth < len(_ASIDE):
            for inner, within in _all_beside(one, depth + 1):
                yield f"{name}.{inner}", within
        elif one is not None and one is not False:
            if not isinstance(one, str | list | dict | np.ndarray) or len(one):
                yield name, one


def _not_object(value: object) -> str:
    return f"a {type(value).__name__}, not an object"
