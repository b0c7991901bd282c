"""Every rule of the field as one frozen record of choices."""

from dataclasses import dataclass, fields, replace
from operator import index
from typing import Literal, TypeAlias, get_args

from trajkit.equality import EQUALITIES, Equality
from trajkit.errors import PolicyError

Route: TypeAlias = Literal[
    "messages", "tokens", "previous", "none", "prefix", "generations"
]
Absorb: TypeAlias = Literal["never", "short_reply", "short_drift"]
Equals: TypeAlias = Literal["first", "tokens"]
Flags: TypeAlias = Literal["chain", "row"]
Own: TypeAlias = Literal["first", "earliest", "every"]
Emit: TypeAlias = Literal["all", "main"]
Sort: TypeAlias = Literal["turn", "prompt"]
Cut: TypeAlias = Literal["tokens", "calls"]

ROUTES: tuple[Route, ...] = get_args(Route)
ABSORBS: tuple[Absorb, ...] = get_args(Absorb)
EQUALS: tuple[Equals, ...] = get_args(Equals)
FLAGS: tuple[Flags, ...] = get_args(Flags)
OWNS: tuple[Own, ...] = get_args(Own)
EMITS: tuple[Emit, ...] = get_args(Emit)
SORTS: tuple[Sort, ...] = get_args(Sort)
CUTS: tuple[Cut, ...] = get_args(Cut)

DEFAULT_FORK_THRESHOLD = 1024
"""Of slime's ``TrajectoryManager`` and of TRL (spec: slime 1.3, TRL 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How calls become rows. Make one with `trajkit.policy`.

    Attributes
    ----------
    name : str
        Of the preset that the choices started from.
    route : {"messages", "tokens", "previous", "none", "prefix", "generations"}
        The call that a call is compared with: the generated message above it in the
        message tree; the longest row end that is a prefix of its prompt; the previous
        call; none; or, whatever order the calls came in, the one whose prompt and
        output are the longest prefix of its prompt. Under ``"prefix"`` what nothing
        tells apart is set aside, with every chain that it stands in: a call that may
        continue several with the same tokens, and a retry (a call with the prompt of
        another) that was not gone on from, the first of retries excepted where none
        was. Or, under ``"generations"``, the last call whose messages and reply are the
        first messages of the request, for as many as can be; a call is refused, and no
        later one goes on from it, where ``fork_threshold`` tokens or more of what that
        call held (or any of its prompt) are not in the prompt, and where that call
        stopped for its length; a call that none goes on from, with a later one beside
        it, is a retry and in no row. See `trajkit.schema.WHY`.
    merge : bool
        Message routing lets a reply that is shown otherwise take the place of one that
        is shorter than ``fork_threshold``, has no siblings and was not continued.
    equality : {"values", "text", "strict", "role_content_only"}
        Messages are equal where Python's ``==`` calls them so; where their JSON texts
        with sorted keys are, once every ``cache_control`` is left out; where Python
        calls role, content, reasoning_content and tool_calls equal; or role and content
        alone. For the last two None, "" and [] are one.
    equals : {"first", "tokens"}
        Of equal replies to the same messages, a request that shows one of them
        continues the first, or the one whose prompt and output its own prompt repeats
        for longest.
    absorb : {"never", "short_reply", "short_drift"}
        What drift inside the last reply does: opens a new row always; or is taken into
        the row, which loses that reply, when the incoming reply, or what was held
        beyond the drift's start, is shorter than ``fork_threshold``. Drift before the
        last reply always opens a new row.
    keep_head : bool
        Of a reply that is lost so, what stands before the drift's start stays trained.
    fork_threshold : int
        In tokens. 0 and below: nothing is merged or absorbed.
    own : {"first", "earliest", "every"}
        Who trains a claim that several rows hold: the first chain in the policy's
        order, the one whose last call came first, or each of them. ``"every"`` needs
        ``absorb="never"``.
    emit : {"all", "main"}
        Which chains become rows: all, or one of each session: the first, in the
        policy's order, of the root that was created first (by the columns
        ``started_at`` and ``request_id`` of turns where they are there, else by turn).
    sort : {"turn", "prompt"}
        The order of rows under the route ``"none"``: of turns, or from the shortest
        prompt up, equals by ``request_id`` where it is there. The route ``"prefix"``
        always has the second.
    cut : {"tokens", "calls"}
        Where ``max_row_tokens`` ends a row: there; or, if that lies inside a prompt,
        with the call before.
    keep_untrained : bool
        Rows in which nothing is trained are emitted.
    flags : {"chain", "row"}
        ``truncated``, ``use_tool`` and ``ill_formed`` are those of the whole chain from
        the first call to the leaf, or of the calls in the row.
    """

    name: str
    route: Route
    merge: bool = False
    equality: Equality = "values"
    equals: Equals = "first"
    absorb: Absorb = "never"
    keep_head: bool = False
    fork_threshold: int = 0
    own: Own = "first"
    emit: Emit = "all"
    sort: Sort = "turn"
    cut: Cut = "tokens"
    keep_untrained: bool = True
    flags: Flags = "row"

    @property
    def merge_threshold(self) -> int:
        """Output length, in tokens, below which message routing may merge; 0: never."""
        return max(self.fork_threshold, 0) if self.merge else 0

    @property
    def keeps_all(self) -> bool:
        """Whether every claim that may be trained is trained in some row."""
        if self.merge or self.absorb != "never":
            return False
        return self.route not in ("prefix", "generations") and self.emit == "all"


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
    # NeMo Gym token_id_capture (spec: NeMo Gym 5), prefix_merging; its per_request is
    # route="none". It delivers emit="main"
    "nemo": Policy(name="nemo", route="prefix", own="every", sort="prompt"),
    # miles session v2 (spec: miles 1.2, 1.4, 1.5); fork_threshold is its max_trim_tokens
    # and one more, max_row_tokens its max_seq_len
    "miles": Policy(
        name="miles",
        route="generations",
        equality="strict",
        absorb="short_drift",
        keep_head=True,
        fork_threshold=1,
        own="earliest",
        cut="calls",
    ),
}
"""The named policies."""

