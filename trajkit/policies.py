"""Every rule of the field as one frozen record of choices."""

from dataclasses import dataclass, fields, replace
from operator import index
from typing import Literal, TypeAlias, get_args

from trajkit.errors import PolicyError

Route: TypeAlias = Literal["messages", "tokens", "previous", "none", "prompts"]
Absorb: TypeAlias = Literal["never", "short_reply", "short_drift", "splice"]
Equals: TypeAlias = Literal["first", "tokens"]
Flags: TypeAlias = Literal["chain", "row"]
MissingLogprobs: TypeAlias = Literal["keep", "null_row"]

ROUTES: tuple[Route, ...] = get_args(Route)
ABSORBS: tuple[Absorb, ...] = get_args(Absorb)
EQUALS: tuple[Equals, ...] = get_args(Equals)
FLAGS: tuple[Flags, ...] = get_args(Flags)
MISSING_LOGPROBS: tuple[MissingLogprobs, ...] = get_args(MissingLogprobs)

_NUMBERS = ("fork_threshold", "end_of_turn_token_id")
_LAST_TOKEN = 2**31 - 1

DEFAULT_FORK_THRESHOLD = 1024
"""Of slime's ``TrajectoryManager`` and of TRL (spec: slime 1.3, TRL 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How calls become rows. Make one with `trajkit.policy`.

    Attributes
    ----------
    name : str
        Of the preset that the choices started from.
    route : {"messages", "tokens", "previous", "none", "prompts"}
        The call that a call is compared with: the generated message above it in the
        message tree; the longest row end that is a prefix of its prompt; the previous
        call; none; the last call of the chain whose last prompt is the longest prefix
        of its prompt, whatever that call sampled.
    merge : bool
        Message routing lets a reply that is shown otherwise take the place of one that
        is shorter than ``fork_threshold``, has no siblings and was not continued.
    equals : {"first", "tokens"}
        Of equal replies to the same messages, a request that shows one of them
        continues the first, or the one whose prompt and output its own prompt repeats
        for longest.
    absorb : {"never", "short_reply", "short_drift", "splice"}
        What drift inside the last reply does: opens a new row always; or is taken into
        the row, which loses that reply, when the incoming reply, or what was held
        beyond the drift's start, is shorter than ``fork_threshold``. Drift before the
        last reply always opens a new row. ``"splice"`` passes over it: the row keeps
        the reply as it was sampled and goes on with what the next prompt has after the
        first end of turn that follows the prompt before, so later replies may stand in
        a context that they were not sampled in. Where the next prompt has none, the row
        ends, and this call and all that go on from it are in no row. A call belongs to
        one row: of several that go on from one call, the later ones open rows.
    end_of_turn_token_id : int or None
        Of ``"splice"``. None: the last token of the first output in the chain whose
        finish_reason is stop, tool_calls or stop_sequence.
    missing_logprobs : {"keep", "null_row"}
        Of a row in which the engine did not give every trained token's logprob: those
        that it gave are kept, or the row has none.
    keep_head : bool
        Of a reply that is lost so, what stands before the drift's start stays trained.
    fork_threshold : int
        In tokens. 0 and below: nothing is merged or absorbed.
    own : {"first"}
        Who trains a claim that several rows hold: the first chain in the policy's
        order.
    keep_untrained : bool
        Rows in which nothing is trained are emitted.
    flags : {"chain", "row"}
        ``truncated``, ``use_tool`` and ``ill_formed`` are those of the whole chain from
        the first call to the leaf (of a row that ``"splice"`` ended, with the calls
        that it dropped), or of the calls in the row.
    """

    name: str
    route: Route
    merge: bool = False
    equals: Equals = "first"
    absorb: Absorb = "never"
    keep_head: bool = False
    fork_threshold: int = 0
    own: Literal["first"] = "first"
    keep_untrained: bool = True
    flags: Flags = "row"
    end_of_turn_token_id: int | None = None
    missing_logprobs: MissingLogprobs = "keep"

    @property
    def absorbs_short(self) -> bool:
        """Whether a row may lose a reply to drift shorter than ``fork_threshold``."""
        return self.absorb in ("short_reply", "short_drift")

    @property
    def merge_threshold(self) -> int:
        """Output length, in tokens, below which message routing may merge; 0: never."""
        return max(self.fork_threshold, 0) if self.merge else 0


PRESETS: dict[str, Policy] = {
    # nothing that was sampled is lost; a retry or a sibling is a branch of its own
    "faithful": Policy(
        name="faithful", route="messages", equals="tokens", keep_untrained=False
    ),
    # THUDM/slime TrajectoryManager (spec: slime 2, 3)
    "slime": Policy(
        name="slime",
        route="messages",
        merge=True,
        absorb="short_reply",
        fork_threshold=DEFAULT_FORK_THRESHOLD,
        keep_untrained=False,
        flags="chain",
    ),
    # TRL async_grpo, message mode (spec: TRL 4)
    "trl": Policy(
        name="trl",
        route="previous",
        absorb="short_drift",
        keep_head=True,
        fork_threshold=DEFAULT_FORK_THRESHOLD,
        keep_untrained=False,
    ),
    # SkyRL merge_stepwise_output (spec: SkyRL 6)
    "skyrl": Policy(name="skyrl", route="previous"),
    # prime-rl interleave_rollout (spec: prime-rl 2.1)
    "strict": Policy(name="strict", route="tokens"),
    "per_call": Policy(name="per_call", route="none"),
    # ProRL-Agent-Server PrefixMergingBuilder (spec: Polar 2.3)
    "polar": Policy(
        name="polar", route="prompts", absorb="splice", missing_logprobs="null_row"
    ),
}
"""The named policies."""

