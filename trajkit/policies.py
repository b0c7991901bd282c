"""Every rule of the field as one frozen record of choices."""

import re
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias, get_args, get_origin

from trajkit._arguments import check_choice, chosen_int, chosen_names, did_you_mean
from trajkit._kernel_names import numbers
from trajkit.errors import PolicyError

ParentBy: TypeAlias = Literal[
    "messages",
    "agents",
    "tokens",
    "previous",
    "none",
    "prompts",
    "prefix",
    "generations",
]
MessageEquality: TypeAlias = Literal[
    "values", "text", "content", "strict", "role_content_only"
]
OnDrift: TypeAlias = Literal[
    "fork",
    "absorb_short_reply",
    "absorb_short_drift",
    "absorb_any",
    "splice",
]
Rewards: TypeAlias = Literal["copy", "uniform", "final_only"]
TieBreak: TypeAlias = Literal["first", "tokens", "full_path"]
TrainIn: TypeAlias = Literal["first", "earliest", "every"]
MissingLogprobs: TypeAlias = Literal["keep", "untrain", "raise", "null_row"]
ChainOrder: TypeAlias = Literal["tree", "recorded"]
FlagScope: TypeAlias = Literal["chain", "row"]
RowSelection: TypeAlias = Literal["all", "main"]
RowOrder: TypeAlias = Literal["turn", "prompt"]
TruncateAt: TypeAlias = Literal["tokens", "calls"]

DRIFT_ACTIONS = numbers("ON_DRIFT_", [x for x in get_args(OnDrift) if x != "splice"])
"""What kernels do at drift; rows are spliced before (trajkit.rows.splice)."""
TIE_BREAKS = numbers("TIE_BREAK_", get_args(TieBreak))
TRAINING_ROWS = numbers("TRAIN_IN_", get_args(TrainIn))
"""The kernels' numbers of these choices, by name."""

_LAST_TOKEN = 2**31 - 1
# choices that are integers, and the least of each
_INTEGERS = {"fork_threshold": -(2**63), "max_rows": 1, "end_of_turn_token_id": 0}

# choices that have no rule for spliced rows
_NOT_SPLICED = {"parent_by": "prefix", "row_selection": "main", "truncate_at": "calls"}

DEFAULT_FORK_THRESHOLD = 1024
"""Of slime's ``TrajectoryManager`` and of TRL (their sources: `PRESETS`)."""


DISPATCH_TOOLS = ("Task", "Agent")
"""Of Claude Code, whose sub-agents slime's first coding-agent example recorded."""


# equalities under which equal messages call and answer the same tools
_TELLS_TOOLS = ("values", "text")


