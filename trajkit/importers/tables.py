"""A format as a table, and how records become calls by it."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from trajkit.errors import ArgumentError
from trajkit.files.json_numbers import EACH, IDS, ITEMS, Shape
from trajkit.importers.findings import (
    Finding,
    Refused,
    finish_of,
    has_items,
    list_of,
    object_of,
    reward_of,
    text_of,
    time_of,
    unless_empty,
    versions_of,
)
from trajkit.importers.responses import (
    REQUEST,
    RESPONSE,
    STREAMED,
    answers,
    logprobs_of,
    usage_claims,
)
from trajkit.importers.sources import stem_of
from trajkit.importers.transcripts import Encoder
from trajkit.turns.mapping import Map, Route, route

Value: TypeAlias = dict[str, object]
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
_TAKES = (
    (re.compile("reward|score|success|resolved"), "reward"),
    (re.compile("group|uid"), "group_id"),
    (re.compile("agent"), "agent_id"),
    (re.compile("mask"), "output_mask"),
    (re.compile("trainable"), "trainable"),
    (re.compile("version"), "weight_version"),
    (re.compile("log_?prob"), "output_logprobs"),
)


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
    roots: Callable[[Value], Iterator[tuple[str, Value]]] | None = None
    each: str = ""
    # what a record of `each` is called in a place
    item: str = "item"
    # "path=value": the records that are calls
    only: str = ""
    # sort key of an object's records
    order: Callable[[Value], Any] | None = None
    # the paths of the fields, by `TARGETS`
    fields: Mapping[str, str] = field(default_factory=dict)
    # changes a record, refuses it, or passes over it (None)
    prepare: Callable[[Value, Value], Value | None] | None = None
    # the conversation of an object, for formats of text
    talk: Callable[[Value], object] | None = None
    # reads an object, for formats that no table describes, and its long arrays
    read: Callable[[Path, str, Value], Iterator[Finding]] | None = None
    arrays: Shape | None = None
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
        self.format, self.given, self.encoder = format, given, encoder
        fields = {} if format.read else {**COMMON, **format.fields}
        self.routes: dict[str, Route] = {
            name: route(path) for name, path in fields.items() if path
        }
        own = given.fields if given else {}
        if own and format.read is not None:
            raise ArgumentError(
                f"map: the format {format.name} is read by its own rules, and has no "
                "paths to change"
            )
        self.routes |= own
        self.each = (given and given.each) or format.each
        only = (given and given.only) or format.only
        self.only = tuple(only.split("=", 1)) if only else ()
        parts = [part for one in self.routes.values() for part in one.parts()]
        self.known = {part.keys for part in parts}
        self.known_outside = {part.keys for part in parts if part.outer}
        self.known_outside |= {tuple(_keys(path)[:1]) for path in (self.each,) if path}
        # fields of the user's mapping that some record had
        self.found: set[str] = set()
        self.has_ids = bool(
            {"output_ids", "output_logprobs", "response"} & {*self.routes}
        )
        self.has_ids |= format.read is not None

    def shape(self) -> Shape:
        """The long arrays of an object (see `trajkit.files.json_numbers`)."""
        if self.format.arrays is not None:
            return self.format.arrays
        shape: dict[str, Any] = {}
        kinds: dict[str, Any] = {
            **dict.fromkeys(("prompt_ids", "output_ids", "delta_ids"), IDS),
            "prompt_messages": ITEMS,
            "request": REQUEST,
            "response": {**RESPONSE, EACH: RESPONSE},
        }
        prefix = [key for one in (self.format.unfold, self.each) for key in _keys(one)]
        for target in kinds:
            for parts in self.routes[target].ways if target in self.routes else ():
                for part in parts:
                    _put(shape, [*prefix, *part.keys], kinds[target])
                    if part.outer:
                        _put(shape, list(part.keys), kinds[target])
        return shape

    def calls(self, file: Path, place: str, value: Value) -> Iterator[Finding]:
        """The calls of an object of a file."""
        for where, root in _elements(value, self.format.unfold, place, "span"):
            if not isinstance(root, dict):
                yield Finding(where).refuse("unreadable", _not_object(root))
            elif self.format.read is not None:
                yield from self.format.read(file, where, root)
            elif self.format.roots is not None:
                for below, one in self.format.roots(root):
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
        calls: list[Finding] = []
        for where, record in records:
            if isinstance(record, dict):
                calls += self._record(file, where, record, root)
            else:
                one = Finding(where)
                with one:
                    self._session(one, file, {}, root)
                calls.append(one.refuse("unreadable", _not_object(record)))
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
        found = Finding(place)
        with found:
            self._session(found, file, root, root)
            # each transcript is a session; the file's name makes its name unique
            found.session = found.session or f"{file.name}, {place}"
            found.origin = place
            self._beside(found, root, root)
            values = self._values(file, root, root)
            self._common(found, values)
            found.tools = root.get("tools")
            messages = self.format.talk(root)  # type: ignore[misc]
            yield from self.encoder.replies(found, messages)  # type: ignore[union-attr]
            return
        yield found

    def _values(self, file: Path, record: Value, root: Value) -> dict[str, object]:
        values = {
            name: one.find(record, root, stem_of(file))
            for name, one in self.routes.items()
            if name != "session_id"
        }
        for name in _STRUCTURED & values.keys():
            values[name] = parsed(values[name])
        return values

    def _record(
        self, file: Path, place: str, record: Value, root: Value
    ) -> Iterator[Finding]:
        if self.only and not (self.each and record is root):
            value = route(self.only[0]).find(record, root)
            if str(value) != self.only[1]:
                return
        found = Finding(place)
        with found:
            self._session(found, file, record, root)
            if "request_id" in self.routes:
                named = self.routes["request_id"].find(record, root)
                found.fields["request_id"] = text_of(named)
            if self.format.prepare is not None:
                prepared = self.format.prepare(record, root)
                if prepared is None:
                    return
                root = prepared if record is root else root
                record = prepared
            self._beside(found, record, root)
            values = self._values(file, record, root)
            if self.given is not None:
                self.found |= {
                    name for name in self.given.fields if values.get(name) is not None
                }
            response = values.get("response")
            if is_answer(response) or (
                isinstance(response, dict | list) and "output_ids" not in self.routes
            ):
                self._common(found, values)
                request = object_of(values.get("request"))
                several = list(
                    answers(found, request, response, first=self.format.first_choice)
                )
                for one in several:
                    self._chosen(one, found, values)
                yield from several
                return
            if "response" in self.routes and "output_ids" not in self.routes:
                if isinstance(response, str) and response.lstrip().startswith("data:"):
                    raise Refused("unreadable", STREAMED)
                raise Refused("unreadable", "no request, or no response")
            self._common(found, values)
            self._direct(found, values)
            yield from _spans(found, values.get("output_mask"))
            return
        yield found

    def _session(self, found: Finding, file: Path, record: Value, root: Value) -> None:
        one = self.routes.get("session_id")
        value = None if one is None else one.find(record, root, stem_of(file))
        if value is not None and value != "":
            found.session = text_of(value)
            if found.session is None:
                raise Refused(
                    "unreadable",
                    f"its session is {value!r}: expected text or an integer",
                )
            self.found.add("session_id")
        elif self.given is not None and "session_id" in self.given.fields:
            raise Refused("no_session_id", f"it has no {one.text}")  # type: ignore[union-attr]

    def _beside(self, found: Finding, record: Value, root: Value) -> None:
        """Keep what may name the run, and what no field reads."""
        for outer in (root, record) if root is not record else (record,):
            slash = "/" if outer is root and root is not record else ""
            known = self.known_outside if slash else self.known
            for path, value in _all_beside(outer):
                keys = tuple(path.split("."))
                name = word(path)
                if found.session is None and text_of(value) and _RUN.fullmatch(name):
                    found.run_keys[f"{slash}{path}"] = value
                read = any(keys[: len(k)] == k or k[: len(keys)] == keys for k in known)
                if not read and path not in self.format.knows and _MATTERS.search(name):
                    found.unread[f"{slash}{path}"] = value
            for name in ("request", "request_body", "input"):
                metadata = object_of(object_of(outer.get(name)).get("metadata"))
                for inner, value in metadata.items():
                    if (
                        found.session is None
                        and text_of(value)
                        and _RUN.fullmatch(word(inner))
                    ):
                        found.run_keys[f"{slash}{name}.metadata.{inner}"] = value

    def _common(self, found: Finding, values: Mapping[str, object]) -> None:
        """Fields of any call, with or without a response of an engine."""
        fields = found.fields
        for name in ("agent_id", "group_id", "request_id", "model"):
            value = values.get(name)
            fields[name] = text_of(value)
            if fields[name] is None and value not in (None, "") and name in self.routes:
                found.unread[self.routes[name].text] = value
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
        messages = unless_empty(values.get("prompt_messages"))
        if isinstance(messages, list) or self._is_own("prompt_messages"):
            fields["prompt_messages"] = messages
        found.claims += usage_claims(
            object_of(values.get("usage")), self._text("usage")
        )
        found.tools = values.get("tools")

    def _chosen(
        self, one: Finding, found: Finding, values: Mapping[str, object]
    ) -> None:
        """What a mapping names counts before what a response has."""
        one.fields |= {k: v for k, v in found.fields.items() if v is not None}
        own = {*(self.given.fields if self.given else ())}
        direct = Finding(one.place)
        self._direct(direct, values)
        for name in own & direct.fields.keys():
            one.fields[name] = direct.fields[name]

    def _is_own(self, name: str) -> bool:
        """Whether the user's mapping has a field."""
        return self.given is not None and name in self.given.fields

    def _text(self, name: str) -> str:
        return self.routes[name].text if name in self.routes else name

    def _direct(self, found: Finding, values: Mapping[str, object]) -> None:
        """Ids, logprobs and the reply at paths of their own."""
        fields = found.fields
        output = values.get("output_ids")
        fields["prompt_ids"], fields["output_ids"] = values.get("prompt_ids"), output
        source = logprobs_of(values.get("output_logprobs"))
        if source is not None:
            ids, fields["output_logprobs"] = source
            if output is None:
                fields["output_ids"] = ids
            elif ids is not None and has_items(output) and [*output] != ids:  # type: ignore[misc]
                fields["output_logprobs"] = None
                text = "they belong to other ids than the output"
                found.remarks.append(("logprobs_unaligned", text))
        reply = values.get("response_message")
        if isinstance(reply, list) and len(reply) == 1:
            (reply,) = reply
        fields["response_message"] = (
            reply if isinstance(reply, dict) and reply else None
        )
        fields["finish_reason"] = finish_of(values.get("finish_reason"))
        n = len(output) if isinstance(output, list | np.ndarray) else 0
        for path, value in found.unread.items():
            if (
                "mask" in path
                and isinstance(value, list)
                and len(value) == n
                and not all(value)
            ):
                text = f"{path} marks some of its tokens: --map output_mask={path} takes it"
                found.remarks.append(("mask_unread", text))
                fields["trainable"] = False
        _set_versions(found, values, n)
        fields["parent"] = text_of(values.get("parent"))
        fields["delta_ids"] = values.get("delta_ids")
        fields["parent_resolution"] = text_of(values.get("parent_resolution"))


