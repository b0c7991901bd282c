"""What each cause of drift and each loss means in a report, and what to change."""

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
        "Record the messages of each request, and run this report again.",
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
        "Give the report a tokenizer: it then names the change in the text.",
    ),
    "tail_changed": (
        "The last reply came back changed.",
        "Give the report a tokenizer: it then names the change in the text.",
    ),
    "diverged": (
        "Prompt and path do not agree again.",
        "Look at the agent: it replaced its history, or another conversation has the same "
        "beginning.",
    ),
}
"""Cause of drift to what happened and what to change."""

LOSS_WORDS = {
    "absorbed": "Drift: the row continued with the next prompt's ids in their place.",
    "rewritten": "A later request showed another message in their place.",
    "cut": "Beyond max_row_tokens.",
    "untrainable": "The turn has trainable = false, or its session ended in an error.",
    "unrouted": "The request has an empty list of messages.",
    "restarted": "Drift inside the row's first prompt: the row started again.",
    "over_max_rows": "Beyond the policy's max_rows.",
    "aborted": "The call was aborted.",
    "masked": "Excluded by the turn's output_mask.",
    "no_logprob": "The engine gave no logprob, and the policy needs one.",
    "no_splice_point": "No end of turn in a prompt at which the row could continue.",
    "quarantined": "Every chain with them has an ambiguous call.",
    "not_selected": "Their chain is not among those that become rows.",
    "refused": "The prompt does not continue the tokens of the turn before it.",
    "retried": "Nothing continues the call, and a later call has the same parent.",
}
"""Why a policy does not train sampled tokens (`trajkit.schema.LOSSES`)."""
