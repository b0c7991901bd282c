"""The faults of exporters, weights, losses, packs, and what trains on them."""

TRAINING = r"""
trajkit/export/_rows.py: export trainers/test_recorded
    |setdefault((alone, uid), | -> |setdefault(alone, |
    |f"session {own['session_id']}"| -> |own["session_id"]|
    |members[group] += int(edges[line])| -> |members[group] += 1|
    |repetition=members[group] - 1| -> |repetition=0|
    |np.flatnonzero(np.diff(session) < 0)| -> |()|
    |np.flatnonzero(np.diff(numbers) < 0)| -> |()|
    |if sizes[row.group] != expected:| -> |if sizes[row.group] > expected:|
    |(target.single or target.runs) and| -> |target.runs and|
    |if 0 == first < n:| -> |if first < 0:|
    |not 0 < row.prompt_length <= first| -> |not 0 < row.prompt_length|
    |if ids and row.input_ids[k] not in ids:| -> |if False:|
    |is not None and n > cut:| -> |is not None and n > cut + 1:|
    |*= weighted.tokens / weighted.rollouts| -> |*= weighted.tokens|
    |weight is None or not 0 <= weight| -> |not 0 <= (weight or 0)|
    |np.where(row.loss_mask, gains, 0.0)| -> |np.broadcast_to(gains, row.loss_mask.shape)|
trajkit/export/slime.py: export trainers/test_recorded
    |key=lambda row: row.group| -> |key=lambda row: 0|
    |rollouts.setdefault(row.rollout, | -> |rollouts.setdefault(row.place, |
    |[0, *accumulate(map(len, ids))]| -> |[*accumulate(map(len, ids))]|
    |return found[row.prompt_length :]| -> |return found[: len(found) - row.prompt_length]|
    |fill_null(0.0)| -> |fill_null(1.0)|
trajkit/export/areal.py: export trainers/test_recorded
    |groupby(checked, attrgetter("group"))| -> |groupby(checked, attrgetter("place"))|
    |trained[-1] + 1]| -> |trained[-1] + 2]|
    |number, CONTEXT)| -> |0, CONTEXT)|
    |if name is not None or version is None:| -> |if name is not None:|
trajkit/export/trl.py: export trainers/test_recorded
    |first_group_id + row.group| -> |first_group_id|
trajkit/export/skyrl.py: export trainers/test_recorded
    |{row.uid}_{row.repetition}| -> |{row.uid}_{row.row_index}|
    |[own, *(k for k in ids if k != own)]| -> |ids|
trajkit/export/nemo_rl.py: export trainers/test_recorded
    |"tool" if start else "user"| -> |"assistant"|
trajkit/export/openrlhf.py: export trainers/test_recorded
    |prepend=False, append=False| -> |prepend=True, append=False|
trajkit/export/tinker.py: export trainers/test_recorded
    |gains[1:]| -> |gains[:-1]|
    |row.loss_mask[1:]| -> |row.loss_mask[:-1]|
trajkit/export/sft.py: export trainers/test_recorded
    |np.where(row.loss_mask, row.input_ids, IGNORED)| -> |row.input_ids|
trajkit/export/verl.py: export trainers/test_recorded
    |scores[line, stop - 1] = row.reward| -> |scores[line, -1] = row.reward|
trajkit/export/prime_rl.py: export trainers/test_recorded
    |bounds = [*sizes[:-1], sum(sizes[-1:]) + n_padding]| -> |bounds = [*sizes, n_padding]|
    |np.concatenate([experts, experts[-1:]])| -> |np.concatenate([experts, experts[:1]])|
    |"<u2" if experts.max() > 255| -> |"<u2" if experts.max() > 2**16|
trajkit/learn/baselines.py: learn
    |top - bottom <= (1e-5 if single else 1e-9) * size| -> |top == bottom|
    |if not len(gain) or gain.any():| -> |if True:|
    |(n - 1, 1)\n        base, valid| -> |(n, 1)\n        base, valid|
trajkit/learn/loss.py: learn
    |fill_null(np.nan).to_numpy()| -> |fill_null(0.0).to_numpy()|
    |~np.isfinite(values))[:1]| -> |~np.isfinite(values))[:0]|
trajkit/learn/rewards.py: learn
    |np.maximum(n_trained[line], 1)| -> |1|
trajkit/learn/weights.py: learn
    |mask=mask_sum == 0| -> |mask=None|
trajkit/learn/observations.py: learn
    |np.where(complete, everything, np.maximum(covered, seen))| -> |seen|
trajkit/packs/balancing.py: training/test_packs_balance
    |if equal_counts and all(len(chain) == 1 for _, chain in items):| -> |if False:|
    |if equal_counts and all(len(chain) == 1 for _, chain in items):|
        -> |if equal_counts:|
trajkit/packs/packing.py: training/test_packs:group_of_a_stream
    |if n_tokens >= _PACKS_AT_A_TIME * max_tokens and not goes_on:|
        -> |if n_tokens >= _PACKS_AT_A_TIME * max_tokens:|
trajkit/packs/packing.py: training/test_packs:lines_count
    |bounds = np.searchsorted(pack[order], packs)| -> |pass|
trajkit/packs/packing.py: training/test_packs:same_columns
    |records["shared"][child] = np.minimum(records["shared"][child], agree)| -> |pass|
trajkit/packs/verification.py: training/test_packs_verify
    |wrong = np.where(token < n, spans, ends != token + 1)| -> |wrong = spans|
    |bad = agree < np.maximum(n_seen, self.position)| -> |bad = agree < n_seen|
    |if before not in self.trees:| -> |if before is None:|
    |own = pa.array(np.where(close, plain, weights))| -> |own = pa.array(plain)|
trajkit/torch/attention.py: torch/test_masks
    |(of <= at) & (at < end[kv])| -> |(of <= at) & (at <= end[kv])|
    |(depth_q[q] - depth_k[kv] < window)| -> |(depth_q[q] - depth_k[kv] <= window)|
trajkit/torch/attention.py: torch/test_equality:chunks
    |window(b, h, depth_q[q], depth_k[kv])| -> |window(b, h, q, kv)|
trajkit/torch/attention.py: torch/test_masks:block
    |full &= high[2] - key_low[2] < window| -> |full &= high[2] - key_low[2] <= window|
trajkit/torch/attention.py: torch/test_masks:block
    |visited &= low[2] - key_high[2] < window|
        -> |visited &= low[2] - key_high[2] < window - 1|
    |full = (key_high[0] <= low[0]) & (high[0] < key_low[1])|
        -> |full = (key_high[0] <= low[0]) & (low[0] < key_low[1])|
trajkit/torch/attention.py: torch/test_equality:PhiMoE
    |window = size if slides| -> |window = None if slides|
trajkit/torch/attention.py: torch/test_equality:llama
    |(enter <= leaf[number]) & (leaf[number] < end)| -> |enter <= leaf[number]|
trajkit/torch/attention.py: torch/test_equality:GLM
    |attention_mask & chosen[:, None]| -> |attention_mask|
trajkit/torch/attention.py: torch/test_equality:gpt-oss
    |found = shares[..., : key.shape[2]] @ value|
        -> |found = shares[..., : key.shape[2]].softmax(3) @ value|
trajkit/torch/attention.py: torch/test_equality:llama
    |pack.prefix_end.cpu().numpy()| -> |pack.prefix_end.cpu().numpy() + 1|
    |return grad.index_add(2, source, handed)| -> |return grad|
trajkit/torch/models.py: torch/test_equality:llama
    |gradients = carried.prefix_gradients()| -> |gradients = {}|
trajkit/torch/attention.py: torch/test_states:segments
    |run, source = np.append(before, run), above[source]| -> |run = np.append(before, run)|
trajkit/torch/attention.py: torch/test_equality:LFM2
    |self.after["conv", state_idx] = states[..., -n:]|
        -> |self.after["conv", state_idx] = states[..., :n]|
trajkit/torch/attention.py: torch/test_equality:Bamba
    |self.after["recurrent", state_idx] = states\n|
        -> |self.after["recurrent", state_idx] = states.detach()\n|
trajkit/torch/packs.py: torch/test_losses:all_logits
    |logits.to(wide) / temperature| -> |logits.to(wide) * temperature|
    |return torch.cat(parts)[places]| -> |return torch.cat(parts)|
trajkit/torch/packs.py: torch/test_losses:clipped
    |total / count.clamp(min=1)| -> |total / len(row)|
trajkit/torch/models.py: torch/test_checks:longest_window
    |window + min(window, 64)| -> |0|
trajkit/torch/models.py: torch/test_checks:changed_model
    |passed.get(options) == kind:| -> |passed:|
trajkit/torch/models.py: torch/test_checks:wrong_model
    |min(bound, 4 * values[0] + bound / 10)| -> |bound|
trajkit/torch/attention.py: torch/test_states:refused_by_name
    |if tree is None and _RUNNING.get() is not None:| -> |if False:|
    |[:, 0].isfinite().all():| -> |[:, 0].isnan().all():|
trajkit/packs/segments.py: torch/test_varlen
    |end[start[open_runs[-1]]] <= first| -> |end[start[open_runs[-1]]] < first|
trajkit/torch/packs.py: torch/test_equality:llama
    |first = np.flatnonzero(~self._continues)| -> |first = np.arange(len(self._continues))|
"""