_POLICY = """How calls become rows. Make one with `trajkit.policy`.

A wrong value raises `PolicyError`. docs/policies.md explains each preset, and
docs/glossary.md defines the terms.

Attributes
----------
name : str
    The preset that the choices started from.
parent_by : str
    How a call finds the call that it continues, its parent; see
    `trajkit.schema.LINK_REASONS`. One of:

    - ``"messages"``: The generated message nearest above it in the message tree.
    - ``"agents"``: The last call of its agent, if that call's messages are the first ones
      of the request. A session has a main agent and at most one active sub-agent. The
      sub-agent starts when the main agent calls a tool in dispatch_tools and ends when a
      request contains that tool's result; in between, calls that do not continue the main
      agent's history belong to it.
    - ``"tokens"``: The longest row end that is a prefix of its prompt.
    - ``"previous"``: The call before it.
    - ``"none"``: No call: every call is a row.
    - ``"prompts"``: The last call of the chain whose last prompt is the longest prefix of
      its prompt.
    - ``"prefix"``: The call, recorded before or after, whose path is the longest prefix
      of its prompt; in sessions with recorded parents, the recorded one. Ambiguous calls,
      and every chain with one, are quarantined. A call is ambiguous if several calls
      match it equally, or if it is a retry (same prompt as another call) that nothing
      continues; if no retry was continued, the first is kept.
    - ``"generations"``: The last call whose messages and reply are the first ones of the
      request. A call is refused if its parent stopped for its length, or if
      ``fork_threshold`` or more tokens of its parent's path are not in its prompt. A call
      that none continues, with a later call of the same parent, is a retry.
dispatch_tools : tuple of str
    Tools whose calls start a sub-agent.
merge_rewrites : bool
    A reply that a later request shows in another form takes the place of one that is
    shorter than ``fork_threshold``, has no siblings and was not continued.
message_equality : str
    When two messages are equal: ``"values"``, Python's ``==``; ``"text"``, the JSON text
    with sorted keys, without ``cache_control``; ``"content"``, the role, content,
    reasoning, tool calls and tool_call_id, null content being empty text; ``"strict"``,
    the role, content, reasoning_content and tool_calls; ``"role_content_only"``, the role
    and content. The last two take None, "" and [] as equal. ``"agents"`` takes the first
    two only.
compare_tools : bool
    For ``parent_by="messages"``: requests that offer other tools (``tools_key`` of
    `trajkit.schema.ROUTING`) have no message in common. Turns whose tools are unknown are
    taken for turns with the same tools.
tie_break : {"first", "tokens", "full_path"}
    Which of several equal replies a request continues. first: the first one. tokens: the
    one whose path the prompt repeats for longest; if two are equal, the one with the
    shorter path, or else the first (an empty list of messages is routed by tokens, too).
    full_path: the nearest message above whose whole path the prompt repeats, so that no
    row drifts; if two are equal, the last one.
chain_order : {"tree", "recorded"}
    The order of chains, and so of rows: as the traversal of the links reaches their last
    turns, or as these were recorded. ``"prefix"`` has the first only.
on_drift : str
    What happens to a row when the next prompt departs from its path; see ``keep_prefix``.
    ``"splice"`` does not go with ``parent_by="prefix"``, ``row_selection="main"`` or
    ``truncate_at="calls"``. One of:

    - ``"fork"``: A new row starts.
    - ``"absorb_short_reply"``: If drift starts in the last reply, and the next reply has
      fewer than ``fork_threshold`` tokens, the row continues with the prompt's tokens.
      Otherwise a new row starts.
    - ``"absorb_short_drift"``: If drift starts in the last reply, and fewer than
      ``fork_threshold`` tokens of the row follow it, the row continues with the prompt's
      tokens. Otherwise a new row starts.
    - ``"absorb_any"``: The row continues with the prompt's tokens and loses every reply
      that does not end before the drift. Drift inside the prompt that opened the row
      restarts it.
    - ``"splice"``: The row keeps the reply as sampled and continues with what the next
      prompt has after the first end of turn that follows the previous prompt, so later
      replies may be out of context. Without an end of turn the row ends, and no row
      contains that call or what continues it.
end_of_turn_token_id : int or None
    For ``"splice"``. None: the last token of the first output in the chain whose
    finish_reason is stop, tool_calls or stop_sequence.
keep_prefix : bool
    The part of an absorbed reply before the drift stays trained.
fork_threshold : int
    In tokens. 0 and below: nothing is merged or absorbed.
train_in : {"first", "earliest", "every"}
    Which of several rows with the same output trains it: the first chain; the chain whose
    last call came first; each of them. ``"absorb_any"`` needs ``"first"``; ``"every"``
    needs ``"fork"`` and no ``max_rows``.
row_selection : {"all", "main"}
    Every chain becomes a row, or one per session: the first chain of the root that was
    created first (by ``started_at`` and ``request_id``, else by turn).
row_order : {"turn", "prompt"}
    For ``parent_by="none"``: rows in the order of turns, or from the shortest prompt up,
    equals by ``request_id``. ``"prefix"`` always has the second.
truncate_at : {"tokens", "calls"}
    Where ``max_row_tokens`` ends a row: at that token, or at the call before if the token
    is inside a prompt.
missing_logprobs : {"keep", "untrain", "raise", "null_row"}
    Sampled tokens without a logprob are trained with a null; are context, counted as
    ``lost_no_logprob``; are an error; or are trained, and the whole row has no logprobs.
train_aborted : bool
    Train turns whose ``finish_reason`` is ``abort``, as several of the systems do. False:
    they are context, counted as ``lost_aborted``.
keep_untrained : bool
    Return rows in which nothing is trained. A row that only repeats turns of other chains
    is left out all the same.
keep_empty : bool
    Return rows that hold nothing after the prompt that opened them.
max_rows : int or None
    Per session, return the first rows and the last, at most this many; 1 returns the
    last. None: all.
rewards : {"copy", "uniform", "final_only"}
    How the session's reward is spread over its rows (`trajkit.learn.spread_rewards`).
flag_scope : {"chain", "row"}
    Whether ``truncated``, ``use_tool`` and ``ill_formed`` describe the chain from the
    first call to the leaf, or the calls in the row.
"""


