"""Every causal architecture of transformers, tiny and random, on trees and on their rows.

``python -m tests.torch.sweep`` prints what became of each and writes the table of
docs/torch.md. An architecture is *equal* (logprobs and gradients in float64), *refused*
with the error's reason, or *not buildable* with the reason; anything else is a fault, and
the exit code is 1. ``python -m tests.torch.sweep NAME ...`` tries these alone and writes
nothing. It takes about half an hour of one core.
"""

import contextlib
import io
import logging
import multiprocessing
import queue
import re
import sys
import warnings
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.torch.cases import packs_of, rows_of
from tests.torch.test_equality import by_packs, by_rows
from tests.torch.tiny_models import (
    DELTA,
    EXPERTS,
    INDEXER,
    LATENT,
    MAMBA,
    MODELS,
    SIZES,
    TOKENS,
    float64_throughout,
    relative,
)
from trajkit.errors import UnsupportedModelError
from trajkit.torch.models import configs_of

PAGE = Path(__file__).parents[2] / "docs/torch.md"
BEGIN, END = "<!-- python -m tests.torch.sweep -->\n", "<!-- end of the table -->\n"
SECONDS = 120
LARGEST = 120_000_000

# Settings by the names that configurations give them; each takes those that it has.
SMALL = (
    SIZES
    | TOKENS
    | EXPERTS
    | MAMBA
    | DELTA
    | LATENT
    | INDEXER
    | dict.fromkeys(("d_model", "n_embd", "embedding_size", "word_embed_proj_dim"), 32)
    | dict.fromkeys(("lru_width", "attention_hidden_size"), 32)
    | dict.fromkeys(("ffn_dim", "decoder_ffn_dim", "n_inner", "ffn_hidden_size"), 48)
    | dict.fromkeys(("n_layer", "n_layers", "num_layers", "decoder_layers"), 2)
    | dict.fromkeys(("n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4)
    | dict.fromkeys(("mamba_num_heads", "time_step_rank", "rotary_dim"), 4)
    | dict.fromkeys(("num_key_value_heads", "linear_num_heads", "moe_num_experts"), 2)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 512)
    | dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), 7)
    | dict.fromkeys(("local_attention", "attention_window_size", "kv_channels"), 8)
    | dict.fromkeys(("head_dim", "global_head_dim", "mamba_head_dim", "d_kv"), 8)
    | dict.fromkeys(("linear_head_dim", "query_pre_attn_scalar", "laurel_rank"), 8)
    | dict.fromkeys(("state_size", "ssm_state_size", "expert_ffn_hidden_size"), 8)
    | dict.fromkeys(("initializer_range", "init_std"), 0.3)
    | dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_k", "moe_topk"), 1)
    | {
        "vocab_size_per_layer_input": SIZES["vocab_size"],
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "chunk_size": 8,
        "use_mamba_kernels": None,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "attn_layer_indices": [1],
        "is_decoder": True,
    }
)
# What a kind needs besides, or must not be given.
OWN = dict(MODELS.values()) | {
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Qwen2Config": {"use_sliding_window": True, "max_window_layers": 1},
}
KINDS = [
    ["linear_attention", "full_attention"],
    ["sliding_attention", "full_attention"],
    ["full_attention", "full_attention"],
    None,
]


