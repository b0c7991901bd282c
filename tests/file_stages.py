"""The commands that go from file to file, as functions over `trajkit.run`."""

import trajkit as tk

STAGE = {"reward", "sessions", "max_row_tokens", "threads"}


def linearize_file(source, output, policy="faithful", *, report=None, **options):
    """What ``trajkit linearize`` does."""
    chosen = {name: options.pop(name) for name in STAGE & {*options}}
    weigh_by = options.pop("weigh_by", "token")

    def stage(turns):
        counts = []
        rows = tk.linearize_batches(turns, policy, report=counts, **chosen)
        if weigh_by != "token":
            rows = tk.add_weights_batches(rows, weigh_by)
        return {"rows": rows, "report": counts}

    outputs = {"rows": output} if report is None else {"rows": output, "report": report}
    job = {
        "stage": "linearize",
        "policy": repr(policy),
        "options": repr((chosen, weigh_by)),
    }
    return tk.run(source, stage, outputs, resume=job, **options)


def compact_file(source, output, **options):
    return tk.run(source, tk.compact, output, resume={"stage": "compact"}, **options)


def expand_file(source, output, **options):
    return tk.run(source, tk.expand, output, resume={"stage": "expand"}, **options)
