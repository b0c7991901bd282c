"""What keys beside a call mean by their names: runs, masks, numbers of tokens, failures.

Sources name these in many ways. What a key means decides whether its value may be passed
over; it never becomes part of a turn without a mapping (`trajkit.turns.mapping`).
"""

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from trajkit.schema import ATTRIBUTION, PAYLOADS

SPELLED = {
    "session_id": "session_id|metadata.session_id|extra.session_id",
    "prompt_ids": "prompt_token_ids|prompt_ids|input_token_ids|prompt_tokens|input_ids|"
    "input_tokens",
    "output_ids": "output_token_ids|completion_token_ids|response_token_ids|"
    "generation_token_ids|generated_token_ids|token_ids|output_ids|completion_ids|"
    "response_ids|output_tokens|completion_tokens|response_tokens",
    "output_logprobs": "output_logprobs|completion_logprobs|response_logprobs|"
    "generation_log_probs|output_token_logprobs|rollout_log_probs|rollout_logprobs|"
    "token_logprobs|logprobs|log_probs|sampling_per_token_logps|old_log_probs|logprob",
    "prompt_messages": "prompt_messages|messages",
    "response_message": "response_message|message|response|completion",
    "finish_reason": "finish_reason|stop_reason",
}
"""Where records of any system may have fields that no mapping names."""

