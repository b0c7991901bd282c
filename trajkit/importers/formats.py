"""The formats, each a table, and how the records of a file become calls by one of them.

Ids may stand in the record itself, or in the response of an engine; docs/import.md lists
where each endpoint of vLLM and SGLang puts them.
"""

import json
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice, product
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from trajkit.analysis.tokenizer import Codec, Ids, Tokenizer
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError
from trajkit.files.jsonl import IDS, ITEMS, Shape
from trajkit.importers.containers import Finding, Head, Refused, Value
from trajkit.turns import mapping
from trajkit.turns.keys import (
    EMPTY_RUN,
    MATTERS,
    NO_NAME,
    REWARDS,
    SPELLED,
    claims_of,
    facts_of,
    flag_of,
    has_items,
    is_array,
    is_broken,
    is_empty,
    is_failed,
    is_name,
    is_nothing,
    is_taken_mask,
    list_of,
    marks_tokens,
    meaning_of,
    media_of,
    names_run,
    number_of,
    object_of,
    parsed,
    text_of,
    time_of,
    unless_empty,
    word_of,
)
from trajkit.turns.mapping import Map, Names, Route, elements, route
from trajkit.turns.records import from_records

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

# what records of any format may have under trajkit's own names
_COMMON = {
    name: route(f"{name}|metadata.{name}|extra.{name}|/{name}|/metadata.{name}")
    for name in ("session_id", "agent_id", "group_id", "reward", "trainable")
} | {"started_at": route("started_at|timestamp"), "ended_at": route("ended_at")}
# fields that some systems write as the text of JSON
_STRUCTURED = {
    *("request", "response", "usage", "prompt_ids", "output_ids", "output_logprobs"),
    *("output_mask", "prompt_messages", "response_message", "tools"),
}
# keys in which runs of one name may differ: where and when they were made
_MANY = re.compile(
    r"^(?!agent|parent|group)(\w+_)?(uid|worker|actor|rank|pid|host(name)?|epoch|iteration|"
    r"iter|seed|session|trajectory|traj|rollout|run|episode|trial|attempt|task|sample|"
    r"instance|example|problem|question|conversation|thread|trace)"
    r"(_(id|uid|uuid|key|index|idx|no|num|number|rank|name))?$"
)
# paths of the long arrays in a field
_OF_RESPONSE = (
    *("prompt_token_ids", "token_ids", "output_ids", "choices.*.prompt_token_ids"),
    *("choices.*.input_token_ids", "choices.*.token_ids"),
    "choices.*.response_token_ids",
)
_LONG: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("prompt_ids", "output_ids", "delta_ids", "prompt_messages"), ("",)
    ),
    "request": ("messages", "input_ids", "prompt", "prompt_token_ids", "token_ids"),
    "response": (*_OF_RESPONSE, *(f"*.{path}" for path in _OF_RESPONSE)),
}
# where a choice of a response has what
_OF_ANSWER = mapping.read_map("""
    prompt_ids=choice.input_token_ids|choice.prompt_token_ids|response.prompt_token_ids|
    request.input_ids|request.prompt|request.prompt_token_ids|request.token_ids,
    output_ids=choice.token_ids|choice.response_token_ids|response.token_ids|
    response.output_ids, usage=usage,
    finish_reason=choice.finish_reason|choice.meta_info.finish_reason,
    prompt_messages=request.messages, response_message=choice.message,
    tools=request.tools, model=response.model,
    request_id=response.id|response.request_id|request.rid,
    weight_version=choice.weight_version|choice.meta_info.weight_version|
    response.metadata.weight_version,
    weight_versions=choice.weight_versions|choice.meta_info.weight_versions|
    response.metadata.weight_versions""").fields
# where SGLang has logprobs
_NATIVE = "output_token_logprobs"
_STREAMED = "a part of a stream: log the complete response"


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """How a format is recognised, and where its calls have what."""

    name: str
    # in words, for errors
    title: str
    # sets of keys by which an object is recognised; one of them is enough
    keys: tuple[str, ...] = ()
    # the paths of its fields, as users write a mapping
    map: str = ""
    # how token ids get into such records
    ids: str = ""
    # whether an object with these keys has the format
    test: Callable[[Value], bool] = lambda value: True
    # the containers that it may be in
    containers: str = "json rows"
    # takes what no other format does
    generic: bool = False
    # the objects in an object, with places
    roots: Callable[[Value, Path], Iterable[tuple[str, Value]]] = lambda root, _: [
        ("", root)
    ]
    # the path of ids that the mapping does not name
    array: str = ""
    # the path by which records of the mapping's `each` are sorted
    order: str = ""
    # changes a record, refuses it, or passes over it (None)
    prepare: Callable[[Value], Value | None] = lambda record: record
    # the conversation of an object, for formats of text
    talk: Callable[[Value], object] | None = None
    # a record is a run, if none of its keys may name one
    alone: bool = False
    # the number, if there is one, in what its records have as reward
    reward: Callable[[Any], object] = lambda value: value
    # files in one folder are of one run, in the order of their names
    by_folder: bool = False
    # how many choices of a response are calls; None: all
    most_choices: int | None = None
    # keys that are known and need no line
    knows: str = ""


class _Key(NamedTuple):
    """What a table makes of a key beside a call, by its path."""

    keys: tuple[str, ...]
    word: str
    # a field has its value; the mapping or the format knows it
    is_read: bool
    is_known: bool
    # the report has a line if it is not read
    matters: bool
    # it may name the run of the call, and names it even if it is empty
    names_run: bool
    names_empty: bool
    # it may tell runs apart; also those that have one name
    tells: bool
    tells_more: bool