def _has_ids(found: Finding) -> bool:
    names = ("prompt_ids", "output_ids", "delta_ids")
    return any(has_items(found.fields.get(name)) for name in names)


def is_answer(value: object) -> bool:
    """Whether a value looks like a response of an engine, or a list of them."""
    if isinstance(value, list):
        value = value[0] if value else None
    return isinstance(value, dict) and any(
        name in value for name in ("choices", "output_ids", "meta_info")
    )


def word(path: str) -> str:
    """The last key of a path in lower case, with underscores between its words."""
    return "_".join(_WORD.findall(path.rpartition(".")[2])).lower()


def parsed(value: object) -> object:
    """The value of a text of JSON; anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def advice(path: str) -> str:
    """How to take a key that no field reads."""
    name = word(path)
    for pattern, target in _TAKES:
        if pattern.search(name):
            return f": --map {target}={path} takes it"
    return ""


def _set_versions(found: Finding, values: Mapping[str, object], n: int) -> None:
    """The weight versions of an output; several without lengths have no place."""
    given = values.get("weight_versions")
    if has_items(given):
        names = {text_of(one) for one in given}  # type: ignore[attr-defined]
        if all(isinstance(one, dict) for one in given):  # type: ignore[attr-defined]
            found.fields["weight_versions"] = given
        elif len(names) == 1:
            found.fields["weight_versions"] = versions_of(names.pop(), n)
        else:
            listed = ", ".join(sorted(map(str, names)))
            found.remarks.append(("versions_unplaced", listed))
        return
    version = values.get("weight_version")
    if isinstance(version, list) and len(version) == n > 0:
        # one per token
        starts = [k for k in range(n) if k == 0 or version[k] != version[k - 1]]
        found.fields["weight_versions"] = [
            {"version": text_of(version[start]), "start": start, "stop": stop}
            for start, stop in zip(starts, [*starts[1:], n], strict=True)
        ]
    else:
        found.fields["weight_versions"] = versions_of(version, n)


def _spans(found: Finding, mask: object) -> Iterator[Finding]:
    """The calls of a training row: the spans under its mask, each with what is before."""
    if mask is None:
        yield found
        return
    fields = found.fields
    output, prompt = fields.get("output_ids"), fields.get("prompt_ids")
    flags = mask if isinstance(mask, np.ndarray) else np.array(list_of(mask), object)
    if not isinstance(output, list | np.ndarray) or not isinstance(
        prompt, list | np.ndarray
    ):
        yield found
        return
    good = isinstance(mask, list | np.ndarray) and flags.ndim == 1
    if not good or any(flag not in (0, 1) for flag in flags.tolist()):
        yield found.refuse("unreadable", "a mask that is not of 0 and 1")
        return
    flags = flags.astype(np.bool_)
    if len(flags) == len(prompt) + len(output) and not flags[: len(prompt)].any():
        flags = flags[len(prompt) :]
    if len(flags) != len(output):
        text = f"a mask of {len(flags)} for {len(output)} output ids"
        yield found.refuse("unreadable", text)
        return
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)).reshape(-1, 2)
    if len(output) and not len(edges):
        yield found.refuse("no_output_ids", "its mask is empty")
        return
    if not len(edges) or edges.tolist() == [[0, len(output)]]:
        yield found
        return
    row, first = np.array([*prompt, *output], object), len(prompt)
    logprobs = fields.get("output_logprobs")
    aligned = has_items(logprobs) and len(logprobs) == len(output)  # type: ignore[arg-type]
    versions = fields.get("weight_versions")
    for k, (start, stop) in enumerate(edges.tolist()):
        one = replace(found, fields=dict(fields), remarks=list(found.remarks))
        if len(edges) > 1:
            one.place = f"{found.place}, span {k}"
        one.fields["prompt_ids"] = row[: first + start].tolist()
        one.fields["output_ids"] = row[first + start : first + stop].tolist()
        if has_items(logprobs):
            if aligned:
                one.fields["output_logprobs"] = logprobs[start:stop]  # type: ignore[index]
            else:
                text = f"{len(logprobs)} logprobs for a response of {len(output)}"  # type: ignore[arg-type]
                one.remarks.append(("logprobs_unaligned", text))
                one.fields["output_logprobs"] = None
        if versions is not None:
            named = list_of(versions)[0]
            one.fields["weight_versions"] = versions_of(named["version"], stop - start)  # type: ignore[index]
        if stop < len(output):
            one.fields["finish_reason"] = None
        if len(edges) > 1 or start or stop < len(output):
            # counts of the source are those of the row; its reply is none of one span
            one.claims, one.fields["response_message"] = [], None
            one.fields["prompt_messages"] = None
        yield one


def _elements(
    value: object, path: str, place: str, item: str
) -> Iterator[tuple[str, object]]:
    """The values at a path with "*" for the elements of lists; without it, the value."""
    if not path:
        yield place, value
        return
    found: list[tuple[str, object]] = [(place, value)]
    for key in _keys(path):
        deeper: list[tuple[str, object]] = []
        for where, within in found:
            if key == EACH:
                several = list_of(within)
                deeper += [
                    (f"{where}, {item} {k}", one) for k, one in enumerate(several)
                ]
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
    within = shape
    for key in keys[:-1]:
        deeper = within.setdefault(key, {})
        if not isinstance(deeper, dict):
            return
        within = deeper
    if keys and keys[-1]:
        old = within.get(keys[-1])
        if isinstance(kind, dict):
            if old is None or isinstance(old, dict):
                within[keys[-1]] = {**kind, **(old or {})}
        else:
            within.setdefault(keys[-1], kind)


def _all_beside(value: Value, depth: int = 0) -> Iterator[tuple[str, object]]:
    """The keys of a record and of the objects beside its call, with values."""
    for name, one in value.items():
        if name in _ASIDE and isinstance(one, dict) and depth < len(_ASIDE):
            for inner, within in _all_beside(one, depth + 1):
                yield f"{name}.{inner}", within
        elif not _is_nothing(one):
            yield name, one


def _is_nothing(value: object) -> bool:
    return (
        value is None
        or value is False
        or (isinstance(value, str | list | dict | np.ndarray) and not len(value))
    )


def _not_object(value: object) -> str:
    return f"a {type(value).__name__}, not an object"