_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
RUN = re.compile(
    r"(x_)?((agent|parent|root|task|source|user)_)?(session|trajectory|traj|rollout|run|"
    r"episode|conversation|conv|thread|trace|task|sample|instance|attempt|trial|"
    r"example|chat|dialog|dialogue|problem|question|prompt|group|env|game|user|job|"
    r"workflow|experiment)(_(id|ids|uid|uuid|name|key|index|idx|no|num|number|hash))"
    r"|index|idx|session|trajectory|rollout|run|episode|trial|attempt|seed|name|"
    r"repetition(_id)?"
)
# any other key beside a call that names something, but for parts of a call
NAMED = re.compile(
    r"(?!(.*_)?(request|req|response|call|span|parent|message|msg|completion|model|step|"
    r"turn|event|observation|tool|policy|checkpoint|adapter|project|organization)_)"
    r"(\w+_)?(id|uid|uuid|guid|((agent|worker|actor|thread|process|slot|replica|host|node|"
    r"machine|client|player|env|gpu)(_(name|key|index|idx|no|num|number|rank))?)|rank|"
    r"pid|hostname)"
)
# keys that name a run even if they are empty
EMPTY_RUN = re.compile(
    r"(agent_)?(session|trajectory|traj|rollout|run|episode|conversation)(_(id|uuid|key))?"
)
# a number of tokens that a source states: a side of the call with a measure
SIDE = "(prompt|input|completion|output|response|generated|generation|candidates|eval)"
COUNT = re.compile(
    rf"(?=.*(?:len|tokens?|count|total))(?:n|num|number|of|the|ids?|tokens?|counts?|"
    rf"len(?:gth)?|logprobs|(?=prompt_?eval)prompt_?eval|{SIDE[1:-1]}|total_?tokens?|_)+"
)
USAGE = re.compile(r"(\w+_)?usage(_\w+)?|tokens?(_counts?)?")
MATTERS = re.compile(
    r"(^|_)(rewards?|scores?|returns?|ret|advantages?|groups?|uid|masks?|weights?|parents?|"
    r"trainable|versions?|error|errors|truncated|aborted|agent|turn|step|experts?|"
    r"teacher|entropies|entropy|images?|(multi_?)?modal|mm|pixel|videos?|audios?|label|"
    r"labels|success|resolved|log_?p(rob)?s?|kept_tokens|remove|loss|exceptions?|"
    r"trajectory|traj|rollout|run|episode|correct|pass|passed|done|finished|completed|"
    r"accuracy|grade|verdict|outcome|solved|win|won)(_|$)"
)
# at any depth beside a call
REWARDS = re.compile("(^|_)(rewards?|scores?)(_|$)")
# parts of a message that are no text, and keys of a request that have them
MEDIA = re.compile(
    r"[._](images?|videos?|audios?|files?|document|multi_?modal|mm)([._]|$)"
)
# a mask of what does not train, or of what is padding
CONTRARY = re.compile("ignore|attention|pad|special|drop|skip")
# what marks tokens, by the end of its path; lists that mark none, whatever they have
_MARKS = re.compile(
    r"(^|_)(masks?|train\w*|ignored?|generated|sampled|is|weights?)(_|$)"
)
_MARKS_NONE = re.compile(
    r"(^|_)(ids?|log_?probs?|rewards?|scores?|values|returns?|advantages?|entrop\w+|"
    r"versions?|experts?|images?|positions?|tools|flags|bytes|top)(_|$)"
)
# how a source says that a call came to no proper end
_ENDS = re.compile(
    r"((call|finish|generation|request|response|rollout|run|sample|stop|trial)_)?"
    r"(status|state|reason|outcome|level)"
)
BROKEN = re.compile(
    r"(?i)(?!no)(.*[\W_])?(abort|error|cancel|time_?d?[\W_]?out|fail|crash|kill|interrupt)"
)
_ERROR = re.compile(
    r"((call|request|response|run|rollout|trial)_)?(error|exception|failure)s?"
    r"(_(info|message|msg|type))?"
)
_NO_ERRORS = ("0", "0.0", "none", "null")
_CUT_SHORT = re.compile(
    r"((is|was|has)_)?(aborted|truncated|overlong|cancell?ed|time(d_|_)?out|failed|"
    r"errored|crashed|interrupted)"
)
_VALID = re.compile("(is_)?valid")
# keys beside a session_id that name a run, too
OF_RUN = re.compile(
    "(trajectory|traj|rollout|run|episode|attempt|trial|worker)"
    "(_(id|uid|uuid|key|name|rank|index|idx|no|num|number))?"
)
# what changes from call to call and names no run
NO_NAME = re.compile(
    r"(^|_)(request|response|call|span|message|completion|step|turn|time\w*|date\w*|ts|"
    r"at|created|started|ended|updated|start|end|latency|duration|elapsed|seconds|ms|ns|"
    r"model|versions?|tokens?|counts?|len|length|n|num|rewards?|scores?|logprobs?|seed|"
    r"reason|status|state|content|text|answer|output|usage|cost|price|size|temperature|"
    r"top|max|min|prompt|input|query|reply|parent|returns?|advantages?|line|is|has|"
    r"fingerprint|success|correct|trainable|label)(_|$)(?!cache_key)"
)
# ids and payloads
_NO_MASKS = {
    *("prompt", "tokens", *PAYLOADS),
    *(SPELLED["prompt_ids"] + "|" + SPELLED["output_ids"]).split("|"),
}


# extra columns that turns know, and names of masks
_OWN = {*PAYLOADS, *ATTRIBUTION.names, "attribution"}
_OWN |= {f"{name}_start" for name in PAYLOADS}
_HAS_MASK = re.compile("(^|_)masks?(_|$)")

# objects beside a call that are of its request, or no fact of the call
NOT_BESIDE = {
    *("request", "request_body", "transformed_request", "input", "messages", "tools"),
    *("prompt_messages", "choices", "content", "logprobs", "message", "tool_calls"),
    *("observation", "response_message", "completion"),
}


@lru_cache(1 << 12)
def word_of(path: str) -> str:
    """The last key of a path in lower case, with underscores between its words."""
    return "_".join(_WORD.findall(path.rpartition(".")[2])).lower()


class Meaning(NamedTuple):
    """What a key may say of its call by its name alone."""

    # numbers of tokens: one, or an object of them
    is_count: bool
    is_usage: bool
    # how it would say that the call came to no proper end, or empty
    end: str
    # which tokens count; or anything else, whatever numbers it has
    is_mask: bool
    is_no_mask: bool


