"""A tiny model to train on rows.

The loss of a trainer's step and its gradient are compared with `reference_loss` of the rows
on the same model.
"""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import trajkit as tk
from tests.torch.tiny_models import gradients, relative
from tests.trainers.steps import VOCABULARY


def tiny_model(folder=None):
    """A random Qwen2 of two layers; saved to the folder with its tokenizer."""
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
    model = Qwen2ForCausalLM(config).float()
    if folder is not None:
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return model


def tokenizer():
    """Ids as words."""
    names = {f"t{k}": k for k in range(VOCABULARY)}
    words = Tokenizer(WordLevel(names, unk_token="t1"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", eos_token="t3", unk_token="t1"
    )


def row_logprobs(model, ids):
    """The logprob of each token of a row; 0 for the first."""
    tokens = torch.tensor([ids])
    logits = model(input_ids=tokens).logits[0, :-1]
    own = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0]
    return torch.cat([own.new_zeros(1), own])


def reference(model, rows, **options):
    """`reference_loss` of the rows on the model."""
    each = [row_logprobs(model, ids) for ids in rows["input_ids"].to_pylist()]
    return tk.learn.reference_loss(rows, torch.cat(each), **options)


def gradient(model, loss):
    """The gradient of the loss by all parameters, as one vector."""
    model.zero_grad()
    loss.backward()
    return gradients(model)


def assert_close(found, due, bound=2e-4):
    """Vectors or numbers, by the largest difference over the largest value."""
    found, due = (torch.as_tensor(each, dtype=torch.float64) for each in (found, due))
    error = relative(found.detach(), due.detach())
    assert error < bound, f"relative error {error:.2g}"
