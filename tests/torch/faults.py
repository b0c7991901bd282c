"""Faults that the tests of torch must catch: what is changed, and by which tests.

``python -m tests.torch.faults`` plants each in a copy of the package, runs its tests there,
and ends with 1 if more than one of them passes. Each changes a result without an error.
"""

import sys

from tests.faults_export import main, parsed

FAULTS = parsed(r"""
torch/attention.py: tests/torch/test_masks.py
    |(of <= at) & (at < end[kv])| -> |(of <= at) & (at <= end[kv])|
    |(depth_q[q] - depth_k[kv] < window)| -> |(depth_q[q] - depth_k[kv] <= window)|
torch/attention.py: tests/torch/test_checks.py -k chunks
    |window(b, h, depth_q[q], depth_k[kv])| -> |window(b, h, q, kv)|
torch/attention.py: tests/torch/test_masks.py -k windows_end
    |full &= high[2] - key_low[2] < window| -> |full &= high[2] - key_low[2] <= window|
torch/attention.py: tests/torch/test_masks.py -k block
    |visited &= low[2] - key_high[2] < window|
        -> |visited &= low[2] - key_high[2] < window - 1|
    |full = (key_high[0] <= low[0]) & (high[0] < key_low[1])|
        -> |full = (key_high[0] <= low[0]) & (low[0] < key_low[1])|
torch/attention.py: tests/torch/test_checks.py -k PhiMoE
    |window = size if slides| -> |window = None if slides|
torch/attention.py: tests/torch/test_equality.py -k float64
    |(enter <= leaf[number]) & (leaf[number] < end)| -> |enter <= leaf[number]|
torch/attention.py: tests/torch/test_states.py -k GLM
    |attention_mask & chosen[:, None]| -> |attention_mask|
torch/attention.py: tests/torch/test_checks.py -k gpt-oss
    |found = shares[..., : key.shape[2]] @ value|
        -> |found = shares[..., : key.shape[2]].softmax(3) @ value|
torch/attention.py: tests/torch/test_carried.py -k llama
    |pack.prefix_end.cpu().numpy()| -> |pack.prefix_end.cpu().numpy() + 1|
torch/attention.py: tests/torch/test_carried.py -k llama
    |return grad.index_add(2, source, handed)| -> |return grad|
torch/models.py: tests/torch/test_carried.py -k llama
    |gradients = carried.prefix_gradients()| -> |gradients = {}|
torch/attention.py: tests/torch/test_states.py -k segments
    |run, source = np.append(before, run), above[source]| -> |run = np.append(before, run)|
torch/attention.py: tests/torch/test_states.py -k LFM2
    |self.after["conv", state_idx] = states[..., -n:]|
        -> |self.after["conv", state_idx] = states[..., :n]|
torch/attention.py: tests/torch/test_states.py -k Bamba
    |self.after["recurrent", state_idx] = states\n|
        -> |self.after["recurrent", state_idx] = states.detach()\n|
torch/packs.py: tests/torch/test_losses.py -k all_logits
    |logits.to(wide) / temperature| -> |logits.to(wide) * temperature|
    |return torch.cat(parts)[places]| -> |return torch.cat(parts)|
torch/packs.py: tests/torch/test_losses.py -k clipped
    |total / count.clamp(min=1)| -> |total / len(row)|
torch/models.py: tests/torch/test_checks.py -k longest_window
    |window + min(window, 64)| -> |0|
torch/models.py: tests/torch/test_checks.py -k changed_model
    |passed.get(options) == kind:| -> |passed:|
packs/segments.py: tests/torch/test_varlen.py
    |end[start[open_runs[-1]]] <= first| -> |end[start[open_runs[-1]]] < first|
torch/packs.py: tests/torch/test_carried.py -k llama
    |first = np.flatnonzero(~self._continues)| -> |first = np.arange(len(self._continues))|
""")

if __name__ == "__main__":
    sys.exit(main(FAULTS))
