"""The words and colours of causes of drift, losses and counts: of the page, sentences, the
terminal and pictures. `trajkit.policies.RULES` has what policies do.
"""

from trajkit.schema import LOSS_MEANINGS
from trajkit.schema.engine import meanings

_MENDS = meanings("""
same_text: The reply came back as the same text in other tokens: it was decoded and encoded
    again. => Send ids instead of text: `trajkit serve` with `--prompts append` (the
    default) begins the next prompt with the sampled ids.
special_tokens: A special token came back as ordinary text, or is missing. => Keep special
    tokens when replies are decoded, and check which end-of-turn token the template writes.
boolean: True, False or None came back as true, false or null. => Keep the arguments of tool
    calls as the JSON text that was sampled, instead of Python objects.
tool_arguments: The arguments of a tool call came back in another JSON notation. => Return
    the arguments as the string that was sampled. If the template serializes them, change it
    to print strings unchanged.
white_space: White space of the reply changed. => Remove `.strip()` and `| trim` from the
    client, the parser and the chat template.
reasoning_dropped: The prompt lacks the reasoning of an earlier reply. => Use a chat
    template that keeps earlier reasoning, and a client that returns it. Otherwise choose a
    policy that starts a new row there.
template: The messages came back unchanged, and the chat template rendered them differently.
    => Use a template that renders a message in the same way whatever follows it.
rewritten: The client changed or dropped an earlier message. => Look at the agent:
    compaction, edited history or retries. Such turns cannot be in one row with what they
    replace.
other_text: The text differs, and there are no messages that show who changed it. => Record
    the messages of each request.
truncated: The prompt ends inside what was sampled. => Look for a client or an engine that
    truncates the history to a maximum length.
head_dropped: The prompt drops tokens and continues with later ones. => Look for a template
    or a client that drops reasoning or old tool outputs.
middle_edited: Some tokens changed, and later ones are the same again. => Give the model's
    tokenizer: the change is then named in the text.
tail_changed: The last reply came back changed. => Give the model's tokenizer: the change is
    then named in the text.
diverged: Prompt and path do not agree again. => Look at the agent: it replaced its history,
    or another conversation has the same beginning.
""")
MENDS = {cause: text.split(" => ") for cause, text in _MENDS.items()}
"""Cause of drift (`trajkit.schema.TEXT_CAUSES`, and ``CAUSES``, which ids show) to what
happened and what to change."""

_LOSSES = {
    "absorbed": ("drift", "#d55e00"),
    "rewritten": ("drift", "#8f3f00"),
    "cut": ("end", "#e69f00"),
    "untrainable": ("context", "#cc79a7"),
    "unrouted": ("no_row", "#8a8a8a"),
    "restarted": ("drift", "#f2a36b"),
    "over_max_rows": ("no_row", "#a87400"),
    "aborted": ("context", "#a14b7c"),
    "masked": ("context", "#e5b5cf"),
    "no_logprob": ("context", "#70325a"),
    "no_splice_point": ("end", "#f0e442"),
    "quarantined": ("no_row", "#009e73"),
    "not_selected": ("no_row", "#5c5c5c"),
    "refused": ("no_row", "#00634a"),
    "retried": ("no_row", "#66c9ab"),
}
LOSS_WORDS = {x: (group, LOSS_MEANINGS[x]) for x, (group, _) in _LOSSES.items()}
"""Of a sampled token that no row trains (`trajkit.schema.LOSSES`): a group, and why."""

OUTPUTS = {"trained": "#0072b2"} | {name: color for name, (_, color) in _LOSSES.items()}
"""Colours of what a policy does with a sampled token. Distinct for people with colour
blindness: those of Okabe and Ito (Color Universal Design, 2008), and two lighter or darker
shades of each for related reasons."""

LOSS_GROUPS = {
    "trained": "trained",
    "drift": "lost to drift or a retry",
    "end": "after the end of its row",
    "no_row": "in no row",
    "context": "may not be trained",
}
"""Groups of losses in words, and the word for trained tokens."""

COUNT_WORDS = {
    "rows": "rows",
    "tokens_trained": "trained",
    "share": "of sampled",
    "tokens_lost": "lost",
    "tokens_duplicated": "duplicated",
    "tokens_out_of_context": "out of context",
    "tokens_forward": "forward",
    "tokens_padding": "padding",
    "packs": "packs",
    "tokens_packed": "packed",
    "tokens_forward_shared": "shared once",
    "longest_row": "longest row",
    "pairs_packed": "attended pairs",
}
"""Heads of the columns of `trajkit.schema.SIMULATION`, and of the share that is trained."""

ROLES = {
    "system": "#bbcc33",
    "user": "#eedd88",
    "assistant": "#99ddff",
    "tool": "#44bb99",
    "other": "#dddddd",
}
"""Who wrote a token of a prompt (Paul Tol's light scheme)."""

TIMES = {"generation": OUTPUTS["trained"], "tool": ROLES["tool"], "queue": "#dddddd"}
"""What a session spends its time on."""


def count(n: int, unit: str = "token") -> str:
    """``n`` with its unit, which gets an s if ``n`` is not 1."""
    return f"{n:,} {unit}" if n == 1 else f"{n:,} {unit}s"
