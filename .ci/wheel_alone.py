"""Tries an installed wheel in an environment that holds nothing else.

Run it with ``python -I`` away from the checkout, so that only the wheel is imported.
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import trajkit as tk

COMMAND = Path(sys.executable).with_name("trajkit")

# Public names are imported when they are first used.
for name in dir(tk):
    getattr(tk, name)

# The core's dependencies, and the module names that Cython registers.
loaded = {name.partition(".")[0] for name in sys.modules}
loaded = {name for name in loaded if not name.startswith(("_", "cython_runtime"))}
loaded -= {name.partition(".")[0] for name in sys.stdlib_module_names}
assert loaded == {"numpy", "pyarrow", "trajkit"}, loaded

installed = {found.name for found in importlib.metadata.distributions()}
assert installed - {"pip", "setuptools"} == {"numpy", "pyarrow", "trajkit"}, installed

turns = tk.from_records(
    [
        {"session_id": "a", "prompt_ids": [1, 2], "output_ids": [3, 4]},
        {"session_id": "a", "prompt_ids": [1, 2, 3, 4, 5], "output_ids": [6]},
    ]
)
rows = tk.linearize(turns, policy="strict", reward=1.0)
assert rows["input_ids"].to_pylist() == [[1, 2, 3, 4, 5, 6]], rows
assert rows["loss_mask"].to_pylist() == [[False, False, True, True, False, True]], rows

tk.write_turns(turns, "turns.parquet")
options = ["--policy", "strict", "--reward", "1"]
subprocess.run(
    [COMMAND, "linearize", "turns.parquet", "-o", "rows.parquet", *options], check=True
)
assert tk.read_rows("rows.parquet").equals(rows)

# Without the extra, a command of the shim says what to install.
serve = subprocess.run(
    [COMMAND, "serve", "--out", "run"], capture_output=True, check=False, text=True
)
assert serve.returncode == 2, serve
assert "trajkit[shim]" in serve.stderr, serve
