"""What a session may use up: turns, prompt and output tokens, and the context of a call.

A call under way holds what it may use, so that calls side by side never use more than
the session has left.
"""

from dataclasses import dataclass, field, replace

from trajkit_shim.engine import EngineInfo
from trajkit_shim.errors import GatewayError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one session. ``None``: none."""

    # calls that may be answered
    max_turns: int | None = None
    # prompt tokens of all its turns together
    max_prompt_tokens: int | None = None
    # sampled tokens of all its turns together
    max_output_tokens: int | None = None
    # prompt and output of one call
    max_context_tokens: int | None = None


@dataclass(slots=True)
class Budget:
    """What is left of a session's limits."""

    limits: Limits
    turns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    # of the calls under way: prompt and output tokens that they may use
    _held: "dict[Allowance, tuple[int, int]]" = field(default_factory=dict)

    def admit(self) -> "Allowance":
        """A further call; it counts as a turn until it is released.

        Raises
        ------
        GatewayError
            403: the session has had its turns or its tokens.
        """
        _check(self.turns + len(self._held), self.limits.max_turns, "max_turns")
        _check(self.prompt_tokens, self.limits.max_prompt_tokens, "max_prompt_tokens")
        _check(self.output_tokens, self.limits.max_output_tokens, "max_output_tokens")
        allowance = Allowance(self)
        self._held[allowance] = (0, 0)
        return allowance

    def spend(self, prompt_tokens: int, output_tokens: int, *, answered: bool) -> None:
        """A turn was recorded."""
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        self.turns += answered


class Allowance:
    """What one call may use."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def within(self, info: EngineInfo) -> EngineInfo:
        """The engine's limits, or the session's where they are narrower."""
        most = self._budget.limits.max_context_tokens
        if most is None or most >= info.max_context_tokens:
            return info
        return replace(info, max_context_tokens=most)

    def left(self, prompt_tokens: int, most: int) -> int:
        """How many tokens may be sampled, of ``most`` at the most.

        Raises
        ------
        GatewayError
            403: the prompt is longer than what is left, or nothing may be sampled.
        """
        budget, limits = self._budget, self._budget.limits
        others = [held for call, held in budget._held.items() if call is not self]
        if limits.max_prompt_tokens is not None:
            used = budget.prompt_tokens + sum(prompt for prompt, _ in others)
            if used + prompt_tokens > limits.max_prompt_tokens:
                raise _spent(
                    f"a prompt of {prompt_tokens} tokens, where {used} of the session's "
                    f"{limits.max_prompt_tokens} are used or under way",
                    "max_prompt_tokens",
                )
        if limits.max_output_tokens is None:
            return most
        used = budget.output_tokens + sum(output for _, output in others)
        _check(used, limits.max_output_tokens, "max_output_tokens")
        return min(most, limits.max_output_tokens - used)

    def hold(self, prompt_tokens: int, output_tokens: int) -> None:
        """Keep what the call may use from others until it is released."""
        if self in self._budget._held:
            self._budget._held[self] = (prompt_tokens, output_tokens)

    def release(self) -> None:
        """The call is over. Releasing it again changes nothing."""
        self._budget._held.pop(self, None)


def _check(used: int, most: int | None, name: str) -> None:
    if most is not None and used >= most:
        what = name.removeprefix("max_").replace("_", " ")
        raise _spent(f"the session has had its {most} {what}", name)


def _spent(message: str, name: str) -> GatewayError:
    return GatewayError(message, 403, code=f"{name}_exceeded")