class Table:
    """A format with a user's mapping: reads the objects of a file."""

    def __init__(
        self, format: Format, given: Map | None, encoder: "Encoder | None", head: Head
    ) -> None:
        self.format, self._encoder, self._head = format, encoder, head
        given, base = given or Map({}), mapping.read_map(format.map or "each=")
        self.own = given.fields
        self.routes = {**_COMMON, **base.fields, **self.own}
        each, only = given.each or base.each or "", given.only or base.only
        self.map = Map(self.routes, each=each, only=only)
        parts = {part for one in self.routes.values() for part in one.parts()}
        self._read = {(part.keys, part.outer) for part in parts}
        self._read.add(((each.partition(".")[0],), True))
        whole = (self.routes.get(name) for name in ("request", "response"))
        self._whole = {part.keys for one in whole if one for part in one.parts()}
        # an object with a list of calls is a run
        self._origins = bool(each) and (format.alone or given.each is not None)
        mapped = {part.keys for one in self.own.values() for part in one.parts()}
        self._known = mapped | {(name,) for name in format.knows.split()}
        # the same few keys are beside every call
        self._key = lru_cache(1 << 12)(self._key_of)
        # fields of the user's mapping that some record had, or lacked
        self.found, self.lacked = set[str](), set[str]()
        with_ids = {"output_ids", "output_logprobs", "response"}
        self.has_ids = bool(with_ids & self.routes.keys())

    def _key_of(self, path: str, aside: bool, of_root: bool | None) -> _Key:
        """What the path of a record is, or of the object around it; None: both are one."""
        keys, word = tuple(path.split(".")), word_of(path)
        known = (k for k, outer in self._read if of_root is None or outer is of_root)
        reads = {k for k in known if keys[: len(k)] == k or k[: len(keys)] == keys}
        is_read = bool(reads)
        is_known = keys in self._known
        single = not any(map(str.isdecimal, keys))
        tells = single and not is_known and "response" not in keys and len(keys) <= 3
        tells = tells and not NO_NAME.search(word)
        # a reward matters at any depth, and in a request or response that is read
        matters = aside and not is_read and bool(MATTERS.search(word))
        lost = single and not reads - self._whole and bool(REWARDS.search(word))
        return _Key(
            keys=keys,
            word=word,
            is_read=is_read,
            is_known=is_known,
            matters=(matters or lost) and not is_known,
            names_run=names_run(keys, aside),
            names_empty=aside and bool(EMPTY_RUN.fullmatch(word)),
            tells=tells,
            tells_more=tells and not is_read and bool(_MANY.search(word)),
        )

    def shape(self) -> Shape:
        """The long arrays of an object (see `trajkit.files.jsonl`)."""
        shape: dict[str, Any] = {}
        prefix = mapping.keys_of(self.map.each or "")
        if self.format.array:
            _put(shape, self.format.array.split("."), IDS)
        for target, paths in _LONG.items():
            parts = self.routes[target].parts() if target in self.routes else ()
            for part, path in product(parts, paths):
                keys = [*part.keys, *filter(None, path.split("."))]
                kind = ITEMS if "messages" in (path or target) else IDS
                _put(shape, [*prefix, *keys], kind)
                if part.outer:
                    _put(shape, keys, kind)
        return shape

    def calls(self, place: str, value: Value) -> Iterator[Finding]:
        found = Finding(place)
        with found:
            for where, root in self.format.roots(value, self._head.file):
                for one in self._of_root(place + where, root):
                    one.origin = f", {place}" if self._origins else one.origin
                    yield one
        if found.problem:
            yield found

    def _of_root(self, place: str, root: Value) -> Iterator[Finding]:
        calls = list(self._calls(place, root)) if self.has_ids else []
        # text for supervised training
        if self._encoder is not None and not any(map(_has_ids, calls)):
            if self.format.talk is not None and isinstance(root, dict):
                calls = list(self._talk(place, root))
            else:
                for call in calls:
                    self._encoder.encode(call)
        for call in calls:
            if not call.problem:
                call.detail = self.format.ids
        yield from calls

    def _calls(self, place: str, root: Value) -> Iterator[Finding]:
        records = list(self.map.records(root, place))
        if self.format.order and self.map.each:
            order = route(self.format.order)
            records.sort(key=lambda pair: str(order.find(pair[1]) or ""))
        for where, record in records:
            found = Finding(where)
            with found:
                names = mapping.names_of(self._head.file, where, place)
                yield from [*self._record(found, record, root, names)]
            if found.problem:
                yield found

    def _talk(self, place: str, root: Value) -> Iterator[Finding]:
        """The replies of a conversation, as text."""
        found = Finding(place, origin=f", {place}")
        with found:
            names = mapping.names_of(self._head.file, place)
            self._session(found, root, root, names)
            self._beside(found, root, root)
            self._fill(found, self._values(root, root, names))
            found.tools = parsed(root.get("tools"))
            messages = self.format.talk(root)  # type: ignore[misc]
            yield from self._encoder.replies(found, messages)  # type: ignore[union-attr]
        if found.problem:
            yield found

    def _record(
        self, found: Finding, record: object, root: Value, names: Names
    ) -> Iterator[Finding]:
        """The calls of a record: each choice of a response, or each span of a mask."""
        self._session(found, object_of(record), root, names)
        if not isinstance(record, dict):
            raise Refused(f"a {type(record).__name__}, not an object")
        prepared = self.format.prepare(record)
        if prepared is None:
            return
        root = prepared if record is root else root
        self._beside(found, prepared, root)
        if self.format.alone and found.session is None and not found.run_keys:
            found.session = names["/@name"]
        values = self._values(prepared, root, names)
        found.fields["reward"] = values.get("reward")
        for name in {"prompt_ids", "output_ids"} & self.routes.keys() - self.own.keys():
            _check_same(self.routes[name], prepared, root)
        response, apart = values.get("response"), "response" in self.routes
        error = object_of(response).get("error")
        if error and not has_items(values.get("output_ids")):
            raise Refused(f"the response is an error: {repr(error)[:60]}")
        if not apart or ("output_ids" in self.routes and not is_answer(response)):
            self._fill(found, values)
            yield from _spans(found, values.get("output_mask"))
            return
        if not isinstance(response, dict | list):
            streamed = str(response).lstrip().startswith("data:")
            text = _STREAMED if streamed else "no request, or no response"
            raise Refused(text)
        parts = self.routes["response"].parts()
        has = (part for part in parts if part.find(prepared, root, {}) is not None)
        at = f"{'.'.join(next(has).keys)}.".removeprefix("@self.")
        yield from self._answers(found, values, at)

    def _answers(self, found: Finding, values: Value, at: str) -> Iterator[Finding]:
        """The calls of a response, whose path is ``at``."""
        # what a mapping names counts before what a response has
        first = {*self.own, "request_id", "model", "prompt_messages"}
        kept = {name: values[name] for name in first if values.get(name) is not None}
        choices = _choices(object_of(values.get("request")), values["response"])
        taken = [*islice(choices, self.format.most_choices)]
        mask = kept.get("output_mask")
        for suffix, around in taken:
            copy = found.copy(suffix, first=not suffix)
            copy.claims += found.claims * (len(taken) == 1)
            with copy:
                own = _of_choice(copy, around, at, masked=mask is not None)
                self._fill(copy, {**values, **own, **kept})
            yield from [copy] if mask is None or copy.problem else _spans(copy, mask)

    def _values(self, record: Value, root: Value, names: Names) -> Value:
        routes = self.routes.items()
        values = {name: one.find(record, root, names) for name, one in routes}
        for name in _STRUCTURED & values.keys():
            values[name] = parsed(values[name])
        if "prompt_messages" not in self.own:
            values["prompt_messages"] = list_of(values.get("prompt_messages")) or None
        for name in self.own:
            (self.lacked if values.get(name) is None else self.found).add(name)
        return values

    def _session(self, found: Finding, record: Value, root: Value, at: Names) -> None:
        value = self.routes["session_id"].find(record, root, at)
        found.session = text_of(value)
        if found.session is None and not is_nothing(value):
            raise Refused(f"its session is {value!r}: expected text or an integer")
        if found.session is None and "session_id" in self.own:
            raise Refused(f"it has no {self.own['session_id'].text}", "no_session_id")

    def _beside(self, found: Finding, record: Value, root: Value) -> None:
        """Keep what may name the run, what no field reads, masks and numbers of tokens."""
        found.claims += claims_of(record, "", only=False)
        for outer in (record,) if root is record else (root, record):
            of_root = None if root is record else outer is root
            slash, is_response = "/" * (outer is not record), is_answer(outer)
            for path, value, aside, beside in facts_of(outer, whole=outer is record):
                key, at = self._key(path, aside, of_root), f"{slash}{path}"
                # a response has an id itself
                own = path == "id" and is_response
                own = own or (self.format.alone and key.is_read)
                if found.session is None and not own:
                    empty = key.names_empty and is_nothing(value)
                    if empty or (key.names_run and is_name(value)):
                        found.run_keys[at] = value
                broken = is_broken(path, value) or is_failed(path, value)
                if beside and len(key.keys) <= 2 and not key.is_known and broken:
                    found.remark("aborted", f"{at} is {repr(value)[:60]}")
                elif key.matters and not is_empty(value):
                    found.unread[at] = value
                if outer is not record:
                    continue
                if beside and isinstance(value, list | str) and value:
                    found.masks[path] = value
                elif beside and isinstance(value, dict):
                    only = meaning_of(path).is_usage
                    found.claims += claims_of(value, path, only=only)
                tells = key.tells if found.session is None else key.tells_more
                if tells and (text := text_of(value)):
                    found.names[path] = text

    def _fill(self, found: Finding, values: Value) -> None:
        """Make the fields of a call from the values of a mapping.

        Without ``output_logprobs``, there may be several ``@sources`` of them.
        """
        fields = found.fields
        fields |= {name: values.get(name) for name in _PLAIN}
        for name, (convert, rule) in _CONVERTED.items():
            value = values.get(name)
            fields[name] = convert(value)
            is_stated = not is_empty(value) and number_of(value) != 0
            if rule and fields[name] is None and is_stated:
                found.unread[f"{self._text(name)} (expected {rule})"] = value
                # whether it trains is not guessed
                fields[name] = False if name == "trainable" else None
        reply = values.get("response_message")
        if reply and isinstance(reply, str):
            text = "its reply is text: an assistant's message has it"
            found.remark("text_reply", text)
        fields["prompt_messages"] = mapping.without_reply(fields, self.routes)
        fields["reward"] = reward = self._reward(found, values.get("reward"))
        if reward is not None:
            found.names = {**found.names, "reward": str(reward)}
        given = values.get("output_logprobs")
        sources = values.get("@sources", ()) if given is None else [given]
        output, logprobs = _aligned(found, values.get("output_ids"), sources)
        fields["output_ids"], fields["output_logprobs"] = output, logprobs
        n = len(output) if is_array(output) else 0
        found.tools = values.get("tools")
        found.claims += claims_of(object_of(values.get("usage")), self._text("usage"))
        fields["weight_versions"] = _versions(found, values, n)
        found.unread |= media_of(fields["prompt_messages"], values.get("request"))
        prompt = fields["prompt_ids"]
        first = len(prompt) if is_array(prompt) else 0
        masks = {**found.masks, **found.unread}
        for path, value in masks.items() if values.get("output_mask") is None else ():
            if n and marks_tokens(path, value, first, n):
                text = f"{path} marks some of its tokens, as sampled or as trained"
                option = mapping.map_option("output_mask", path)
                # others mark the contrary, or padding
                if option and is_taken_mask(path, value, first, n):
                    text += f": {option} takes it, if it says which were sampled"
                found.remark("mask_unread", text)
                fields["trainable"] = False

    def _reward(self, found: Finding, given: Any) -> float | None:
        value = self.format.reward(given)
        number = number_of(value)
        if number is None and (not isinstance(value, list | dict | None) or value):
            path = self._text("reward").split("|")[0]
            text = f"{path} is {reprlib.repr(value)}: expected a finite number"
            option = mapping.reward_option(path, given, self.format.reward)
            text += f"; {option} takes a part of it" if option else ""
            found.remark("reward_unread", text)
        return number

    def _text(self, name: str) -> str:
        return self.routes[name].text if name in self.routes else name