ALIASES = {"interleave": "strict"}
"""Other names of presets."""

IN_OTHER_WORDS: dict[str, dict[str, dict[str, dict[str, object]]]] = {
    # PrefixMergingBuilder, PerRequestBuilder (spec: Polar 2.2, 2.3)
    "polar": {
        "builder": {
            "prefix_merging": {"route": "prompts"},
            "per_request": {"route": "none"},
        }
    }
}
"""Of a preset: options under the name that its system gives them, and the choices that
each value stands for."""


def policy(name: str | Policy, **choices: object) -> Policy:
    """The named policy, with some of its choices made otherwise.

    Parameters
    ----------
    name : str or Policy
        ``"faithful"``, ``"slime"``, ``"trl"``, ``"skyrl"``, ``"strict"`` (also
        ``"interleave"``), ``"per_call"`` or ``"polar"``; or a policy to start from.
    **choices
        Attributes of `Policy`. ``fork_threshold=None`` stands for the preset's own.
        ``"polar"`` also takes ``builder``: ``"prefix_merging"`` (``route="prompts"``,
        its own) or ``"per_request"`` (``route="none"``).

    Returns
    -------
    Policy

    Raises
    ------
    PolicyError
        No preset has that name, or no policy has that choice.

    Examples
    --------
    >>> policy("slime", fork_threshold=0).fork_threshold
    0
    >>> policy("polar", builder="per_request").route
    'none'
    """
    if isinstance(name, Policy):
        chosen = name
    else:
        known_name = isinstance(name, str)
        preset = PRESETS.get(ALIASES.get(name, name)) if known_name else None
        if preset is None:
            known = ", ".join(sorted([*PRESETS, *ALIASES]))
            raise PolicyError(
                f"policy {name!r} does not exist: expected one of {known}"
            )
        chosen = preset
    choices = _in_our_words(chosen.name, choices)
    known_choices = {field.name for field in fields(Policy)} - {"name"}
    for choice, value in choices.items():
        if choice not in known_choices:
            raise PolicyError(
                f"policy {chosen.name!r} has no choice {choice!r}: expected one of "
                f"{', '.join(sorted(known_choices))}"
            )
        _check_choice(choice, value)
    if "fork_threshold" in choices:
        threshold = choices.pop("fork_threshold")
        if threshold is not None:
            choices["fork_threshold"] = chosen_int("fork_threshold", threshold)
        elif chosen.name in PRESETS:
            choices["fork_threshold"] = PRESETS[chosen.name].fork_threshold
    if choices.get("end_of_turn_token_id") is not None:
        token = chosen_int("end_of_turn_token_id", choices["end_of_turn_token_id"], 0)
        if token > _LAST_TOKEN:
            raise PolicyError(f"end_of_turn_token_id={token}: ids are below 2**31")
        choices["end_of_turn_token_id"] = token
    return replace(chosen, **choices)  # type: ignore[arg-type]


def _in_our_words(name: str, choices: dict[str, object]) -> dict[str, object]:
    """Choices, with what `IN_OTHER_WORDS` knows of the preset put as attributes."""
    options = IN_OTHER_WORDS.get(name, {})
    ours = {key: value for key, value in choices.items() if key not in options}
    for option in options.keys() & choices.keys():
        said = choices[option]
        meant = options[option].get(said) if isinstance(said, str) else None
        if meant is None:
            expected = ", ".join(map(repr, options[option]))
            raise PolicyError(f"{option}={said!r}: expected one of {expected}")
        for choice, value in meant.items():
            if ours.setdefault(choice, value) != value:
                raise PolicyError(
                    f"{option}={said!r} means {choice}={value!r}, but "
                    f"{choice}={ours[choice]!r} was given"
                )
    return ours


def _check_choice(choice: str, value: object) -> None:
    names = {
        "route": ROUTES,
        "equals": EQUALS,
        "absorb": ABSORBS,
        "own": ("first",),
        "flags": FLAGS,
        "missing_logprobs": MISSING_LOGPROBS,
    }
    if choice in names:
        if value not in names[choice]:
            expected = ", ".join(map(repr, names[choice]))
            raise PolicyError(f"{choice}={value!r}: expected one of {expected}")
    elif choice not in _NUMBERS and not isinstance(value, bool):
        raise PolicyError(f"{choice}={value!r}: expected a bool")


def chosen_int(name: str, value: object, least: int = -(2**63)) -> int:
    """An integer that a caller chose, which the kernels take as 64 bits.

    Raises
    ------
    PolicyError
        It is no integer (a bool is none), or below ``least``.
    """
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number < 2**63:
        rule = f"of {least} or more" if least > -(2**63) else "of 64 bits"
        raise PolicyError(f"{name}={value!r}: expected an integer {rule}")
    return number
