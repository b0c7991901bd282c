"""Faults that the tests of torch must catch: what is changed, and by which tests.

``python -m tests.torch.faults`` plants each in a copy of the package, runs its tests there,
and ends with 1 if one of them passes. Each changes a result without an error.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

# file, text that occurs once in it, the fault in its place, the tests
FAULTS = [
    # masks and windows
    (
        "torch/masks.py",
        "return (kv <= q) & (q < end[kv])",
        "return (kv <= q) & (q <= end[kv])",
        "test_masks.py",
    ),
    (
        "torch/masks.py",
        "(depth_q[q] - depth_k[kv] < window)",
        "(depth_q[q] - depth_k[kv] <= window)",
        "test_masks.py",
    ),
    (
        "torch/masks.py",
        "seen(b, h, depth_q[q], depth_k[kv])",
        "seen(b, h, q, kv)",
        "test_checks.py -k chunks",
    ),
    (
        "torch/masks.py",
        "full &= far < window",
        "full &= far <= window",
        "test_masks.py -k windows_end",
    ),
    (
        "torch/masks.py",
        "visited &= near < window",
        "visited &= near < window - 1",
        "test_masks.py -k block",
    ),
    (
        "torch/masks.py",
        "full = (high <= first) & (last < _least(",
        "full = (high <= first) & (first < _least(",
        "test_masks.py -k block",
    ),
    (
        "torch/attention.py",
        "        return size\n",
        "        return None\n",
        "test_checks.py -k PhiMoE",
    ),
    (
        "torch/attention.py",
        "on_trunk = (enter <= leaf) & (leaf < end)",
        "on_trunk = enter <= leaf",
        "test_equality.py -k float64",
    ),
    (
        "torch/attention.py",
        "mask = attention_mask & chosen[:, None]",
        "mask = attention_mask",
        "test_states.py -k GLM",
    ),
    (
        "torch/attention.py",
        "return shares[..., : key.shape[2]] @ value",
        "return shares[..., : key.shape[2]].softmax(3) @ value",
        "test_checks.py -k gpt-oss",
    ),
    # carried keys and values
    (
        "torch/attention.py",
        "np.concatenate([prefix_end, tokens.end])",
        "np.concatenate([prefix_end + 1, tokens.end])",
        "test_carried.py -k llama",
    ),
    (
        "torch/states.py",
        "return grad.index_add(2, source, handed), None, None",
        "return grad, None, None",
        "test_carried.py -k llama",
    ),
    (
        "torch/models.py",
        "gradients = carried.prefix_gradients()",
        "gradients = {}",
        "test_carried.py -k llama",
    ),
    # states along trees
    (
        "torch/states.py",
        "source = parents[parent]",
        "source = parent",
        "test_states.py -k segments",
    ),
    (
        "torch/states.py",
        'self.after["conv", state_idx] = states[..., -n:]',
        'self.after["conv", state_idx] = states[..., :n]',
        "test_states.py -k LFM2",
    ),
    (
        "torch/states.py",
        'self.after["recurrent", state_idx] = states\n',
        'self.after["recurrent", state_idx] = states.detach()\n',
        "test_states.py -k Bamba",
    ),
    # chunks of logits, and losses
    (
        "torch/losses.py",
        "logits.to(_wide(logits.dtype)) / temperature",
        "logits.to(_wide(logits.dtype)) * temperature",
        "test_losses.py -k all_logits",
    ),
    (
        "torch/losses.py",
        "return torch.cat(parts)[inverse.to(place)]",
        "return torch.cat(parts)",
        "test_losses.py -k all_logits",
    ),
    (
        "torch/losses.py",
        "return (total / count)[code]",
        "return (total / len(row))[code]",
        "test_losses.py -k clipped",
    ),
    # the trial
    (
        "torch/checks.py",
        "window + min(window, 64)",
        "0",
        "test_checks.py -k longest_window",
    ),
    (
        "torch/checks.py",
        "passed.get(repr(options)) == kind:",
        "passed:",
        "test_checks.py -k changed_model",
    ),
    # chains and segments
    (
        "packs/segments.py",
        "open_segments[-1][0] <= start",
        "open_segments[-1][0] < start",
        "test_varlen.py",
    ),
    (
        "torch/datasets.py",
        "first = np.flatnonzero(~self._continues)",
        "first = np.arange(len(self._continues))",
        "test_carried.py -k llama",
    ),
]


def caught(fault, folder):
    """Whether the tests of a fault fail with it."""
    path, right, wrong, tests = fault
    shutil.rmtree(folder / "trajkit", ignore_errors=True)
    shutil.copytree(ROOT / "trajkit", folder / "trajkit")
    file = folder / "trajkit" / path
    text = file.read_text(encoding="utf-8")
    assert text.count(right) == 1, (path, right)
    file.write_text(text.replace(right, wrong), encoding="utf-8")
    name, *options = tests.split(" ", 2)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"tests/torch/{name}", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT / 'shim'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    # 1: tests failed; anything else is no catch
    return done.returncode == 1, done.stdout.strip().splitlines()[-1:]


def main():
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "tests", folder / "tests")
        for entry in ("pyproject.toml", "docs"):
            source = ROOT / entry
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / entry)
        for fault in FAULTS:
            found, last = caught(fault, folder)
            missed += not found
            print("caught" if found else "MISSED", fault[0], fault[2].strip(), *last)
            sys.stdout.flush()
    print(f"{len(FAULTS) - missed} of {len(FAULTS)} caught")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
