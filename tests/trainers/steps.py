"""Rows of rollouts that differ in their number of rows, and a tiny model to train on them.

The loss of a trainer's step and its gradient are compared with `reference_loss` of the rows
on the same model.
"""

import numpy as np
import pyarrow as pa
import pytest

import trajkit as tk

VOCABULARY = 64
REWARDS = {"a": 1.0, "b": 0.0, "c": 0.5, "d": -1.0}
GROUPS = {"a": "g", "b": "g", "c": "h", "d": "h"}
FORKED = {"a": 11, "b": 1, "c": 9, "d": 1}
"""22 rows, which make 1, 2 or 11 micro-batches of as many rows."""


def missing(*names):
    """Skip the test unless the modules can be imported."""
    for name in names:
        pytest.importorskip(name, exc_type=ImportError)


def calls(session, n_rows):
    """A session whose replies come back changed, so that each call opens a row."""
    draw = np.random.default_rng(ord(session))
    prompt = [1, 2, ord(GROUPS[session]) - 90]
    for _ in range(n_rows):
        output = draw.integers(20, VOCABULARY, draw.integers(2, 6)).tolist()
        yield {
            "session_id": session,
            "prompt_ids": prompt[:40],
            "output_ids": output,
            "output_logprobs": (-3.5 - draw.exponential(0.5, len(output))).tolist(),
        }
        prompt = [*prompt, output[0] - 10, *output[1:], 3]


def rows_of(n_rows):
    """The rows, each with the advantage of its rollout over the mean of its group."""
    sessions = pa.table(
        {
            "session_id": list(REWARDS),
            "reward": list(REWARDS.values()),
            "group_id": list(GROUPS.values()),
        }
    )
    turns = [call for name, n in n_rows.items() for call in calls(name, n)]
    rows = tk.linearize(tk.from_records(turns), sessions=sessions)
    assert len(rows) == sum(n_rows.values())
    return tk.add_advantages(rows, tk.learn.advantages(sessions))


def tiny_model(folder=None, dtype="float32"):
    """A random Qwen2 of two layers; saved to the folder with its tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=3,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    if folder is not None:
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return model


def tokenizer():
    """Ids as words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        WordLevel({f"t{k}": k for k in range(VOCABULARY)}, unk_token="t1")
    )
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", eos_token="t3", unk_token="t1"
    )


def row_logprobs(model, ids):
    """The logprob of each token of a row; 0 for the first."""
    import torch

    tokens = torch.tensor([ids])
    logits = model(input_ids=tokens).logits[0, :-1]
    own = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0]
    return torch.cat([own.new_zeros(1), own])


def reference(model, rows, **options):
    """`reference_loss` of the rows on the model."""
    import torch

    each = [row_logprobs(model, ids) for ids in rows["input_ids"].to_pylist()]
    return tk.learn.reference_loss(rows, torch.cat(each), **options)


def token_mean(rows):
    """Rows weighed so that their reference loss counts each trained token the same."""
    counts = tk.export.step_counts(rows)
    return tk.add_weights(rows, "constant", constant=counts.tokens / counts.rollouts)


def gradient(model, loss):
    """The gradient of the loss by all parameters, as one vector."""
    import torch

    model.zero_grad()
    loss.backward()
    parts = [parameter.grad.flatten() for parameter in model.parameters()]
    found = torch.cat(parts).detach().clone()
    model.zero_grad()
    return found


def parameters(model):
    import torch

    return torch.cat([each.detach().flatten().clone() for each in model.parameters()])


def assert_close(found, due, bound=2e-4):
    """Vectors or numbers, by the largest difference over the largest value."""
    import torch

    found, due = (torch.as_tensor(each, dtype=torch.float64) for each in (found, due))
    error = (found - due).abs().max() / due.abs().max()
    assert error < bound, f"relative error {float(error):.2g}"
