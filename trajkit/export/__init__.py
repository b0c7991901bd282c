"""Rows in the formats of trainers, one module per trainer.

Every function takes ``rows`` as a table, `trajkit.schema.ROWS`, with all
rows of each session. It checks them first, and raises `trajkit.errors.ExportError` where
the format cannot carry them (see `trajkit.export._rows.checked_rows`); a function that asks
for more states only that. Functions named ``*_fields`` return plain Python objects with the
trainer's field names. The others return objects of the trainer's own classes, which they
import when they are called.
"""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit.export._rows import StepCounts as StepCounts
    from trajkit.export._rows import sessions_of as sessions_of
    from trajkit.export._rows import step_counts as step_counts

MODULES = (
    "areal",
    "miles",
    "nemo_rl",
    "openrlhf",
    "prime_rl",
    "rlinf",
    "rllm",
    "roll",
    "sft",
    "skyrl",
    "slime",
    "tinker",
    "trl",
    "verl",
)

FILE_FORMATS = ("llama-factory", "prime-rl", "sft", "skyrl-sft", "slime", "tinker")
"""The formats of ``trajkit export``; `trajkit.export.files` writes them."""

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, MODULES)
