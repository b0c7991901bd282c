"""Faults that the tests of torch must catch: what is changed, and by which tests.

``python -m tests.torch.faults`` plants each in a copy of the package, runs its tests there,
and ends with 1 if more than one of them passes. Each changes a result without an error.
"""

import sys

from tests.faults_export import main, parsed

FAULTS = parsed(r"""
torch/masks.py: tests/torch/test_masks.py
    |return (kv <= q) & (q < end[kv])| -> |return (kv <= q) & (q <= end[kv])|
    |(depth_q[q] - depth_k[kv] < window)| -> |(depth_q[q] - depth_k[kv] <= window)|
torch/masks.py: tests/torch/test_checks.py -k chunks
    |seen(b, h, depth_q[q], depth_k[kv])| -> |seen(b, h, q, kv)|
torch/masks.py: tests/torch/test_masks.py -k windows_end
    |full &= far < window| -> |full &= far <= window|
torch/masks.py: tests/torch/test_masks.py -k block
    |visited &= near < window| -> |visited &= near < window - 1|
    |full = (high <= first) & (last < _least(|
        -> |full = (high <= first) & (first < _least(|
torch/attention.py: tests/torch/test_checks.py -k PhiMoE
    |        return size\n| -> |        return None\n|
torch/attention.py: tests/torch/test_equality.py -k float64
    |on_trunk = (enter <= leaf) & (leaf < end)| -> |on_trunk = enter <= leaf|
torch/attention.py: tests/torch/test_states.py -k GLM
    |mask = attention_mask & chosen[:, None]| -> |mask = attention_mask|
torch/attention.py: tests/torch/test_checks.py -k gpt-oss
    |return shares[..., : key.shape[2]] @ value|
        -> |return shares[..., : key.shape[2]].softmax(3) @ value|
torch/attention.py: tests/torch/test_carried.py -k llama
    |np.concatenate([prefix_end, tokens.end])|
        -> |np.concatenate([prefix_end + 1, tokens.end])|
torch/states.py: tests/torch/test_carried.py -k llama
    |return grad.index_add(2, source, handed), None, None| -> |return grad, None, None|
torch/models.py: tests/torch/test_carried.py -k llama
    |gradients = carried.prefix_gradients()| -> |gradients = {}|
torch/states.py: tests/torch/test_states.py -k segments
    |source = parents[parent]| -> |source = parent|
torch/states.py: tests/torch/test_states.py -k LFM2
    |self.after["conv", state_idx] = states[..., -n:]|
        -> |self.after["conv", state_idx] = states[..., :n]|
torch/states.py: tests/torch/test_states.py -k Bamba
    |self.after["recurrent", state_idx] = states\n|
        -> |self.after["recurrent", state_idx] = states.detach()\n|
torch/losses.py: tests/torch/test_losses.py -k all_logits
    |logits.to(_wide(logits.dtype)) / temperature|
        -> |logits.to(_wide(logits.dtype)) * temperature|
    |return torch.cat(parts)[inverse.to(place)]| -> |return torch.cat(parts)|
torch/losses.py: tests/torch/test_losses.py -k clipped
    |return (total / count)[code]| -> |return (total / len(row))[code]|
torch/checks.py: tests/torch/test_checks.py -k longest_window
    |window + min(window, 64)| -> |0|
torch/checks.py: tests/torch/test_checks.py -k changed_model
    |passed.get(repr(options)) == kind:| -> |passed:|
packs/segments.py: tests/torch/test_varlen.py
    |end[start[open_runs[-1]]] <= first| -> |end[start[open_runs[-1]]] < first|
torch/datasets.py: tests/torch/test_carried.py -k llama
    |first = np.flatnonzero(~self._continues)| -> |first = np.arange(len(self._continues))|
""")

if __name__ == "__main__":
    sys.exit(main(FAULTS))