def build(kind, layers):
    """A model of this configuration, with kinds of layers that it may know."""
    config = configured(getattr(transformers, kind), layers, OWN.get(kind, {}))
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    n = sum(p.numel() for p in empty.parameters())
    if n > LARGEST:
        raise ValueError(f"{n / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # norms, biases, sinks and gates that do something
            if parameter.ndim == 1:
                parameter.add_(torch.rand_like(parameter) * 0.3)
    with contextlib.suppress(Exception):
        model.set_experts_implementation("eager")
    return model.double().eval()


def configured(config_class, layers, own):
    """A small configuration: whatever it takes of the settings above."""
    names = {*config_class().to_dict(), *config_class.attribute_map}
    given = {k: v for k, v in SMALL.items() if k in names}
    if layers and "layer_types" in names:
        given["layer_types"] = layers
    else:
        given.pop("layer_types", None)
    if "num_key_value_heads" in names and {"kv_lora_rank", "multi_query"} & names:
        given["num_key_value_heads"] = 4
    for name, part in config_class.sub_configs.items():
        if name in names and hasattr(part, "attribute_map"):
            given[name] = configured(part, layers, {})
    given |= own
    config = config_class(**{k: v for k, v in given.items() if v is not None})
    for key, value in config.to_dict().items():
        if re.search("drop|jitter", key) and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def judge(kind):
    """(equal, refused, not buildable or wrong; why)."""
    rows, said = rows_of("tail_changed"), []
    for layers in KINDS:
        try:
            model = build(kind, layers)
            model.set_attn_implementation("eager")
            with float64_throughout():
                known, loss, grad = by_rows(model, rows, None)
            break
        except Exception as error:
            said.append(error)
    else:
        return "not buildable", words(said[-1])
    try:
        for config in configs_of(model):
            config._attn_implementation_internal = "trajkit"
        with float64_throughout():
            for kernel in ("masked", "trunk"):
                found, total, found_grad = by_packs(
                    model, packs_of(rows, align=8), kernel=kernel
                )
                worst = max(abs(float(found[key] - known[key])) for key in known)
                off = relative(found_grad, grad)
                if not (worst < 1e-10 and off < 1e-9):
                    return "wrong", f"{kernel}: off by {worst:.2g}, gradient {off:.2g}"
                assert abs(float(total - loss)) < 1e-10
    except UnsupportedModelError as error:
        return "refused", words(error)
    except Exception as error:
        return "wrong", words(error)
    return "equal", f"{worst:.0e}"


def words(error):
    text = " ".join(str(error).split()) or type(error).__name__
    return text.replace("|", "/")


def work(kind, answers):
    """In a process of its own, which may crash or hang."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    sys.stderr = io.StringIO()
    answers.put(judge(kind))


def verdict(kind):
    answers = CONTEXT.Queue()
    process = CONTEXT.Process(target=work, args=(kind, answers))
    process.start()
    try:
        return answers.get(timeout=SECONDS)
    except queue.Empty:
        return "not buildable", f"not done in {SECONDS} s"
    finally:
        process.terminate()
        process.join()


def architectures():
    """The configurations that `AutoModelForCausalLM` knows, by name."""
    names = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    kinds = {names[key] for key in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if key in names}
    return sorted(kinds)


def table(verdicts):
    """The table of docs/torch.md."""
    groups = {}
    for kind, (what, why) in verdicts.items():
        groups.setdefault(what, []).append((kind.removesuffix("Config"), why))
    equal = ", ".join(name for name, _ in groups.get("equal", []))
    lines = [
        f"transformers {transformers.__version__}: of {len(verdicts)} architectures "
        f"{len(groups.get('equal', []))} are equal, {len(groups.get('refused', []))} "
        f"refused, {len(groups.get('not buildable', []))} could not be built from a "
        "generic configuration or run in its own way.",
        "",
        f"**Equal**: {equal}.",
        "",
        "| | | why |",
        "| --- | --- | --- |",
    ]
    for what in ("refused", "not buildable", "wrong"):
        for name, why in groups.get(what, []):
            lines.append(f"| {name} | {what} | {shortened(why)} |")
    return "\n".join(lines) + "\n"


def shortened(why, limit=130):
    why = re.sub(r"-?\d+\.\d+(e-\d+)?", "...", why)
    return why if len(why) <= limit else why[:limit].rsplit(" ", 1)[0] + " ..."


def main():
    kinds = sys.argv[1:] or architectures()
    verdicts = {}
    for kind in kinds:
        verdicts[kind] = what, why = verdict(kind)
        print(f"{kind}: {what}: {why}", flush=True)
    counts = {what: 0 for what in ("equal", "refused", "not buildable", "wrong")}
    for what, _ in verdicts.values():
        counts[what] += 1
    print(counts)
    if not sys.argv[1:]:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        after = rest.split(END)[1]
        PAGE.write_text(
            before + BEGIN + table(verdicts) + END + after, encoding="utf-8"
        )
    return counts["wrong"] > 0


if __name__ == "__main__":
    # what is imported is shared with the processes
    CONTEXT = multiprocessing.get_context("fork")
    sys.exit(main())