def _reason(value: object) -> str | None:
    # SGLang's is an object with a type; a sentence is the text of an error
    text = text_of(object_of(value).get("type", value))
    return None if text is None or re.search(r"\s", text) else text


# the fields of a call that are the values themselves
_PLAIN = ("prompt_ids", "delta_ids", "prompt_messages", "turn_index")
# those that follow from one value each, and what that may be, if the report has a line
# about other values; no option takes a path with a comma
_TEXT_RULE, _TIME_RULE = "text, or an integer", "ISO text with a zone, or seconds"
_CONVERTED: Mapping[str, tuple[Callable[[Any], object], str]] = {
    **dict.fromkeys(
        ("agent_id", "group_id", "request_id", "model"), (text_of, _TEXT_RULE)
    ),
    **dict.fromkeys(("parent", "parent_resolution"), (text_of, "")),
    **dict.fromkeys(("started_at", "ended_at"), (time_of, _TIME_RULE)),
    "trainable": (flag_of, "true, false, 1 or 0"),
    "finish_reason": (_reason, "a word, or an object with a type"),
    "response_message": (mapping.reply_of, "a message, or text"),
}


def _has_ids(found: Finding) -> bool:
    names = ("prompt_ids", "output_ids", "delta_ids")
    return any(has_items(found.fields.get(name)) for name in names)


def _versions(found: Finding, values: Value, n: int) -> list[Value] | None:
    """The weight versions of an output; several without lengths have no place."""
    version: Any = values.get("weight_version")
    given: Any = values.get("weight_versions")
    given = list(given) if n and has_items(given) else []
    if given and all(isinstance(one, dict) for one in given):
        return [
            {"version": text_of(one.get("version")), "start": one.get("start")}
            | {"stop": one.get("end", one.get("stop"))}
            for one in given
        ]
    several = sorted({str(text_of(one)) for one in given})
    if len(several) > 1:
        found.remark("versions_unplaced", ", ".join(several))
        return None
    version = given[0] if given else version
    # one per token
    listed = version if isinstance(version, list) else [version] * n
    pieces, start = list[Value](), 0
    for name, run in groupby(map(text_of, listed if len(listed) == n else ())):
        stop = start + len(list(run))
        pieces.append({"version": name, "start": start, "stop": stop})
        start = stop
    return pieces if any(piece["version"] for piece in pieces) else None