@lru_cache(1 << 12)
def meaning_of(path: str) -> Meaning:
    """What a key says by its name, and by that of the object that it is in."""
    word = word_of(path)
    ends = (("state", _ENDS), ("error", _ERROR), ("cut", _CUT_SHORT), ("valid", _VALID))
    return Meaning(
        is_count=bool(COUNT.fullmatch(word)),
        is_usage=bool(USAGE.fullmatch(word)),
        end=next((kind for kind, names in ends if names.fullmatch(word)), ""),
        is_mask=bool(_MARKS.search(word_of("_".join(path.split(".")[-2:])))),
        is_no_mask=word in _NO_MASKS or bool(_MARKS_NONE.search(word)),
    )


def claims_of(
    usage: Mapping[str, Any], name: str, *, only: bool = True
) -> list[tuple[str, str, object]]:
    """The numbers of tokens that a usage states, as name, field and number; ``only``: it
    has nothing else.
    """
    if str(usage.get("unit") or "tokens").lower() != "tokens":
        return []
    words = {word_of(key): key for key in usage}
    # some sources take cached or reasoning tokens out of a number, beside which they stand
    apart = [
        word for word, key in words.items() if type(usage[key]) is int and usage[key]
    ]
    found = []
    for word, key in words.items():
        stated, bare = usage[key], only and re.fullmatch(SIDE, word)
        is_number = type(stated) in (int, float)
        if not (bare or COUNT.fullmatch(word)) or not (
            is_number or (only and isinstance(stated, str | bool))
        ):
            continue
        sides = {"prompt"} if "prompt" in word else {*re.findall(SIDE, word)}
        total = "total" in word
        if len(sides) != (not total):
            continue
        side = "" if total else next(iter(sides))
        beside = ["cache", "reasoning"] if total else ["cache"] * (side == "input")
        beside += [f"{side}_"] * (word == side)
        if not any(part in one for part in beside for one in apart):
            target = "prompt_ids" if side in ("prompt", "input") else "output_ids"
            where = name if key == name.rpartition(".")[2] else f"{name}.{key}"
            found.append((where.lstrip("."), "ids" if total else target, stated))
    return found


def unheeded(record: Mapping[str, Any], name: str) -> tuple[str, str]:
    """A key of a record, or of an object in it, that says what turns do not read, and
    what it says of the call (a key of `UNHEEDED`); both are empty if there is none.
    """
    value = record[name]
    if value is None or name in _OWN:
        return "", ""
    # a list with a start
    is_payload = f"{name}_start" in record
    if _HAS_MASK.search(word_of(name)):
        return name, "marks"
    sizes = {ids: _size(record.get(ids)) for ids in ("prompt_ids", "output_ids")}
    n_prompt, n_output = sizes.values()
    trainable = record.get("trainable")
    is_masked = trainable is False or record.get("output_mask") is not None
    for path, one in _beside(name, value):
        meaning = meaning_of(path)
        stated = {path: one} if meaning.is_count else None
        stated = one if meaning.is_usage else stated
        for _, ids, n in claims_of(stated, path) if isinstance(stated, Mapping) else ():
            if type(n) is int and sizes.get(ids, n) not in (None, n):
                return path, "counts"
        if trainable is None and is_broken(path, one):
            return path, "ends"
        # an extra column of other names may have any numbers
        named = meaning.is_mask or (has_items(one) and -100 in one)
        if named and n_output and not (is_masked or is_payload):
            if marks_tokens(path, one, n_prompt or 0, n_output):
                return path, "marks"
    return "", ""