def _rules(text: str) -> dict[str, dict[str, str]]:
    """The rules in lists of a text, by the choice above the list and its value."""
    found = {}
    for choice in re.split(r"^(?=\w)", text, flags=re.MULTILINE):
        items = re.findall(r'- ``"(\w+)"``: (.*?\.)$(?!\n      )', choice, re.M | re.S)
        if items:
            name = choice.split(" ")[0]
            found[name] = {value: " ".join(rule.split()) for value, rule in items}
    return found


RULES = _rules(_POLICY)
"""What a policy does, in words, by choice and value: documentation, command line and page
take the text from here."""


def rule_of(policy: "Policy", choice: str) -> str:
    """What a policy does under one of the choices in `RULES`, with its own numbers."""
    text = RULES[choice][getattr(policy, choice)]
    return text.replace("``fork_threshold``", f"{policy.fork_threshold:,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    __doc__ = _POLICY

    name: str
    parent_by: ParentBy
    dispatch_tools: tuple[str, ...] = DISPATCH_TOOLS
    merge_rewrites: bool = False
    message_equality: MessageEquality = "values"
    compare_tools: bool = False
    tie_break: TieBreak = "first"
    chain_order: ChainOrder = "tree"
    on_drift: OnDrift = "fork"
    keep_prefix: bool = False
    fork_threshold: int = 0
    train_in: TrainIn = "first"
    row_selection: RowSelection = "all"
    row_order: RowOrder = "turn"
    truncate_at: TruncateAt = "tokens"
    missing_logprobs: MissingLogprobs = "keep"
    train_aborted: bool = False
    keep_untrained: bool = True
    keep_empty: bool = True
    max_rows: int | None = None
    rewards: Rewards = "copy"
    flag_scope: FlagScope = "row"
    end_of_turn_token_id: int | None = None

    def __post_init__(self) -> None:
        settle = object.__setattr__  # as Python's own types, so that there is a hash
        for name, known in NAMED_CHOICES.items():
            check_choice(name, getattr(self, name), known, PolicyError)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is bool and not isinstance(value, bool):
                raise PolicyError(f"{field.name}={value!r}: expected a bool")
        for name, least in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name == "fork_threshold":
                settle(self, name, chosen_int(name, value, least, PolicyError))
        token = self.end_of_turn_token_id
        if token is not None and token > _LAST_TOKEN:
            raise PolicyError(f"end_of_turn_token_id={token}: ids are below 2**31")
        tools = chosen_names("dispatch_tools", self.dispatch_tools, PolicyError)
        settle(self, "dispatch_tools", tools)
        if self.on_drift == "absorb_any" and self.train_in != "first":
            raise PolicyError(
                f"train_in={self.train_in!r} does not go with on_drift='absorb_any', "
                "under which a row that restarts loses what it had: expected 'first'"
            )
        if self.train_in == "every" and (self.on_drift != "fork" or self.max_rows):
            raise PolicyError(
                f"train_in='every' with on_drift={self.on_drift!r} and "
                f"max_rows={self.max_rows}: an output that one row trains and another "
                "has lost could not be counted once"
            )
        for name, value in _NOT_SPLICED.items():
            if self.on_drift == "splice" and getattr(self, name) == value:
                raise PolicyError(
                    f"{name}={value!r} does not go with on_drift='splice'"
                )
        if self.parent_by == "prefix" and self.chain_order == "recorded":
            raise PolicyError(
                "chain_order='recorded' does not go with parent_by='prefix', under which "
                "a turn may be recorded before the one that it continues: expected 'tree'"
            )
        equality = self.message_equality
        if self.parent_by == "agents" and equality not in _TELLS_TOOLS:
            raise PolicyError(
                f"message_equality={equality!r} does not go with parent_by='agents', under "
                "which equal messages must call and answer the same tools: expected one of "
                f"{', '.join(_TELLS_TOOLS)}"
            )

    @property
    def absorbs(self) -> bool:
        """Whether a row may lose a reply to drift."""
        return self.on_drift not in ("fork", "splice")

    @property
    def absorbs_short(self) -> bool:
        """Whether a row may lose a reply to drift shorter than ``fork_threshold``."""
        return self.on_drift in ("absorb_short_reply", "absorb_short_drift")

    @property
    def merge_threshold(self) -> int:
        """Output length, in tokens, below which message routing may merge; 0: never."""
        return max(self.fork_threshold, 0) if self.merge_rewrites else 0

    @property
    def places_all(self) -> bool:
        """Whether every turn with something to route it by is in some chain."""
        return not self.merge_rewrites and self.parent_by not in (
            "prefix",
            "generations",
        )

    @property
    def keeps_all(self) -> bool:
        """Whether every trainable token is trained in some row."""
        if self.on_drift != "fork" or self.max_rows is not None:
            return False
        return self.places_all and self.row_selection == "all"


NAMED_CHOICES: dict[str, tuple[str, ...]] = {
    field.name: get_args(field.type)
    for field in fields(Policy)
    if get_origin(field.type) is Literal
}
"""The values of each choice that is one of several names."""

for _choice, _values in RULES.items():
    if tuple(_values) != NAMED_CHOICES[_choice]:
        raise ImportError(
            f"{_choice} has rules of {', '.join(_values)}, and the values "
            f"{', '.join(NAMED_CHOICES[_choice])}: write a rule for each, in their order"
        )

PRESETS: dict[str, Policy] = {
    # nothing that was sampled is lost; a retry or a sibling is a branch of its own
    "faithful": Policy(
        name="faithful", parent_by="messages", tie_break="tokens", keep_untrained=False
    ),
    # slime's TrajectoryManager:
    # https://github.com/THUDM/slime/blob/624b824/slime/agent/trajectory.py
    "slime": Policy(
        name="slime",
        parent_by="messages",
        merge_rewrites=True,
        on_drift="absorb_short_reply",
        fork_threshold=DEFAULT_FORK_THRESHOLD,
        train_aborted=True,
        keep_untrained=False,
        flag_scope="chain",
    ),
    # TRL's async_grpo, message mode:
    # https://github.com/huggingface/trl/blob/f2cd577/trl/experimental/async_grpo/async_rollout_worker.py
    "trl": Policy(
        name="trl",
        parent_by="previous",
        on_drift="absorb_short_drift",
        keep_prefix=True,
        fork_threshold=DEFAULT_FORK_THRESHOLD,
        train_aborted=True,
        keep_untrained=False,
    ),
    # slime's first coding-agent example, after it gave up splicing:
    # https://github.com/THUDM/slime/blob/8fc32230d/slime/agent/trajectory.py
    "segments": Policy(
        name="segments",
        parent_by="agents",
        message_equality="text",
        on_drift="absorb_any",
        train_aborted=True,
        keep_empty=False,
        rewards="uniform",
    ),
    # SkyRL's merge_stepwise_output:
    # https://github.com/NovaSky-AI/SkyRL/blob/a956457/skyrl/train/generators/utils.py
    "skyrl": Policy(name="skyrl", parent_by="previous", train_aborted=True),
    # prime-rl's message graph, which verifiers makes; tools as from 0.4.0 on:
    # https://github.com/PrimeIntellect-ai/verifiers/blob/v0.4.0/verifiers/v1/graph.py
    "graph": Policy(
        name="graph",
        parent_by="messages",
        message_equality="content",
        compare_tools=True,
        tie_break="full_path",
        chain_order="recorded",
        train_aborted=True,
        keep_untrained=False,
    ),
    # prime-rl's interleave_rollout, of its first version:
    # https://github.com/PrimeIntellect-ai/prime-rl/blob/b1c49e530/src/prime_rl/orchestrator/trajectories.py
    "strict": Policy(name="strict", parent_by="tokens", train_aborted=True),
    "per_call": Policy(name="per_call", parent_by="none"),
    # NeMo Gym's prefix_merging:
    # https://github.com/NVIDIA-NeMo/Gym/blob/07d6b0d/nemo_gym/token_id_capture/builder.py
    # Its per_request is
    # parent_by="none". It delivers row_selection="main"
    "nemo": Policy(
        name="nemo",
        parent_by="prefix",
        train_in="every",
        row_order="prompt",
        train_aborted=True,
    ),
    # miles' session v2:
    # https://github.com/radixark/miles/tree/31f1ca9/miles/rollout/session/v2
    # fork_threshold is its max_trim_tokens
    # and one more, max_row_tokens its max_seq_len
    "miles": Policy(
        name="miles",
        parent_by="generations",
        message_equality="strict",
        on_drift="absorb_short_drift",
        keep_prefix=True,
        fork_threshold=1,
        train_in="earliest",
        truncate_at="calls",
        train_aborted=True,
    ),
    # Polar's PrefixMergingBuilder:
    # https://github.com/NVIDIA-NeMo/ProRL-Agent-Server/blob/93a0f75/src/polar/trajectory/builder/prefix_merging.py
    "polar": Policy(
        name="polar",
        parent_by="prompts",
        on_drift="splice",
        missing_logprobs="null_row",
        train_aborted=True,
    ),
}
"""The named policies."""

ALIASES = {
    # AReaL's export_style "individual", its default: a row per interaction.
    # https://github.com/areal-project/AReaL/blob/4aef98d8d8/areal/experimental/openai/cache.py
    "areal": PRESETS["per_call"],
    # agentcore-rl-toolkit since its pull request 149: slime's message tree, whose rows end
    # at any drift.
    # https://github.com/awslabs/agentcore-rl-toolkit/pull/149
    "art": replace(
        PRESETS["slime"], merge_rewrites=False, on_drift="fork", fork_threshold=0
    ),
    # rLLM's transform: a step whose prompt does not begin with all tokens of the segment
    # opens the next segment.
    # https://github.com/rllm-org/rllm/blob/9beb6e0f/rllm/trainer/verl/transform.py
    "rllm": PRESETS["skyrl"],
    # verl's agent loop keeps one growing list of ids; its gateway closes the list and
    # begins another where a request does not extend it.
    # https://github.com/verl-project/verl/blob/1dda039b9c/verl/experimental/agent_loop
    "verl": PRESETS["skyrl"],
}
"""Rules of other systems that choices of a preset express, by the system's name."""


def policy(name: str | Policy, **choices: object) -> Policy:
    """The named policy, with some of its choices made otherwise.

    Parameters
    ----------
    name : str or Policy
        ``"faithful"``, ``"slime"``, ``"trl"``, ``"segments"``, ``"graph"``, ``"skyrl"``,
        ``"strict"``, ``"per_call"``, ``"polar"``, ``"nemo"`` or
        ``"miles"``; a system with the rule of one of these (`ALIASES`); or a policy to
        start from.
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
    presets = PRESETS | ALIASES
    if isinstance(name, Policy):
        chosen = name
    elif isinstance(name, str) and name in presets:
        chosen = presets[name]
    else:
        raise PolicyError(
            f"policy {name!r} does not exist{did_you_mean(name, [*presets])}: expected "
            f"one of {', '.join(sorted(presets))}"
        )
    if not choices:
        return chosen
    known = {field.name for field in fields(Policy)} - {"name"}
    for choice in choices:
        if choice not in known:
            raise PolicyError(
                f"policy {chosen.name!r} has no choice {choice!r}"
                f"{did_you_mean(choice, known)}: expected one of "
                f"{', '.join(sorted(known))}"
            )
    if choices.get("fork_threshold", 0) is None:
        choices["fork_threshold"] = PRESETS.get(chosen.name, chosen).fork_threshold
    return replace(chosen, **choices)  # type: ignore[arg-type]
