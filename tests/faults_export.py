"""Faults in exporters, masks, losses and balance, and the tests that should catch them.

    python -m tests.faults_export [WORD ...]

Each fault is a change of one text in a copy of the package; a word picks the faults with it
in their file or text. The program names those that no test catches, and ends with 1 if more
than one of them is left.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = {
    "export": "tests/export tests/trainers/test_recorded.py",
    "learn": "tests/learn",
    "packs": "tests/training/test_packs_balance.py",
}


def parsed(text: str) -> list[tuple[str, str, str, str]]:
    """File, text, fault and tests of each line; a line with a file is for those below.

    Newlines are written as \\n, and tests follow the file unless they are its package's.
    """
    found, path, tests = [], "", ""
    for line in re.sub(r"\n +->", " ->", text).strip().splitlines():
        if not line.startswith(" "):
            path, _, tests = line.partition(": ")
            tests = tests or TESTS[path.partition("/")[0]]
            continue
        right, wrong = line.strip().strip("|").split("| -> |")
        found.append((path, *(x.replace("\\n", "\n") for x in (right, wrong)), tests))
    return found


FAULTS = parsed(r"""
export/_rows.py
    |setdefault((alone, uid), | -> |setdefault(alone, |
    |f"session {own['session_id']}"| -> |own["session_id"]|
    |members[group] += int(edges[line])| -> |members[group] += 1|
    |repetition=members[group] - 1| -> |repetition=0|
    |np.flatnonzero(np.diff(session) < 0)| -> |()|
    |np.flatnonzero(np.diff(numbers) < 0)| -> |()|
    |if sizes[row.group] != expected:| -> |if sizes[row.group] > expected:|
    |(target.single or target.runs) and| -> |target.runs and|
export/slime.py
    |key=lambda row: row.group| -> |key=lambda row: 0|
    |rollouts.setdefault(row.rollout, | -> |rollouts.setdefault(row.place, |
export/areal.py
    |groupby(checked, attrgetter("group"))| -> |groupby(checked, attrgetter("place"))|
export/trl.py
    |first_group_id + row.group| -> |first_group_id|
export/skyrl.py
    |{row.uid}_{row.repetition}| -> |{row.uid}_{row.row_index}|
export/_rows.py
    |if 0 == first < n:| -> |if first < 0:|
    |not 0 < row.prompt_length <= first| -> |not 0 < row.prompt_length|
export/areal.py
    |trained[-1] + 1]| -> |trained[-1] + 2]|
    |number, CONTEXT)| -> |0, CONTEXT)|
export/nemo_rl.py
    |"tool" if start else "user"| -> |"assistant"|
export/openrlhf.py
    |prepend=False, append=False| -> |prepend=True, append=False|
export/tinker.py
    |gains[1:]| -> |gains[:-1]|
    |row.loss_mask[1:]| -> |row.loss_mask[:-1]|
export/sft.py
    |np.where(row.loss_mask, row.input_ids, IGNORED)| -> |row.input_ids|
export/verl.py
    |scores[line, stop - 1] = row.reward| -> |scores[line, -1] = row.reward|
export/prime_rl.py
    |bounds = [*sizes[:-1], sum(sizes[-1:]) + n_padding]| -> |bounds = [*sizes, n_padding]|
    |np.concatenate([experts, experts[-1:]])| -> |np.concatenate([experts, experts[:1]])|
    |"<u2" if experts.max() > 255| -> |"<u2" if experts.max() > 2**16|
export/skyrl.py
    |[own, *(k for k in ids if k != own)]| -> |ids|
export/slime.py
    |[0, *accumulate(map(len, ids))]| -> |[*accumulate(map(len, ids))]|
export/_rows.py
    |if ids and row.input_ids[k] not in ids:| -> |if False:|
    |is not None and n > cut:| -> |is not None and n > cut + 1:|
export/areal.py
    |if name is not None or version is None:| -> |if name is not None:|
