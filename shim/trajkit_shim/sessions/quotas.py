"""A session's quotas: turns, prompt and output tokens, and the context of a call.

A running call reserves what it may use, so that concurrent calls together never use
more than the session has left.
"""

from dataclasses import dataclass, field, replace

from trajkit_shim.engines.base import EngineInfo
from trajkit_shim.errors import GatewayError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one session. ``None``: unlimited."""

    max_turns: int | None = None  # answered calls
    max_prompt_tokens: int | None = None  # prompt tokens, summed over all turns
    max_output_tokens: int | None = None  # sampled tokens, summed over all turns
    max_context_tokens: int | None = None  # prompt and output of one call


@dataclass(slots=True)
class Budget:
    """What a session has used of its limits."""

    limits: Limits
    turns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    # prompt and output tokens of running calls
    _reserved: "dict[Reservation, tuple[int, int]]" = field(default_factory=dict)

    def admit(self, n: int = 1) -> "Reservation":
        """Admit a call of ``n`` replies, which counts as ``n`` turns until its release."""
        limits, turns = self.limits, self.turns + sum(call.n for call in self._reserved)
        if limits.max_turns is not None and turns < limits.max_turns < turns + n:
            left = f"{limits.max_turns - turns} of the session's {limits.max_turns}"
            raise _exceeded(
                f"{n} replies are requested; {left} turns are left", "max_turns"
            )
        _check(turns, limits.max_turns, "max_turns")
        _check(self.prompt_tokens, limits.max_prompt_tokens, "max_prompt_tokens")
        _check(self.output_tokens, limits.max_output_tokens, "max_output_tokens")
        reservation = Reservation(self, n)
        self._reserved[reservation] = (0, 0)
        return reservation

    def spend(self, prompt_tokens: int, output_tokens: int, *, answered: bool) -> None:
        """Count a recorded turn."""
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        self.turns += answered


class Reservation:
    """What one call of ``n`` replies may use; each counts the prompt again."""

    def __init__(self, budget: Budget, n: int) -> None:
        self._budget = budget
        self.n = n

    def narrow(self, info: EngineInfo) -> EngineInfo:
        """Return ``info`` with the session's context length, if that is shorter."""
        context = self._budget.limits.max_context_tokens
        if context is None or context >= info.max_context_tokens:
            return info
        return replace(info, max_context_tokens=context)

    def max_new_tokens(self, prompt_tokens: int, max_tokens: int) -> int:
        """Return how many tokens each reply may have, at most ``max_tokens``."""
        budget, limits = self._budget, self._budget.limits
        others = [used for call, used in budget._reserved.items() if call is not self]
        if limits.max_prompt_tokens is not None:
            used = budget.prompt_tokens + sum(prompt for prompt, _ in others)
            needed = self.n * prompt_tokens
            if used + needed > limits.max_prompt_tokens:
                used_up = f"{used} of the session's {limits.max_prompt_tokens}"
                message = f"the prompt has {needed} tokens, but {used_up} are used "
                message += "or reserved"
                raise _exceeded(message, "max_prompt_tokens")
        if limits.max_output_tokens is None:
            return max_tokens
        used = budget.output_tokens + sum(output for _, output in others)
        # a token for each reply
        most = limits.max_output_tokens
        _check(used + self.n - 1, most, "max_output_tokens")
        return min(max_tokens, (most - used) // self.n)

    def reserve(self, prompt_tokens: int, output_tokens: int) -> None:
        """Reserve the tokens of prompt and reply until the call is released."""
        if self in self._budget._reserved:
            tokens = self.n * prompt_tokens, self.n * output_tokens
            self._budget._reserved[self] = tokens

    def release(self) -> None:
        """End the call. Idempotent."""
        self._budget._reserved.pop(self, None)


def _check(used: int, limit: int | None, name: str) -> None:
    if limit is not None and used >= limit:
        what = name.removeprefix("max_").replace("_", " ")
        raise _exceeded(f"the session has used its {limit} {what}", name)


def _exceeded(message: str, name: str) -> GatewayError:
    return GatewayError(message, 403, code=f"{name}_exceeded")
