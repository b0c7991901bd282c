"""Every rule of the field as one frozen record of choices."""

from dataclasses import dataclass, fields, replace
from operator import index
from typing import Literal, TypeAlias, get_args

from trajkit.equality import EQUALITIES, Equality
from trajkit.errors import PolicyError

Route: TypeAlias = Literal[
    "messages",
    "agents",
    "tokens",
    "previous",
    "none",
    "prompts",
    "prefix",
    "generations",
]
Absorb: TypeAlias = Literal["never", "short_reply", "short_drift", "any", "splice"]
Rewards: TypeAlias = Literal["copy", "uniform", "final_only"]
Equals: TypeAlias = Literal["first", "tokens", "whole"]
Own: TypeAlias = Literal["first", "longest", "most_trained", "earliest", "every"]
MissingLogprobs: TypeAlias = Literal["keep", "untrain", "raise", "null_row"]
Aborted: TypeAlias = Literal["context", "train"]
Order: TypeAlias = Literal["tree", "commit"]
Flags: TypeAlias = Literal["chain", "row"]
Emit: TypeAlias = Literal["all", "main"]
Sort: TypeAlias = Literal["turn", "prompt"]
Cut: TypeAlias = Literal["tokens", "calls"]

ROUTES: tuple[Route, ...] = get_args(Route)
ABSORBS: tuple[Absorb, ...] = get_args(Absorb)
EQUALS: tuple[Equals, ...] = get_args(Equals)
OWNS: tuple[Own, ...] = get_args(Own)
MISSING_LOGPROBS: tuple[MissingLogprobs, ...] = get_args(MissingLogprobs)
ABORTED: tuple[Aborted, ...] = get_args(Aborted)
ORDERS: tuple[Order, ...] = get_args(Order)
FLAGS: tuple[Flags, ...] = get_args(Flags)
EMITS: tuple[Emit, ...] = get_args(Emit)
SORTS: tuple[Sort, ...] = get_args(Sort)
CUTS: tuple[Cut, ...] = get_args(Cut)
REWARDS: tuple[Rewards, ...] = get_args(Rewards)

_LAST_TOKEN = 2**31 - 1

# what rows that are spliced have no rule for
_UNSPLICED = {"route": "prefix", "emit": "main", "cut": "calls"}

DEFAULT_FORK_THRESHOLD = 1024
"""Of slime's ``TrajectoryManager`` and of TRL (spec: slime 1.3, TRL 4)."""


