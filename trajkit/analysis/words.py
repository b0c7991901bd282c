"""Causes of drift, losses and counts in words, for the page, sentences and the terminal.

`trajkit.policies.RULES` has what policies do.
"""

MENDS = {
    # causes that texts show (trajkit.schema.TEXT_CAUSES)
    "same_text": (
        "The reply came back as the same text in other tokens: it was decoded and encoded "
        "again.",
        "Send ids instead of text: `trajkit serve` with `--prompts append` (the default) "
        "begins the next prompt with the sampled ids.",
    ),
    "special_tokens": (
        "A special token came back as ordinary text, or is missing.",
        "Keep special tokens when replies are decoded, and check which end-of-turn token "
        "the template writes.",
    ),
    "boolean": (
        "True, False or None came back as true, false or null.",
        "Keep the arguments of tool calls as the JSON text that was sampled, instead of "
        "Python objects.",
    ),
    "tool_arguments": (
        "The arguments of a tool call came back in another JSON notation.",
        "Return the arguments as the string that was sampled. If the template serializes "
        "them, change it to print strings unchanged.",
    ),
    "white_space": (
        "White space of the reply changed.",
        "Remove `.strip()` and `| trim` from the client, the parser and the chat template.",
    ),
    "reasoning_dropped": (
        "The prompt lacks the reasoning of an earlier reply.",
        "Use a chat template that keeps earlier reasoning, and a client that returns it. "
        "Otherwise choose a policy that starts a new row there.",
    ),
    "template": (
        "The messages came back unchanged, and the chat template rendered them "
        "differently.",
        "Use a template that renders a message in the same way whatever follows it.",
    ),
    "rewritten": (
        "The client changed or dropped an earlier message.",
        "Look at the agent: compaction, edited history or retries. Such turns cannot be in "
        "one row with what they replace.",
    ),
    "other_text": (
        "The text differs, and there are no messages that show who changed it.",
        "Record the messages of each request.",
    ),
    # causes that ids show (trajkit.schema.CAUSES)
    "truncated": (
        "The prompt ends inside what was sampled.",
        "Look for a client or an engine that truncates the history to a maximum length.",
    ),
    "head_dropped": (
        "The prompt drops tokens and continues with later ones.",
        "Look for a template or a client that drops reasoning or old tool outputs.",
    ),
    "middle_edited": (
        "Some tokens changed, and later ones are the same again.",
        "Give the model's tokenizer: the change is then named in the text.",
    ),
    "tail_changed": (
        "The last reply came back changed.",
        "Give the model's tokenizer: the change is then named in the text.",
    ),
    "diverged": (
        "Prompt and path do not agree again.",
        "Look at the agent: it replaced its history, or another conversation has the same "
        "beginning.",
    ),
}
"""Cause of drift to what happened and what to change."""

LOSS_WORDS = {
    "absorbed": (
        "drift",
        "Drift: its row continued with the next prompt's ids instead.",
    ),
    "rewritten": ("drift", "A later request showed another message in its place."),
    "cut": ("end", "It is beyond max_row_tokens."),
    "untrainable": (
        "context",
        "Its turn has trainable = false, or its session ended in an error.",
    ),
    "unrouted": (
        "no_row",
        "Its call has no messages, and the policy compares messages.",
    ),
    "restarted": (
        "drift",
        "A later prompt changed the row's first prompt, so the row was begun again.",
    ),
    "over_max_rows": ("no_row", "Its row is beyond the policy's max_rows."),
    "aborted": ("context", "Its call was aborted."),
    "masked": ("context", "The turn's output_mask excludes it."),
    "no_logprob": ("context", "It has no logprob, and the policy needs one."),
    "no_splice_point": (
        "end",
        "Its row ended before it: a prompt has no end of turn from which to continue.",
    ),
    "quarantined": (
        "no_row",
        "Every chain with its call has a call that could continue two others, or a retry.",
    ),
    "not_selected": ("no_row", "Its chain is not among those that become rows."),
    "refused": (
        "no_row",
        "The prompt of its call does not continue the tokens of the parent.",
    ),
    "retried": (
        "no_row",
        "Its call was tried again later, and its own reply was not used.",
    ),
}
"""Of a sampled token that no row trains (`trajkit.schema.LOSSES`): a group, and why."""

LOSS_GROUPS = {
    "trained": "trained",
    "drift": "lost to drift",
    "end": "after the end of its row",
    "no_row": "in no row",
    "context": "may not be trained",
}
"""Groups of losses in words, and the word for trained tokens."""

CAUSE_PHRASES = {
    "diverged": "they do not agree again",
    "head_dropped": "the prompt drops tokens there",
    "middle_edited": "the tokens there changed",
    "tail_changed": "the last reply came back changed",
    "truncated": "the prompt ends there",
}
"""Causes that ids show, inside a sentence; others are their own words."""

TEXT_PHRASES = {
    "truncated": "text cut off",
    "same_text": "same text in other tokens",
    "special_tokens": "special tokens changed",
    "boolean": "booleans written differently",
    "tool_arguments": "tool arguments written differently",
    "white_space": "white space changed",
    "reasoning_dropped": "reasoning dropped",
    "template": "text changed",
    "rewritten": "text changed",
    "other_text": "text changed",
}
"""What happened to a text, by cause."""


def count(n: int, unit: str = "token") -> str:
    """``n`` with its unit, which gets an s if ``n`` is not 1."""
    return f"{n:,} {unit}" if n == 1 else f"{n:,} {unit}s"
