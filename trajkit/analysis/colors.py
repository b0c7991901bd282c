"""The colour of each kind of token, for every display: terminal, browser, plots, report.

`COLORS` are distinct for people with colour blindness: the colours of Okabe and Ito (Color
Universal Design, 2008), and two lighter or darker shades of each for related reasons.
Displays also name each kind in words.
"""

from trajkit.schema import LOSSES

TEXT, MUTED, PAPER = "#24292f", "#57606a", "#ffffff"
"""Text, secondary text, and the background that the colours are chosen for."""

COLORS = {
    "trained": "#0072b2",
    # in the row as context; another row trains it
    "duplicate": "#56b4e9",
    "context": "#c8ced6",
    # sampled, without a claim about who trains it
    "sampled": "#dcebf9",
    # lost to drift
    "drift": "#d55e00",
    "absorbed": "#d55e00",
    "rewritten": "#8f3f00",
    "restarted": "#f2a36b",
    # lost to a limit
    "cut": "#e69f00",
    "over_max_rows": "#a87400",
    # may not be trained
    "untrainable": "#cc79a7",
    "aborted": "#a14b7c",
    "masked": "#e5b5cf",
    "no_logprob": "#70325a",
    # its call is in no row, or the row ended before it
    "no_splice_point": "#f0e442",
    "quarantined": "#009e73",
    "refused": "#00634a",
    "retried": "#66c9ab",
    "unrouted": "#8a8a8a",
    "not_selected": "#5c5c5c",
}
"""Kinds of spans (`trajkit.schema.SPAN_KINDS`), losses, context and drift."""

ROLES = {
    "system": "#bbcc33",
    "user": "#eedd88",
    "assistant": "#99ddff",
    "tool": "#44bb99",
    "other": "#dddddd",
}
"""Who wrote a token of a prompt (Paul Tol's light scheme)."""

TIMES = {"generation": COLORS["trained"], "tool": ROLES["tool"], "queue": "#dddddd"}
"""What a session spends its time on."""

OUTPUTS = {kind: COLORS[kind] for kind in ("trained", *LOSSES)}
"""What a policy does with a sampled token: it trains it, or loses it for a reason."""