_IMPORT = "trajkit import FILE -o log.parquet --map"
UNHEEDED = {
    "marks": "marks part of its output: name it output_mask if it is true for what the "
    f"model sampled ({_IMPORT} output_mask={{path}} does), or set trainable to false",
    "counts": "states other numbers of tokens than it has: correct or remove it "
    f"({_IMPORT} session_id=session_id makes such calls context)",
    "ends": "says that the call was aborted, failed or was cut short: set trainable to "
    f"false, or to true if it may train ({_IMPORT} session_id=session_id makes such "
    "calls context)",
}
"""What a key that turns do not read says of its call, and what to do."""


def _beside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value beside a call, and those of an object of facts; arrays are lists."""
    yield name, plain(value)
    if isinstance(value, Mapping) and name not in NOT_BESIDE:
        yield from ((f"{name}.{key}", plain(one)) for key, one in value.items())


def _size(value: Any) -> int | None:
    return len(value) if hasattr(value, "__len__") else None


def plain(value: Any) -> Any:
    """Lists for arrays, tensors and tuples, and Python's numbers for their scalars."""
    if isinstance(value, tuple):
        return [*value]
    return value.tolist() if hasattr(value, "tolist") else value


def names_run(keys: tuple[str, ...], aside: bool) -> bool:
    """Whether a key may name the run of its call, by its name."""
    word = word_of(keys[-1])
    if (len(keys) <= 2 or aside) and RUN.fullmatch("_".join(keys[-2:])):
        return True
    if aside:
        return bool(RUN.fullmatch(word) or NAMED.fullmatch(word))
    return len(keys) == 2 and "_" in word and bool(RUN.fullmatch(word))


def marks_tokens(path: str, value: Any, first: int, n: int) -> bool:
    """Whether a value marks some ids of an output, or may do so: docs/import.md."""
    while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        (value,) = value
    fits = has_items(value) and len(value) in (n, first + n)
    _, _, _, named, is_other = meaning_of(path)
    if isinstance(value, str) and re.fullmatch("[01]+", value) and (named or n > 2):
        value, fits = [*map(int, value)], len(value) in (n, first + n)
    if is_other or not has_items(value):
        return False
    if {*map(type, value)} - {int, bool, float}:
        return False
    name = word_of(path)
    # padding is no token that an engine read or sampled
    if "attention" in name and 0 in value:
        return True
    if "prompt" in name and len(value) == first and len({*value}) == 1:
        return False
    if -100 in value and (fits or named or "label" in name):
        return not fits or -100 in value[-n:]
    # weights of tokens; other numbers are anything
    if {*value} - {0, 1} and not (named and fits):
        return False
    return bool(named or fits) and (not fits or any(one != 1 for one in value[-n:]))


def is_broken(path: str, value: object) -> bool:
    """Whether a key says that its call was aborted, failed, or was cut short."""
    name, how = word_of(path), meaning_of(path).end
    if how == "state":
        # policies know the finish reason "abort"
        known = value == "abort" and name.endswith("reason")
        return isinstance(value, str) and not known and bool(BROKEN.match(value))
    if how == "error":
        return not is_empty(value) and str(value).lower() not in _NO_ERRORS
    if how == "cut":
        return value is True or (value == 1 and "time" not in name)
    return how == "valid" and value in (False, 0) and value is not None


def media_of(messages: object, request: object) -> dict[str, object]:
    """What a prompt has besides text: parts of its messages, or keys of its request."""
    asked = request if isinstance(request, Mapping) else {}
    found: dict[str, object] = {f"request.{k}": v for k, v in asked.items()}
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping):
                found.setdefault(f"messages.{part.get('type')}", part)
    return {k: v for k, v in found.items() if MEDIA.search(k) and not is_empty(v)}


def is_empty(value: object) -> bool:
    sized = isinstance(value, str | list | dict | np.ndarray)
    return value is None or value is False or (sized and not len(value))  # type: ignore[arg-type]


def is_nothing(value: object) -> bool:
    return isinstance(value, str | None) and not value


def has_items(value: object) -> bool:
    return isinstance(value, list | tuple | np.ndarray) and len(value) > 0