def _between(pieces: list[Value], start: int, stop: int) -> list[Value]:
    """The pieces of versions in a range, counted from its start."""
    try:
        shared = [
            (one, max(one["start"], start), min(one["stop"], stop)) for one in pieces
        ]
    except TypeError:
        raise Refused("its weight_versions have no places") from None
    return [
        {**one, "start": a - start, "stop": b - start} for one, a, b in shared if a < b
    ]


def _spans(found: Finding, mask: Any) -> Iterator[Finding]:
    """The calls of a training row: the spans under its mask, each with what is before."""
    fields = found.fields
    output, prompt = fields["output_ids"], fields["prompt_ids"]
    if mask is None or not is_array(output) or not is_array(prompt):
        yield found
        return
    listed = mask.tolist() if isinstance(mask, np.ndarray) else mask
    if not isinstance(listed, list) or any(flag not in (0, 1) for flag in listed):
        raise Refused("a mask that is not of 0 and 1")
    flags, first = np.array(listed, np.bool_), len(prompt)
    if len(flags) == first + len(output) and not flags[:first].any():
        flags = flags[first:]
    if len(flags) != len(output):
        raise Refused(f"a mask of {len(flags)} for {len(output)} output ids")
    if len(output) and not flags.any():
        raise Refused("its mask is empty", "no_output_ids")
    if flags.all():
        yield found
        return
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)).reshape(-1, 2)
    row = [*prompt, *output]
    logprobs, versions = fields["output_logprobs"], fields["weight_versions"]
    for k, (start, stop) in enumerate(edges.tolist()):
        # counts of the source are those of the row; its reply is none of one span
        one = found.copy(f", span {k}" if len(edges) > 1 else "")
        one.fields |= {
            "prompt_ids": row[: first + start],
            "output_ids": row[first + start : first + stop],
            "output_logprobs": logprobs[start:stop] if has_items(logprobs) else None,
            **dict.fromkeys(("response_message", "prompt_messages")),
        }
        if versions is not None:
            one.fields["weight_versions"] = _between(versions, start, stop)
        if stop < len(output):
            one.fields["finish_reason"] = None
        yield one


def _put(shape: dict[str, Any], keys: list[str], kind: str) -> None:
    for key in keys[:-1]:
        shape = shape.setdefault(key, {})
        if not isinstance(shape, dict):
            return
    shape.setdefault(keys[-1], kind)


def _check_same(where: Route, record: Value, root: Value) -> None:
    """Refuse a record that has other ids under another name of the same."""
    known = [(part, part.find(record, root, {})) for part in where.parts()]
    known = [(part, one) for part, one in known if has_items(one)]
    for part, one in known[1:]:
        if not np.array_equal(np.asarray(one), np.asarray(known[0][1])):
            names = " and ".join(".".join(each.keys) for each in (known[0][0], part))
            raise Refused(f"{names} differ: --map FIELD=PATH names the ids that count")


# --- text

_Talk: TypeAlias = list[dict[str, Any]]


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer with a chat template, as transformers has them."""

    def apply_chat_template(
        self,
        conversation: list[dict[str, object]],
        *,
        tools: object,
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> object:
        """The text that the template makes of messages."""


class Encoder:
    """Makes calls of text that no engine sampled, with a tokenizer's chat template.

    The prompt of a reply is the template's text of the messages before it. Its output is
    what an engine would sample: the template's text of the reply, with the token that ends
    it. ``sampled`` is false, ``call_kind`` is "transcript", and there are no logprobs.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer, self._codec = tokenizer, Codec(tokenizer)
        template = getattr(tokenizer, "chat_template", "")
        if not hasattr(tokenizer, "apply_chat_template") or template is None:
            raise ArgumentError(
                "tokenizer has no chat template: pass one like those of transformers, with "
                "its chat_template set (--chat-template FILE)"
            )
        # some models mark their roles with added tokens that are not special
        added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
        self._added = {*added.values()}
        special = self._codec.special(np.array([*added.values()], np.int32))
        marks = (re.escape(x) for x, one in zip(added, special, strict=True) if one)
        # a reply may end with its own end token
        self._marks = re.compile(f'({"|".join(marks) or "(?!)"})(?!")')

    def replies(self, found: Finding, conversation: object) -> Iterator[Finding]:
        messages = [object_of(one) for one in list_of(conversation)]
        roles = [one.get("role") for one in messages]
        replies = [k for k, role in enumerate(roles) if role == "assistant"]
        if not replies:
            raise Refused("it has no reply", "no_output_ids")
        for k in replies:
            one = found.copy(f", message {k}", first=k == replies[0])
            one.fields["prompt_messages"] = messages[:k]
            one.fields["response_message"] = messages[k]
            for name in messages[k].keys() & {"weight", "train", "trainable", "loss"}:
                if flag_of(value := messages[k][name]) is not True:
                    one.fields["trainable"] = False
                    if flag_of(value) is None:
                        one.unread[f"messages.{name} (expected 0 or 1)"] = value
            self.encode(one, messages[k + 1 : k + 2])
            yield one

    def encode(self, found: Finding, following: _Talk | None = None) -> None:
        """Add the ids of its text to a call with messages and without ids."""
        if found.problem:
            return
        with found:
            before = found.fields.get("prompt_messages")
            reply = found.fields.get("response_message")
            if not isinstance(before, list) or not before:
                raise Refused("no message comes before it", "no_prompt_ids")
            if not isinstance(reply, dict):
                raise Refused("it has no reply", "no_output_ids")
            if spelled := self._marks.search(json.dumps([*before, reply])):
                text = f"a message spells {spelled[1]}, a token of the template"
                raise Refused(text, "refused")
            prompt = self._text(before, found, asks=True)
            complete = self._text([*before, reply], found)
            if not complete.startswith(prompt):
                text = "with the reply, the template renders another prompt"
                raise Refused(text, "not_a_prefix")
            output = self._codec.ids(complete[len(prompt) :])
            end = self._end_token([*before, reply], found, following)
            # what the source counted are other tokens
            found.claims.clear()
            found.fields |= {
                "prompt_ids": self._codec.ids(prompt),
                "output_ids": self._ended(output, end, found),
                "call_kind": "transcript",
                "sampled": False,
            }
            found.remark("not_sampled")

    def _ended(self, output: Ids, end: int | None, found: Finding) -> Ids:
        ends = self._codec.special(output)
        if end is not None:
            ends |= output == end
        # what follows an end token, such as a line feed, is the template's
        for last in np.flatnonzero(ends)[-1:].tolist():
            if not self._codec.text(output[last + 1 :]).strip():
                return output[: last + 1]
        if end is None:
            found.remark("no_end_token", "no special token ends the reply")
            return output
        return np.append(output, np.int32(end))

    def _end_token(
        self, talk: _Talk, found: Finding, following: _Talk | None
    ) -> int | None:
        """The token with which the template ends a reply, or else begins the next role."""
        short = [{"role": role, "content": "x"} for role in ("user", "assistant")]
        closing = self._more(short[:1], short, found, asks=True).partition("x")[2]
        if closing.strip():
            return self._marker(closing.lstrip())
        role = "tool" if talk[-1].get("tool_calls") else "user"
        following = following or [{"role": role, "content": "x"}]
        # what a later message makes of a reply may differ: of its reasoning, above all
        for messages in (talk, short):
            if more := self._more(messages, [*messages, *following], found):
                return self._marker(more)
        return None

    def _more(
        self, talk: _Talk, longer: _Talk, found: Finding, *, asks: bool = False
    ) -> str:
        """The text with which a longer talk goes on; empty if it changes the shorter."""
        try:
            text, whole = self._text(talk, found, asks=asks), self._text(longer, found)
        except Refused:
            return ""
        return whole.removeprefix(text) if whole.startswith(text) else ""

    def _marker(self, text: str) -> int | None:
        """The first token of a text, if it is a special token or an added one."""
        ids = self._codec.ids(text)[:1]
        if len(ids) and (self._codec.special(ids)[0] or int(ids[0]) in self._added):
            return int(ids[0])
        return None

    def _text(self, talk: _Talk, found: Finding, *, asks: bool = False) -> str:
        options: Any = {"tools": found.tools, "add_generation_prompt": asks}
        try:
            plain = [*map(_plain, talk)]
            made = self._tokenizer.apply_chat_template(plain, tokenize=False, **options)
        except Refused:
            raise
        # a template may raise an error of jinja2, or anything in its filters
        except Exception as error:
            raise Refused(str(error), "refused") from None
        return str(made)