ALIASES = {"interleave": "strict"}
"""Other names of presets."""


def policy(name: str | Policy, **choices: object) -> Policy:
    """The named policy, with some of its choices made otherwise.

    Parameters
    ----------
    name : str or Policy
        ``"faithful"``, ``"slime"``, ``"trl"``, ``"skyrl"``, ``"strict"`` (also
        ``"interleave"``), ``"per_call"``, ``"nemo"`` or ``"miles"``; or a
        policy to start from.
    **choices
        Attributes of `Policy`. ``fork_threshold=None`` stands for the preset's own.

    Returns
    -------
    Policy

    Raises
    ------
    PolicyError
        No preset has that name, or no policy has that choice; or two choices exclude
        each other.

    Examples
    --------
    >>> policy("slime", fork_threshold=0).fork_threshold
    0
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
    chosen = replace(chosen, **choices)  # type: ignore[arg-type]
    if chosen.own == "every" and chosen.absorb != "never":
        raise PolicyError(
            f"own='every' with absorb={chosen.absorb!r}: a claim that one row trains "
            "and another has lost could not be counted once"
        )
    return chosen


def _check_choice(choice: str, value: object) -> None:
    names = {
        "route": ROUTES,
        "equality": EQUALITIES,
        "equals": EQUALS,
        "absorb": ABSORBS,
        "own": OWNS,
        "emit": EMITS,
        "sort": SORTS,
        "cut": CUTS,
        "flags": FLAGS,
    }
    if choice in names:
        if value not in names[choice]:
            expected = ", ".join(map(repr, names[choice]))
            raise PolicyError(f"{choice}={value!r}: expected one of {expected}")
    elif choice != "fork_threshold" and not isinstance(value, bool):
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
