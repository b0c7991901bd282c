"""Rows in the formats of trainers, one module per trainer.

Every function takes ``rows`` as a table, `trajkit.schema.ROWS`, with all rows of each
session one after another. It raises `trajkit.errors.ExportError`, with session, row and
rule, where the trainer would train the rows wrongly (docs/export.md has the checks): a
reward that the trainer reads is null, rows are too long, a rollout has several rows for a
trainer that takes one, rows have values that it has no field for. It warns with
`trajkit.errors.NoSignalWarning` where a step would change nothing. Where a docstring asks
for advantages, rows need the column ``advantage`` of `trajkit.add_advantages`.

Functions named ``*_fields`` return Python objects with the trainer's field names. The
others return objects of the trainer's classes, which they import when they are called.

Trainers that divide by the trained tokens of a step take row weights with
``weighted=step_counts(rows)``, the counts of all rows of the step: the loss of the step is
then `trajkit.learn.reference_loss` of its rows.
"""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit.export._rows import StepCounts as StepCounts
    from trajkit.export._rows import sessions_of as sessions_of
    from trajkit.export._rows import step_counts as step_counts

MODULES = (
    *("areal", "miles", "nemo_rl", "openrlhf", "prime_rl", "rlinf", "rllm", "roll"),
    *("sft", "skyrl", "slime", "tinker", "trl", "verl"),
)

FILE_FORMATS = ("llama-factory", "prime-rl", "sft", "skyrl-sft", "slime", "tinker")
"""The formats of ``trajkit export``; `trajkit.export.files` writes them."""

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, MODULES)