def _plain(message: Value) -> Value:
    """A message with one text for its parts, as engines give it to most templates."""
    parts = [*map(object_of, list_of(message.get("content")))]
    if odd := [one for one in parts if not isinstance(one.get("text"), str)]:
        kind = odd[0].get("type")
        raise Refused(f"a message has a part of type {kind!r}: only text is encoded")
    texts = "\n".join(str(one["text"]) for one in parts)
    return {**message, "content": texts} if parts else message


# --- responses of engines


def is_answer(value: object) -> bool:
    """Whether a value looks like a response of an engine, or a list of them."""
    value = value[0] if isinstance(value, list) and value else value
    return bool(object_of(value).keys() & {"choices", "output_ids", "meta_info"})


def _choices(request: Value, response: object) -> Iterator[tuple[str, Value]]:
    """A suffix of the place, and request, response, choice and usage, of each choice.

    SGLang answers ``n`` samples, or a list of prompts, with a list.
    """
    listed = response if isinstance(response, list) else [response]
    if any(map(_is_chunk, listed)):
        raise Refused(_STREAMED)
    prompts = list_of(request.get("input_ids"))
    for k, one in enumerate(listed):
        if prompts and isinstance(prompts[0], list):
            # if their numbers differ, it is unknown which prompt is that of an answer
            own = prompts[k] if len(prompts) == len(listed) else None
            request = {**request, "input_ids": own}
        answer = object_of(one)
        choices = answer.get("choices")
        choices = (choices or [{}]) if isinstance(choices, list) else [one]
        # of several, nothing says how often the prompt counts
        usage = answer.get("usage") if len(choices) == 1 else None
        around = {"request": request, "response": answer, "usage": usage}
        place = f", choice {k}" if k else ""
        for j, choice in enumerate(choices):
            yield f"{place}, choice {j}" if j else place, {**around, "choice": choice}


def _is_chunk(answer: object) -> bool:
    meta = object_of(object_of(answer).get("meta_info"))
    choices = list_of(object_of(answer).get("choices"))
    unfinished = "finish_reason" in meta and meta["finish_reason"] is None
    return unfinished or any("delta" in object_of(choice) for choice in choices)


def _of_choice(found: Finding, around: Value, at: str, *, masked: bool) -> Value:
    """The values of a choice; what is beside its ids goes to the call."""
    choice = around["choice"]
    if not isinstance(choice, dict):
        raise Refused("an answer, or a choice of it, is not an object")
    meta = object_of(choice.get("meta_info"))
    found.claims += claims_of(meta, "meta_info")
    if choice is not around["response"] and not masked:
        place = f"{at}choices.{choice.get('index', 0)}."
        near = (pair[:2] for pair in facts_of(choice, whole=True) if pair[3])
        masks = {f"{place}{path}": one for path, one in near}
        found.masks = {**found.masks, **masks}
        named = [p for p in masks if "mask" in p or REWARDS.search(word_of(p))]
        facts = {p: masks[p] for p in named if not is_empty(masks[p])}
        found.unread = {**found.unread, **facts}
    values: Value = {name: one.find(around) for name, one in _OF_ANSWER.items()}
    return {
        **values,
        "prompt_messages": unless_empty(values["prompt_messages"]),
        "output_logprobs": None,
        "@sources": [choice.get("logprobs"), {"content": meta.get(_NATIVE)}],
    }


def _aligned(
    found: Finding, output: Any, sources: Iterable[object]
) -> tuple[Any, list[Any] | None]:
    """An output, and the logprobs that belong to it.

    Without an output, logprobs that name every id are a source of ids, too.
    """
    given = map(mapping.logprobs_of, sources)
    known = [one for one in given if one is not None]
    if output is None:
        return next((one for one in known if one[0] is not None), (None, None))
    if not known or not is_array(output):
        for odd in sources if is_array(output) else ():
            if not all(map(is_empty, odd.values() if isinstance(odd, dict) else [odd])):
                text = f"their form is unknown: {reprlib.repr(odd)}"
                found.remark("logprobs_unaligned", text)
        return output, None
    listed = output.tolist() if isinstance(output, np.ndarray) else output
    for ids, logprobs in known:
        if len(logprobs) == len(listed) and (ids is None or ids == listed):
            return output, logprobs
    n = len(known[0][1])
    text = f"{n} logprobs for {len(listed)} output ids"
    if n == len(listed):
        text = "they belong to other ids than the output"
    found.remark("logprobs_unaligned", text)
    return output, None


# --- the formats

# how engines give token ids
_ENGINES = (
    "record the engine's responses to requests with return_token_ids and logprobs (vLLM), "
    "or with return_token_ids, return_prompt_token_ids, return_meta_info and logprobs "
    "(SGLang); `trajkit serve` asks for them itself"
)
_PROMPT, _OUTPUT = SPELLED["prompt_ids"], SPELLED["output_ids"]
_LOGPROBS = SPELLED["output_logprobs"]
_NOT_CHAT = ("response", "nodes", "trajectory", "trace_id", "choices", "steps")
_ROLES = {name: name for name in ("system", "user", "assistant", "tool")}
_ROLES |= {"human": "user", "gpt": "assistant"}
# trajectories within trajectories
_MOST_DEEP = 32


# keys that Polar writes instead of a field larger than a mebibyte
_CUT = {"__truncated", "_truncated_keys_omitted"}


