"""Faults that the tests of torch must catch: what is changed, and by which tests.

``python -m tests.torch.faults`` plants each in a copy of the package, runs its tests there,
and ends with 1 if more than one of them passes. Each changes a result without an error.
"""

import sys

from tests.faults_export import main

# file, text that occurs once in it, the fault in its place, the tests
FAULTS = [
    # masks and windows
    (
        "torch/masks.py",
        "return (kv <= q) & (q < end[kv])",
        "return (kv <= q) & (q <= end[kv])",
        "tests/torch/test_masks.py",
    ),
    (
        "torch/masks.py",
        "(depth_q[q] - depth_k[kv] < window)",
        "(depth_q[q] - depth_k[kv] <= window)",
        "tests/torch/test_masks.py",
    ),
    (
        "torch/masks.py",
        "seen(b, h, depth_q[q], depth_k[kv])",
        "seen(b, h, q, kv)",
        "tests/torch/test_checks.py -k chunks",
    ),
    (
        "torch/masks.py",
        "full &= far < window",
        "full &= far <= window",
        "tests/torch/test_masks.py -k windows_end",
    ),
    (
        "torch/masks.py",
        "visited &= near < window",
        "visited &= near < window - 1",
        "tests/torch/test_masks.py -k block",
    ),
    (
        "torch/masks.py",
        "full = (high <= first) & (last < _least(",
        "full = (high <= first) & (first < _least(",
        "tests/torch/test_masks.py -k block",
    ),
    (
        "torch/attention.py",
        "        return size\n",
        "        return None\n",
        "tests/torch/test_checks.py -k PhiMoE",
    ),
    (
        "torch/attention.py",
        "on_trunk = (enter <= leaf) & (leaf < end)",
        "on_trunk = enter <= leaf",
        "tests/torch/test_equality.py -k float64",
    ),
    (
        "torch/attention.py",
        "mask = attention_mask & chosen[:, None]",
        "mask = attention_mask",
        "tests/torch/test_states.py -k GLM",
    ),
    (
        "torch/attention.py",
        "return shares[..., : key.shape[2]] @ value",
        "return shares[..., : key.shape[2]].softmax(3) @ value",
        "tests/torch/test_checks.py -k gpt-oss",
    ),
    # carried keys and values
    (
        "torch/attention.py",
        "np.concatenate([prefix_end, tokens.end])",
        "np.concatenate([prefix_end + 1, tokens.end])",
        "tests/torch/test_carried.py -k llama",
    ),
    (
        "torch/states.py",
        "return grad.index_add(2, source, handed), None, None",
        "return grad, None, None",
        "tests/torch/test_carried.py -k llama",
    ),
    (
        "torch/models.py",
        "gradients = carried.prefix_gradients()",
        "gradients = {}",
        "tests/torch/test_carried.py -k llama",
    ),
    # states along trees
    (
        "torch/states.py",
        "source = parents[parent]",
        "source = parent",
        "tests/torch/test_states.py -k segments",
    ),
    (
        "torch/states.py",
        'self.after["conv", state_idx] = states[..., -n:]',
        'self.after["conv", state_idx] = states[..., :n]',
        "tests/torch/test_states.py -k LFM2",
    ),
    (
        "torch/states.py",
        'self.after["recurrent", state_idx] = states\n',
        'self.after["recurrent", state_idx] = states.detach()\n',
        "tests/torch/test_states.py -k Bamba",
    ),
    # chunks of logits, and losses
    (
        "torch/losses.py",
        "logits.to(_wide(logits.dtype)) / temperature",
        "logits.to(_wide(logits.dtype)) * temperature",
        "tests/torch/test_losses.py -k all_logits",
    ),
    (
        "torch/losses.py",
        "return torch.cat(parts)[inverse.to(place)]",
        "return torch.cat(parts)",
        "tests/torch/test_losses.py -k all_logits",
    ),
    (
        "torch/losses.py",
        "return (total / count)[code]",
        "return (total / len(row))[code]",
        "tests/torch/test_losses.py -k clipped",
    ),
    # the trial
    (
        "torch/checks.py",
        "window + min(window, 64)",
        "0",
        "tests/torch/test_checks.py -k longest_window",
    ),
    (
        "torch/checks.py",
        "passed.get(repr(options)) == kind:",
        "passed:",
        "tests/torch/test_checks.py -k changed_model",
    ),
    # chains and segments
    (
        "packs/segments.py",
        "open_segments[-1][0] <= start",
        "open_segments[-1][0] < start",
        "tests/torch/test_varlen.py",
    ),
    (
        "torch/datasets.py",
        "first = np.flatnonzero(~self._continues)",
        "first = np.arange(len(self._continues))",
        "tests/torch/test_carried.py -k llama",
    ),
]


if __name__ == "__main__":
    sys.exit(main(FAULTS))