export/slime.py
    |return found[row.prompt_length :]| -> |return found[: len(found) - row.prompt_length]|
export/_rows.py
    |*= weighted.tokens / weighted.rollouts| -> |*= weighted.tokens|
    |weight is None or not 0 <= weight| -> |not 0 <= (weight or 0)|
    |np.where(row.loss_mask, gains, 0.0)| -> |np.broadcast_to(gains, row.loss_mask.shape)|
export/slime.py
    |fill_null(0.0)| -> |fill_null(1.0)|
learn/baselines.py
    |top - bottom <= (1e-5 if single else 1e-9) * size| -> |top == bottom|
    |if not len(gain) or gain.any():| -> |if True:|
    |(n - 1, 1)\n        base, valid| -> |(n, 1)\n        base, valid|
learn/loss.py
    |fill_null(np.nan).to_numpy()| -> |fill_null(0.0).to_numpy()|
    |~np.isfinite(values))[:1]| -> |~np.isfinite(values))[:0]|
learn/rewards.py
    |np.maximum(n_trained[line], 1)| -> |1|
learn/weights.py
    |mask=mask_sum == 0| -> |mask=None|
learn/observations.py
    |np.where(complete, everything, np.maximum(covered, seen))| -> |seen|
packs/balancing.py: tests/training/test_packs_balance.py
    |size = ranks if equal_counts else 1| -> |size = ranks|
packs/packing.py: tests/training/test_packs.py -k group_of_a_stream
    |if n_tokens >= _PACKS_AT_A_TIME * max_tokens and not goes_on:|
        -> |if n_tokens >= _PACKS_AT_A_TIME * max_tokens:|
packs/packing.py: tests/training/test_packs.py -k lines_count
    |bounds = np.searchsorted(pack[order], packs)| -> |pass|
packs/packing.py: tests/training/test_packs.py -k same_columns
    |records["shared"][child] = np.minimum(records["shared"][child], agree)| -> |pass|
packs/verification.py: tests/training/test_packs_verify.py
    |wrong = np.where(token < n, spans, ends != token + 1)| -> |wrong = spans|
    |bad = agree < np.maximum(n_seen, self.position)| -> |bad = agree < n_seen|
    |if before not in self.trees:| -> |if before is None:|
    |own = pa.array(np.where(close, plain, weights))| -> |own = pa.array(plain)|
""")


def caught(copy: Path, tests: str) -> bool:
    """Whether the tests fail on the copy of the package."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    if find_spec("xdist"):
        command += ["-n", "0"]
    run = subprocess.run(
        [*command, *tests.split(" ", 2)],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "TRAJKIT_HYPOTHESIS": "quick"},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode not in (0, 1):
        sys.exit(
            f"pytest ended with {run.returncode}:\n{run.stdout[-2000:]}{run.stderr}"
        )
    return run.returncode == 1


def main(faults: list[tuple[str, str, str, str]]) -> int:
    """Plant each fault in a copy; 1 if more than one is left."""
    chosen = [
        fault
        for fault in faults
        if all(any(word in text for text in fault[:2]) for word in sys.argv[1:])
    ]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("trajkit", "tests", "pyproject.toml", "shim", "examples", "docs"):
            source = ROOT / name
            put = shutil.copytree if source.is_dir() else shutil.copy
            put(source, copy / name)
        for name, text, fault, tests in chosen:
            path = copy / "trajkit" / name
            before = path.read_text("utf-8")
            if before.count(text) != 1:
                sys.exit(f"{name} has {before.count(text)} times: {text}")
            path.write_text(before.replace(text, fault), "utf-8")
            if not caught(copy, tests):
                missed += 1
                sys.stdout.write(f"MISSED {name}: {text} -> {fault}\n")
                sys.stdout.flush()
            path.write_text(before, "utf-8")
    sys.stdout.write(f"{len(chosen) - missed} of {len(chosen)} faults are caught\n")
    return int(missed > 1)


if __name__ == "__main__":
    sys.exit(main(FAULTS))