def _polar(record: Value) -> Value:
    parts = map(record.get, ("transformed_request", "request", "response"))
    pending: list[object] = [dict.fromkeys(record), *parts]
    while pending:
        within = pending.pop()
        if not _CUT.isdisjoint(object_of(within)):
            raise Refused("Polar truncates fields larger than a mebibyte", "truncated")
        pending += object_of(within).values() or list_of(within)
    return record


# TOKEN_ENTRY_RECORD_SCHEMA_VERSION; a newer version may have other meanings
_NEWEST_GYM = 5


def _gym(record: Value) -> Value:
    version = record.get("schema_version", _NEWEST_GYM)
    if type(version) is not int or not 1 <= version <= _NEWEST_GYM:
        text = f"schema_version {version}: expected 1 to {_NEWEST_GYM}"
        raise Refused(text, "other_version")
    if "staging_key" in record:
        text = "its token ids are in another store (staging_key)"
        raise Refused(text, "no_prompt_ids")
    if not record.get("prompt_is_delta"):
        return record
    return {**record, "prompt_token_ids": None, "delta": record.get("prompt_token_ids")}


# finish reason by Sample.Status of slime
_STATUS = {"completed": "stop", "truncated": "length", "aborted": "abort"}


def _slime(record: Value) -> Value:
    tokens: Any = record.get("tokens")
    length = record.get("response_length")
    if not is_array(tokens):
        raise Refused(f"its tokens are {reprlib.repr(tokens)}", "no_prompt_ids")
    if type(length) is not int or not 0 <= length <= len(tokens):
        raise Refused(f"response_length {length!r} of {len(tokens)} tokens")
    return {
        **record,
        "prompt_ids": tokens[: len(tokens) - length],
        "output_ids": tokens[len(tokens) - length :],
        "finish_reason": _STATUS.get(str(record.get("status")), record.get("status")),
        "trainable": False if record.get("remove_sample") else None,
    }


def _atif(record: Value) -> Value | None:
    if record.get("is_copied_context") is True:
        raise Refused("it was copied from an earlier trajectory", "copied")
    calls = record.get("llm_call_count", 1)
    if type(calls) is int and calls > 1:
        raise Refused(f"it sums up {calls} calls (llm_call_count)")
    return None if type(calls) is int and calls == 0 else record


def _atif_roots(root: Value, file: Path) -> Iterator[tuple[str, Value]]:
    """The trajectories of a file of Harbor; rewards are in the result of their trial."""
    version = str(root.get("schema_version", ""))
    if "steps" not in root:
        yield from _trial(root, file)
        return
    if not re.match(r"(ATIF-v1\.|ATIF$|$)", version):
        raise Refused(f"schema_version {version}: expected ATIF-v1", "other_version")
    folders = (file.parent, file.parent.parent)
    results = [object_of(_json_at(folder / "result.json")) for folder in folders]
    result = next((one for one in results if "verifier_result" in one), {})
    yield from _trajectories({**_of_trial(result), **root})


def _trajectories(root: Value, depth: int = 0) -> Iterator[tuple[str, Value]]:
    """A trajectory and the trajectories of its sub-agents, as of one session."""
    yield "", root
    session = root.get("session_id") or root.get("trajectory_id")
    within = list_of(root.get("subagent_trajectories")) if depth < _MOST_DEEP else []
    for k, below in enumerate(map(object_of, within)):
        agent = below.get("trajectory_id") or object_of(below.get("agent")).get("name")
        own = {"session_id": below.get("session_id") or session, "@agent": agent}
        for where, one in _trajectories({**below, **own}, depth + 1):
            yield f", subagent {k}{where}", one


def _trial(result: Value, file: Path) -> Iterator[tuple[str, Value]]:
    """Harbor's result of a trial, whose rollout_details are lists of calls.

    https://github.com/laude-institute/harbor, src/harbor/models/trial/result.py
    """
    info = object_of(result.get("agent_info"))
    model = object_of(info.get("model_info")).get("name")
    root = _of_trial(result) | {"session_id": result.get("trial_name")}
    root["agent"] = {"name": info.get("name"), "model_name": model}
    for folder in (file.parent / "agent", file.parent):
        beside = object_of(_json_at(folder / "trajectory.json"))
        steps = map(object_of, list_of(beside.get("steps")))
        if any(object_of(x.get("metrics")).get("completion_token_ids") for x in steps):
            raise Refused("trajectory.json has its calls", "copied")
    results = [result, *map(object_of, list_of(result.get("step_results")))]
    agents = (object_of(one.get("agent_result")) for one in results)
    details = [one for agent in agents for one in list_of(agent.get("rollout_details"))]
    listed = ("prompt_token_ids", "completion_token_ids", "logprobs")
    for k, detail in enumerate(map(object_of, details or [{}])):
        lists = {name: v for name, v in detail.items() if isinstance(v, list)}
        n = max((len(lists.get(name, ())) for name in listed), default=0)
        # what is not of each call, such as a mask of all tokens, is of all
        of_calls = {
            name: [*v, *[None] * (n - len(v))]
            for name, v in lists.items()
            if len(v) == n or name in listed
        }
        rows = ({**detail, **{x: v[j] for x, v in of_calls.items()}} for j in range(n))
        calls: list[Value] = [{"source": "agent", "metrics": one} for one in rows]
        # others than the first are of sub-agents, or follow a summary
        agent = {"@agent": f"{info.get('name')}, segment {k}"} if k else {}
        calls = calls or [{"source": "agent"}]
        yield f", segment {k}" * bool(k), {**root, **agent, "steps": calls}


def _of_trial(result: Value) -> Value:
    verifier = object_of(result.get("verifier_result"))
    given = verifier.get("rewards")
    rewards = verifier.get("reward") if given in (None, {}) else given
    found = {
        "group_id": result.get("task_name"),
        "verifier_result": {"rewards": object_of(rewards).get("reward", rewards)},
        "exception_info": result.get("exception_info"),
    }
    return {name: one for name, one in found.items() if one is not None}