DISPATCH_TOOLS = ("Task", "Agent")
"""Of Claude Code (spec: segments 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How calls become rows. Make one with `trajkit.policy`.

    Attributes
    ----------
    name : str
        Of the preset that the choices started from.
    route : {"messages", "agents", "tokens", "previous", "none", "prompts", "prefix", \
"generations"}
        The call that a call is compared with: the generated message above it in the
        message tree; the last call of its agent, if that one's messages are its first
        ones; the longest row end that is a prefix of its prompt; the previous call;
        none; the last call of the chain whose last prompt is the longest prefix of its
        prompt, whatever that call sampled; or, whatever order the calls came in, the
        one whose prompt and output are the longest prefix of its prompt. There is a
        main agent, and one sub-agent from a reply of the main agent that calls one of
        ``dispatch_tools`` until a request shows the result: what then does not go on
        where the main agent stood is the sub-agent's. Under ``"prefix"`` what nothing
        tells apart is set aside, with every chain that it stands in: a call that may
        continue several with the same tokens, and a retry (a call with the prompt of
        another) that was not gone on from, the first of retries excepted where none
        was. Or, under ``"generations"``, the last call whose messages and reply are the
        first messages of the request, for as many as can be; a call is refused, and no
        later one goes on from it, where ``fork_threshold`` tokens or more of what that
        call held (or any of its prompt) are not in the prompt, and where that call
        stopped for its length; a call that none goes on from, with a later one beside
        it, is a retry and in no row. See `trajkit.schema.WHY`.
    dispatch_tools : tuple of str
        Tools whose calls send out a sub-agent.
    merge : bool
        Message routing lets a reply that is shown otherwise take the place of one that
        is shorter than ``fork_threshold``, has no siblings and was not continued.
    equality : {"values", "text", "content", "strict", "role_content_only"}
        Messages are equal where Python's ``==`` calls them so; or where their JSON
        texts with sorted keys are, once every ``cache_control`` is left out; or where
        role, content, reasoning, tool calls (the arguments as JSON) and the call that a
        tool's message answers are, content null being the empty text; or where Python
        calls role, content, reasoning_content and tool_calls equal, or role and content
        alone. For the last two None, "" and [] are one.
    equals : {"first", "tokens", "whole"}
        Of equal replies to the same messages, a request that shows one of them
        continues the first, or the one whose prompt and output its own prompt repeats
        for longest; then a request with an empty list of messages goes by tokens, too,
        instead of being left out. ``"whole"``: it continues the nearest message above
        whose prompt and output its own prompt repeats to the end, the last of equals,
        so that no row drifts.
    order : {"tree", "commit"}
        Chains, and so rows and who is first to train a claim, come as the traversal of
        ``route`` has their last turns, or as those were recorded. ``"prefix"``, under
        which a turn may be recorded before the one that it continues, has only the
        first.
    absorb : {"never", "short_reply", "short_drift", "any", "splice"}
        What drift inside the last reply does: opens a new row always; or is taken into
        the row, which loses that reply, when the incoming reply, or what was held
        beyond the drift's start, is shorter than ``fork_threshold``. Drift before the
        last reply always opens a new row. Under ``"any"``, drift anywhere behind the
        prompt that opened the row is taken in, and the row loses every reply that does
        not end before it; drift inside that prompt begins the row anew, without all
        that it had.
        ``"splice"`` passes over drift behind the last prompt: the row keeps
        the reply as it was sampled and goes on with what the next prompt has after the
        first end of turn that follows the prompt before, so later replies may stand in
        a context that they were not sampled in. Where the next prompt has none, the row
        ends, and this call and all that go on from it are in no row. A call belongs to
        one row: of several that go on from one call, the later ones open rows. It does
        not go with ``route="prefix"``, ``emit="main"`` and ``cut="calls"``.
    end_of_turn_token_id : int or None
        Of ``"splice"``. None: the last token of the first output in the chain whose
        finish_reason is stop, tool_calls or stop_sequence.
    keep_head : bool
        Of a reply that is lost so, what stands before the drift's start stays trained.
    fork_threshold : int
        In tokens. 0 and below: nothing is merged or absorbed.
    own : {"first", "longest", "most_trained", "earliest", "every"}
        Who trains a claim (one turn's output) that several rows hold: the first chain
        in the policy's order; the longest row that holds it; the row that would train
        most if it trained all that it holds; the chain whose last call came first; or
        each of them. The second and third look, of the rows that hold it, at those that
        absorb least of it, count a row as ``max_row_tokens`` cuts it, and of equals
        take the first in the policy's order. None but ``"first"`` goes with
        ``absorb="any"``; ``"every"`` needs ``absorb="never"`` and no ``max_rows``. A
        claim may be trained within the stretch that a row shares with its parent row.
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
    missing_logprobs : {"keep", "untrain", "raise", "null_row"}
        Sampled tokens for which the engine gave no logprob are trained and have a null;
        or are context, which the report counts as ``lost_no_logprob``; or are an error;
        or are trained, and the row that trains one has no logprob at all.
    aborted : {"context", "train"}
        Turns whose ``finish_reason`` is ``abort`` are context only, which the report
        counts as ``lost_aborted``; or are trained as any other, as the systems do that
        the presets slime, trl, segments, skyrl, graph, strict, nemo and miles
        reproduce.
    keep_untrained : bool
        Rows in which nothing is trained are emitted.
    keep_empty : bool
        Rows that hold nothing beyond the prompt that opened them are emitted.
    max_rows : int or None
        Of more rows than this in a session, the first ones and the last are emitted;
        1: the last alone. None: all.
    rewards : {"copy", "uniform", "final_only"}
        How the reward of the session is spread over its rows (see
        `trajkit.spread_rewards`).
    flags : {"chain", "row"}
        ``truncated``, ``use_tool`` and ``ill_formed`` are those of the whole chain from
        the first call to the leaf (of a row that ``"splice"`` ended, with the calls
        that it dropped), or of the calls in the row.
    """

    name: str
    route: Route
    dispatch_tools: tuple[str, ...] = DISPATCH_TOOLS
    merge: bool = False
    equality: Equality = "values"
    equals: Equals = "first"
    order: Order = "tree"
    absorb: Absorb = "never"
    keep_head: bool = False
    fork_threshold: int = 0
    own: Own = "first"
    emit: Emit = "all"
    sort: Sort = "turn"
    cut: Cut = "tokens"
    missing_logprobs: MissingLogprobs = "keep"
    aborted: Aborted = "context"
    keep_untrained: bool = True
    keep_empty: bool = True
    max_rows: int | None = None
    rewards: Rewards = "copy"
    flags: Flags = "row"
    end_of_turn_token_id: int | None = None

    @property
    def absorbs(self) -> bool:
        """Whether a row may lose a reply to drift."""
        return self.absorb not in ("never", "splice")

    @property
    def absorbs_short(self) -> bool:
        """Whether a row may lose a reply to drift shorter than ``fork_threshold``."""
        return self.absorb in ("short_reply", "short_drift")

    @property
    def merge_threshold(self) -> int:
        """Output length, in tokens, below which message routing may merge; 0: never."""
        return max(self.fork_threshold, 0) if self.merge else 0

    @property
    def places_all(self) -> bool:
        """Whether every turn with something to route it by is in some chain."""
        return not self.merge and self.route not in ("prefix", "generations")

    @property
    def keeps_all(self) -> bool:
        """Whether every claim that may be trained is trained in some row."""
        if self.absorb != "never" or self.max_rows is not None:
            return False
        return self.places_all and self.emit == "all"


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
        aborted="train",
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
        aborted="train",
        keep_untrained=False,
    ),
    # slime's first coding-agent example, after it gave up splicing (spec: segments 2 to 8)
    "segments": Policy(
        name="segments",
        route="agents",
        equality="text",
        absorb="any",
        aborted="train",
        keep_empty=False,
        rewards="uniform",
    ),
    # SkyRL merge_stepwise_output (spec: SkyRL 6)
    "skyrl": Policy(name="skyrl", route="previous", aborted="train"),
    # prime-rl's message graph (spec: prime-rl 2.2)
    "graph": Policy(
        name="graph",
        route="messages",
        equality="content",
        equals="whole",
        order="commit",
        aborted="train",
        keep_untrained=False,
    ),
    # prime-rl interleave_rollout (spec: prime-rl 2.1)
    "strict": Policy(name="strict", route="tokens", aborted="train"),
    "per_call": Policy(name="per_call", route="none"),
    # NeMo Gym token_id_capture (spec: NeMo Gym 5), prefix_merging; its per_request is
    # route="none". It delivers emit="main"
    "nemo": Policy(
        name="nemo", route="prefix", own="every", sort="prompt", aborted="train"
    ),
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
        aborted="train",
    ),
    # ProRL-Agent-Server PrefixMergingBuilder (spec: Polar 2.3)
    "polar": Policy(
        name="polar",
        route="prompts",
        absorb="splice",
        missing_logprobs="null_row",
        aborted="train",
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
        ``"faithful"``, ``"slime"``, ``"trl"``, ``"segments"``, ``"graph"``, ``"skyrl"``,
        ``"strict"`` (also ``"interleave"``), ``"per_call"``, ``"polar"``, ``"nemo"`` or
        ``"miles"``; or a policy to start from.
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
        No preset has that name, or no policy has that choice; or two choices exclude
        each other.

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
        choices[choice] = _checked_choice(choice, value)
    if "fork_threshold" in choices:
        threshold = choices.pop("fork_threshold")
        if threshold is not None:
            choices["fork_threshold"] = chosen_int("fork_threshold", threshold)
        elif chosen.name in PRESETS:
            choices["fork_threshold"] = PRESETS[chosen.name].fork_threshold
    result = replace(chosen, **choices)  # type: ignore[arg-type]
    if result.absorb == "any" and result.own != "first":
        raise PolicyError(
            f"own={result.own!r} does not go with absorb='any', under which a row that "
            "begins anew loses what it had: expected 'first'"
        )
    if result.own == "every" and (
        result.absorb != "never" or result.max_rows is not None
    ):
        raise PolicyError(
            f"own='every' with absorb={result.absorb!r} and max_rows={result.max_rows}: "
            "a claim that one row trains and another has lost could not be counted once"
        )
    for name, value in _UNSPLICED.items():
        if result.absorb == "splice" and getattr(result, name) == value:
            raise PolicyError(f"{name}={value!r} does not go with absorb='splice'")
    check_order(result.route, result.order)
    return result


def check_order(route: Route, order: Order) -> None:
    """Raise `PolicyError` if the route has no such order."""
    if route == "prefix" and order == "commit":
        raise PolicyError(
            "order='commit' does not go with route='prefix', under which a turn may be "
            "recorded before the one that it continues: expected 'tree'"
        )


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


def _checked_choice(choice: str, value: object) -> object:
    names = {
        "route": ROUTES,
        "equality": EQUALITIES,
        "equals": EQUALS,
        "order": ORDERS,
        "absorb": ABSORBS,
        "own": OWNS,
        "emit": EMITS,
        "sort": SORTS,
        "cut": CUTS,
        "missing_logprobs": MISSING_LOGPROBS,
        "aborted": ABORTED,
        "flags": FLAGS,
        "rewards": REWARDS,
    }
    if choice in names:
        if value not in names[choice]:
            expected = ", ".join(map(repr, names[choice]))
            raise PolicyError(f"{choice}={value!r}: expected one of {expected}")
    elif choice == "max_rows":
        return None if value is None else chosen_int(choice, value, 1)
    elif choice == "dispatch_tools":
        return tool_names(choice, value)
    elif choice == "end_of_turn_token_id":
        return None if value is None else _token_id(choice, value)
    elif choice != "fork_threshold" and not isinstance(value, bool):
        raise PolicyError(f"{choice}={value!r}: expected a bool")
    return value


def _token_id(name: str, value: object) -> int:
    token = chosen_int(name, value, 0)
    if token > _LAST_TOKEN:
        raise PolicyError(f"{name}={token}: ids are below 2**31")
    return token


def tool_names(name: str, value: object) -> tuple[str, ...]:
    """Names of tools that a caller chose.

    Raises
    ------
    PolicyError
        It is no sequence of strings, or one string.
    """
    if isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
        return tuple(value)
    raise PolicyError(f"{name}={value!r}: expected a sequence of strings")


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