def is_name(value: object) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number or (isinstance(value, str) and bool(value))


# --- values of records

# objects beside a call that hold facts of its run
_ASIDE = (
    *("metadata", "meta", "extra", "extra_info", "extra_body", "info", "tags"),
    *("attributes", "headers", "sent_headers", "context", "non_tensor_batch"),
    *("metrics", "final_metrics", "tokens", "extra_fields", "eval", "evaluation"),
)
_REQUESTS = ("request", "request_body", "transformed_request", "input")
# the most objects of a list beside a call that are looked at
_MOST_BESIDE = 64
# levels of objects
_MOST_LEVELS = 32


def facts_of(
    value: dict[str, Any],
    at: str = "",
    aside: bool = True,
    beside: bool = True,
    *,
    whole: bool,
) -> Iterator[tuple[str, Any, bool, bool]]:
    """Paths and values of a record (not ``whole``: its facts alone), whether a value is a
    fact of the run, at the top or in an object of facts, and whether it is beside the call.
    """
    for name, one in value.items():
        path, found = f"{at}{name}", parsed(one)
        # a request has such objects, too
        near = aside or at[:-1] in (*_REQUESTS, "response")
        facts = near and name in _ASIDE and isinstance(found, dict)
        yield path, found, aside and not facts, beside
        below = beside and name not in NOT_BESIDE
        inside = whole and (below or path in _REQUESTS)
        if path.count(".") > _MOST_LEVELS:
            continue
        if isinstance(found, dict) and (facts or inside):
            yield from facts_of(found, f"{path}.", facts, below, whole=whole)
        listed = list_of(found)[:_MOST_BESIDE] if whole and below else []
        for k, inner in enumerate(listed):
            if isinstance(inner, dict):
                yield from facts_of(inner, f"{path}.{k}.", aside=False, whole=True)


def is_failed(path: str, value: object) -> bool:
    """Whether a key says that its call failed, or is not to be trained."""
    last, word = tuple(path.split(".")[-2:]), word_of(path)
    if word.endswith(("code", "status")) and "status" in "_".join(last).lower():
        failed = value in (2, "STATUS_CODE_ERROR") and last == ("status", "code")
        return failed or 400 <= (number_of(value) or 0) < 600
    return word in ("train", "is_train") and flag_of(value) is False


def is_taken_mask(path: str, value: object, first: int, n: int) -> bool:
    """Whether an output_mask may have these values."""
    if not isinstance(value, list) or {*map(str, value)} - {"0", "1", "True", "False"}:
        return False
    contrary = CONTRARY.search(path.lower())
    fits = len(value) == n or (len(value) == first + n and not any(value[:first]))
    return fits and not contrary


def parsed(value: object) -> object:
    """The value of a text of JSON; anything else unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def text_of(value: object) -> str | None:
    """A string or an integer as text; anything else, or an empty string, as None."""
    return str(value) or None if type(value) in (str, int) else None


def number_of(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if np.isfinite(float(value)) else None
    except OverflowError:
        return None


def time_of(value: object) -> datetime | None:
    """A time from seconds since 1970 or ISO text with a time zone, or None."""
    try:
        if isinstance(value, str | datetime):
            time = datetime.fromisoformat(str(value))
            return time.astimezone(UTC) if time.tzinfo else None
        seconds = number_of(value)
        return datetime.fromtimestamp(seconds, UTC) if seconds else None
    except (ValueError, OverflowError, OSError):
        return None


def unless_empty(value: object) -> Any:
    """The value, or None for an empty list, which means that a record lacks it."""
    return None if isinstance(value, list) and not value else value


def is_array(value: object) -> bool:
    return isinstance(value, list | np.ndarray)


def list_of(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def object_of(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def flag_of(value: object) -> bool | None:
    return bool(value) if type(value) in (bool, int) and value in (0, 1) else None