def _json_at(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


_GRADES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_GRADES |= {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


def _score(value: Any) -> Any:
    """The number of a score, as Inspect's ``value_to_float`` has it; else the score.

    https://github.com/UKGovernmentBEIS/inspect_ai/blob/03ed3dda08/src/inspect_ai/scorer/_metric.py
    """
    given = object_of(value)
    if len(given) == 1 and "value" not in given:
        given = object_of(next(iter(given.values())))
    value = given.get("value", value)
    if isinstance(value, str):
        with suppress(ValueError):
            return float(_GRADES.get(value, _GRADES.get(value.lower(), value)))
    return float(value) if isinstance(value, bool) else value


def _span(record: Value) -> Value | None:
    """A span of a model's call, with its attributes as an object; None for any other."""
    named = mapping.by_key(record.get("attributes"))
    marks = ("gen_ai." in str(name)[:7] or "token_ids" in str(name) for name in named)
    others = ("execute_tool", "invoke_agent", "create_agent")
    if not any(marks) or named.get("gen_ai.operation.name") in others:
        return None
    times = (str(record.get(f"{name}TimeUnixNano")) for name in ("start", "end"))
    known = (int(t) if re.fullmatch("[0-9]{1,20}", t) else None for t in times)
    start, end = (None if ns is None else ns / 1e9 for ns in known)
    error = record.get("error", named.get("error.type"))
    return {**record, "attributes": named, "error": error, "@start": start, "@end": end}


_NO_IDS = np.empty(0, np.int32)


def _graph(trace: Value, _: Path) -> Iterator[tuple[str, Value]]:
    """A trace of verifiers or prime-rl, a graph of messages, with its calls.

    A node has a message and the ids that it adds. A sampled node is a call, and the ids on
    the path to it are its prompt.
    """
    listed = trace.get("nodes")
    nodes = list(map(object_of, list_of(listed)))
    recorded = map(object_of, list_of(trace.get("calls")))
    of_node = {call["node"]: call for call in recorded if type(call.get("node")) is int}
    # of each node, the ids (None: unknown) and the messages on the path to it, and the
    # tools of its root, which has those of its requests from 0.4.0 on
    paths: list[tuple[np.ndarray | None, list[object], object]] = []
    calls: Value = {}
    for k, node in enumerate(nodes):
        parent, message = node.get("parent"), node.get("message")
        before, messages, tools = None, list[object](), node.get("tools")
        if parent is None:
            before = _NO_IDS
        elif isinstance(parent, int) and 0 <= parent < k:
            before, messages, tools = paths[parent]
        given = unless_empty(node.get("token_ids"))
        ids = _NO_IDS if given is None else given
        if isinstance(ids, list) and {*map(type, ids)} == {int}:
            ids = np.array(ids)
        # the ids of a reply without ids cannot be known
        reply = object_of(message).get("role") == "assistant"
        known = before is not None and isinstance(ids, np.ndarray)
        known = known and (len(ids) > 0 or not reply)
        path = np.concatenate([before, ids]) if known else None
        paths.append((path, [*messages, message], tools))
        if node.get("sampled") is True:
            call = of_node.get(k, {})
            calls[f"node {k}"] = {
                **node,
                "call": {**call, "usage": _all_prompt(object_of(call.get("usage")))},
                "prompt_messages": messages,
                "tools": trace.get("tools") if tools is None else tools,
                "@before": before,
                "token_ids": ids,
            }
    yield "", {**trace, "@calls": calls if isinstance(listed, list) else [listed]}


def _of_node(node: Value) -> Value:
    """Prompt, output and logprobs; the node's mask marks sampled ids."""
    before, ids = node.get("@before"), node.get("token_ids")
    mask = list_of(node.get("mask"))
    if not isinstance(ids, np.ndarray):
        raise Refused("token_ids are not ids")
    if before is None:
        raise Refused("a message before it has no ids", "no_prompt_ids")
    if not all(isinstance(flag, int) for flag in mask):
        raise Refused("a mask that is not of booleans")
    if len(mask) != len(ids):
        raise Refused(f"a mask of {len(mask)} for {len(ids)} token_ids")
    start = len(ids) - sum(map(bool, mask))
    if not all(mask[start:]):
        raise Refused("its sampled ids are not at the end of its token_ids")
    read = ("@before", "token_ids", "mask")
    return {
        **{name: one for name, one in node.items() if name not in read},
        "prompt_ids": np.concatenate([before, ids[:start]]),
        "output_ids": ids[start:] if start < len(ids) else None,
    }


def _all_prompt(usage: Value) -> Value:
    """The usage of a call, whose prompt_tokens lack those that were cached."""
    counts = [usage.get("prompt_tokens"), usage.get("cached_input_tokens") or 0]
    if not all(type(count) is int for count in counts):
        return usage
    return {**usage, "prompt_tokens": sum(counts)}


def _sum_of(rewards: Any) -> Any:
    """The sum of a trace's weighted rewards; the rewards if one of them is no number."""
    total = 0.0
    several = {"": rewards} if "score" in object_of(rewards) else object_of(rewards)
    for reward in several.values():
        # earlier versions have the weighted number
        parts = reward if isinstance(reward, dict) else {"score": reward}
        score, weight = number_of(parts.get("score")), number_of(parts.get("weight", 1))
        if score is None or weight is None:
            return rewards
        total += score * weight
    return total if several else rewards


def _talk_at(*names: str) -> Callable[[Value], object]:
    """The messages under the first of the keys that an object has, in OpenAI's form."""

    def messages(root: Value) -> object:
        listed = next((root[name] for name in names if name in root), None)
        if not isinstance(listed, list):
            raise Refused(f"its messages are a {type(listed).__name__}, not a list")
        talk = [_message(k, one) for k, one in enumerate(listed)]
        roles, system = [one["role"] for one in talk], text_of(root.get("system"))
        first = [{"role": "system", "content": system}] if system else []
        return talk if roles[:1] == ["system"] else first + talk

    return messages


def _message(k: int, one: object) -> Value:
    if not isinstance(one, dict):
        raise Refused(f"message {k} is a {type(one).__name__}, not an object")
    if "from" in one and "role" not in one:
        role = _ROLES.get(str(one["from"]))
        if role is None:
            text = f"message {k} is from {one['from']!r}: expected one of "
            raise Refused(text + ", ".join(_ROLES))
        return {"role": role, "content": one.get("value")}
    if not isinstance(one.get("role"), str):
        raise Refused(f"message {k} has no role")
    return one


def _within(prefixes: str, paths: str) -> str:
    below = paths.split("|")
    return "|".join(f"{at}{path}" for at in prefixes.split("|") for path in below)


def _has_lists(value: Value) -> bool:
    # a response of an engine has more than its ids
    if list_of(value.get("choices")) or value.keys() >= {"output_ids", "meta_info"}:
        return False
    found = (route(paths).find(value) for paths in (_PROMPT, _OUTPUT))
    return all(is_array(parsed(one)) for one in found)


_SESSION = "session_id|metadata.session_id"

_ALL = [
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
        by_folder=True,
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
        knows="schema_version fingerprint_version parent_resolution_reason",
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
        roots=_graph,
        array="nodes.*.token_ids",
        map="""each=@calls, session_id=/id, agent_id=/agent.name,
            group_id=/task.key|/task.hash, trainable=/agent.trainable, reward=/rewards,
            prompt_ids=prompt_ids, output_ids=output_ids, output_logprobs=logprobs,
            prompt_messages=prompt_messages, response_message=message, tools=tools,
            finish_reason=call.finish_reason|finish_reason, model=call.model,
            started_at=call.time.start, ended_at=call.time.end, usage=call.usage""",
        prepare=_of_node,
        alone=True,
        reward=_sum_of,
        knows="version parent",
        ids='verifiers records token ids for clients of type "renderer" or "train"; its '
        "evaluations through other endpoints have text only",
    ),
    Format(
        "slime",
        "a dump of slime's --save-debug-rollout-data",
        containers="pickle",
        map="""session_id=@session, prompt_ids=prompt_ids, output_ids=output_ids,
            output_logprobs=rollout_log_probs, output_mask=loss_mask,
            finish_reason=finish_reason, trainable=trainable,
            group_id=group_index|group_id, weight_versions=weight_versions""",
        prepare=_slime,
        knows="index rollout_id remove_sample response_length tokens label status",
    ),
    Format(
        "atif",
        "a trajectory of Harbor (ATIF), or the result.json of its trial",
        keys=("schema_version steps", "trial_name verifier_result"),
        test=lambda value: str(value.get("schema_version", "ATIF")).startswith("ATIF"),
        roots=_atif_roots,
        map="""each=steps, only=source=agent, session_id=/session_id|/trajectory_id,
            agent_id=/@agent|/agent.name, model=model_name|/agent.model_name,
            prompt_ids=metrics.prompt_token_ids,
            output_ids=metrics.completion_token_ids, output_logprobs=metrics.logprobs,
            usage=metrics, reward=/verifier_result.rewards|/extra.reward|/reward,
            started_at=started_at, ended_at=timestamp""",
        prepare=_atif,
        alone=True,
        by_folder=True,
        knows="step_id schema_version",
        ids="Harbor's agents write them with collect_rollout_details=true (--agent-kwarg), "
        f"if the engine returns them: {_ENGINES}",
    ),
    Format(
        "inspect",
        "an Inspect log",
        keys=("eval samples", "epoch events", "epoch messages"),
        containers="inspect json",
        roots=lambda log, _: elements(log, "samples"),
        map="""each=events, only=event=model, session_id=/uuid|/id+/epoch, group_id=/id,
            agent_id=role, model=model, reward=/scores|/score, request=call.request,
            response=call.response|output, started_at=timestamp, ended_at=completed""",
        reward=_score,
        alone=True,
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
        "each trajectory (prompt_ids, response_ids, response_mask, response_logprobs, "
        "reward_score, and the batch's uid) as a JSON line, which `trajkit import` reads",
    ),
    Format(
        "verl-loop",
        "an AgentLoopOutput of verl, of one trajectory",
        keys=("prompt_ids response_ids response_mask",),
        map="""session_id=session_id|metadata.session_id, group_id=uid|extra_fields.uid,
            prompt_ids=prompt_ids, output_ids=response_ids, output_mask=response_mask,
            output_logprobs=response_logprobs|rollout_log_probs,
            reward=reward_score|reward""",
        alone=True,
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
            response_message=output, finish_reason=metadata.finish_reason,
            usage=usageDetails|usage_details|usage,
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
        roots=lambda export, _: elements(export, "resourceSpans.*.scopeSpans.*.spans"),
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
            started_at=@start|start_time|startTime, ended_at=@end|end_time|endTime,
            reward=attributes.reward""",
        prepare=_span,
        ids="the conventions of OpenTelemetry for gen_ai have no token ids: set the span's "
        f"attributes prompt_token_ids and response_token_ids, and {_ENGINES}",
    ),
    Format(
        "records",
        "records with token ids at their top",
        test=_has_lists,
        generic=True,
        map=f"""session_id={SPELLED["session_id"]}, prompt_ids={_PROMPT},
            output_ids={_OUTPUT}, output_logprobs={_LOGPROBS}, output_mask=output_mask,
            prompt_messages={SPELLED["prompt_messages"]},
            response_message={SPELLED["response_message"]},
            finish_reason={SPELLED["finish_reason"]}, weight_version=weight_version,
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
        ids=_ENGINES,
    ),
]

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
    return [] if all(map(_is_turn, values)) else every[:1]


def _fits(format: Format, head: Head, value: Value | None) -> bool:
    if head.container in ("pickle", "inspect"):
        return head.container in format.containers
    if value is None or head.container not in format.containers:
        return False
    has_keys = any(value.keys() >= {*names.split()} for names in format.keys or ("",))
    return has_keys and format.test(value)


TURN = {"session_id", "prompt_ids", "output_ids"}


def _is_turn(value: Value | None) -> bool:
    if value is None or not TURN <= value.keys():
        return False
    with suppress(InvalidTurnsError):
        return len(from_records([value])) == 1
    return False


def unknown(head: Head) -> Exception:
    """The error of a file of no known format: what it has, and what would be right."""
    if head.trouble:
        return FormatError(head.trouble)
    if not any(head.values) and head.container in ("json", "rows"):
        odd = f" ({head.odd}): expected a JSON object per call" if head.odd else ""
        return InvalidTurnsError(f"{head.name}: no calls, nothing to do{odd}")
    value = head.values[0]
    if _is_turn(value):
        return FormatError(
            f"{head.name} contains turns of trajkit: use read_turns, or trajkit linearize, "
            "simulate and check, which take it directly"
        )
    own = mapping.read_map(FORMATS["records"].map).fields
    inner = [key for key, one in value.items() if list_of(one) and object_of(one[0])]
    each = inner[0] if len(inner) == 1 else "PATH"
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
    if not n_same or len(lacks) < 2:
        like = "records"
    else:
        lacks = [name for name in keys if name not in value]
    kinds = ", ".join(type(one).__name__ for one in value.values())
    reason = f"has values of other kinds ({kinds})"
    reason = f"lacks {', '.join(lacks)}" if lacks else reason
    if "example_id" in value and {"completion", "trajectory"} & value.keys():
        text = f"{head.name} has results of verifiers: docs/import.md, 'Your own log', has "
        more = "" if "trajectory" in value else ", which they lack"
        return FormatError(f"{text}the mapping of their list trajectory{more}")
    return FormatError(
        f"{head.name} has an unknown format: its first record has the keys "
        f"{', '.join(value)}. It is most like {like} ({FORMATS[like].title}), but "
        f"{reason}. Name its fields, as in --map session_id=PATH,prompt_ids=PATH,"
        "output_ids=PATH, or request=PATH,response=PATH for whole responses of an engine "
        f"(and each={each} if the records are in a list of each object; docs/import.md, "
        "'Your own log'). Records without token ids allow only the import of text (--from "
        f"chat with --tokenizer): {_ENGINES}"
    )


def text_only(format: Format) -> str:
    """Why a format gives no turns without a tokenizer."""
    how = "pass a tokenizer with a chat template (--tokenizer) to import its text"
    ways = [how] if format.talk is not None else []
    ways += [format.ids] if format.ids else []
    return f"it is {format.title}, without token ids: {'; '.join(ways)}"
