"""Forward and backward of tree packs against the rows that they hold.

    python -m benchmarks.train                     on a GPU the full cases, else small ones
    python -m benchmarks.train --save FILE         write the packs of the cases and stop
    python -m benchmarks.train --packs FILE        take them from there (needs no core)

Each case is checked first: the logprobs of the tree are those of its rows. Then the
same loss is trained

rows       row by row, causal attention by `scaled_dot_product_attention`
varlen     rows packed end to end, attention by cu_seqlens (CUDA)
tree       the tree pack, attention under one mask (FlexAttention on CUDA)
trunk      the tree pack, deepest paths apart
carried    the tree in four packs or more, keys and values carried (needs the core)
line       one causal row of as many tokens as the tree, in the kernel of ``tree``
flash      one causal row of as many tokens as the tree, in the kernel of ``rows``

The model is a transformers Qwen3 with random weights: 8 layers of width 1,024 with 16
heads of 128 and 8 for keys and values, in bfloat16.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from trajkit.torch.attention import TreeAttention, flex_block_mask
from trajkit.torch.models import carry_backward, edge_logprobs
from trajkit.torch.packs import Pack, gather_logprobs, policy_loss

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# shape, turns, context: as `benchmarks.data.quoted` has them
FULL = [
    ("head_dropped", 8, 4_096),
    ("tail_changed", 32, 16_384),
    ("tail_changed", 32, 33_000),
    ("head_dropped", 32, 33_000),
    ("siblings", 4, 16_384),
    ("tail_changed", 128, 67_000),
    ("head_dropped", 128, 50_000),
    ("tail_changed", 128, 131_072),
]
SMALL = [
    ("tail_changed", 16, 4_096),
    ("head_dropped", 16, 3_072),
    ("siblings", 4, 1_024),
]
VOCABULARY = 151_936 if CUDA else 512
TENSORS = [name for name in Pack.__slots__ if name not in ("columns", "mm_items")]
RECOMPUTE_FROM = 80_000
"""Tokens from which activations of layers are computed again in the backward pass."""
VARLEN_TOKENS = 65_536
"""Most tokens in a pack of rows for ``varlen``."""
BARS = {("tail_changed", 32, 33_000): 8.0, ("tail_changed", 128, 67_000): 27.0}
"""Least speed of the tree over rows one by one."""


@dataclass(frozen=True)
class Row:
    """One row of a pack: its ids, and the edges whose targets it holds."""

    input_ids: torch.Tensor
    position: torch.Tensor
    edges: torch.Tensor


def rows_of(pack: Pack) -> list[Row]:
    """The rows of a pack, each up to its last trained token."""
    ids, end = pack.input_ids.numpy(), pack.subtree_end.numpy()
    index = np.arange(len(ids))
    rows = []
    for number in np.unique(pack.edge_row.numpy()):
        edges = np.flatnonzero(pack.edge_row.numpy() == number)
        last = edges[pack.edge_position.numpy()[edges].argmax()]
        source = int(pack.edge_source[last])
        path = np.flatnonzero((index <= source) & (source < end))
        full = np.append(ids[path], int(pack.edge_target[last]))
        position = pack.edge_position[torch.from_numpy(edges)]
        rows.append(Row(torch.from_numpy(full), position, torch.from_numpy(edges)))
    return rows


def line_of(pack: Pack, n: int) -> Pack:
    """The pack with one causal row of its tokens in place of its tree."""
    return replace(
        pack,
        position_ids=torch.arange(n, dtype=torch.int32),
        subtree_end=torch.full((n,), n, dtype=torch.int32),
    )


def build(
    shape: str, n_turns: int, context: int, max_tokens: int = 10**9
) -> list[Pack]:
    """The tree of one rollout under the policy faithful, in packs of a size."""
    import trajkit as tk
    from benchmarks.data import quoted, rollout
    from trajkit.torch.packs import PackDataset

    if shape == "siblings":
        records: Any = siblings(n_turns, context)
    else:
        reply = min(300, context // (2 * n_turns))
        size = quoted(shape, n_turns, context, reply)
        records = rollout("r", size, shape, spoken=False)
    rows = tk.linearize(tk.from_records(records), "faithful", reward=1.0)
    rows = rows.append_column("advantage", rows.column("reward"))
    packs = tk.pack(rows, max_tokens, oversize="carry", columns=["advantage"])
    return [*PackDataset(packs)]


def siblings(n: int, context: int) -> Iterator[dict[str, Any]]:
    """Samples of one prompt, half of the context each."""
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, 1000, context // 2)
    for _ in range(n):
        output = draw.integers(0, 1000, context // 2)
        yield {
            "session_id": "r",
            "prompt_ids": prompt,
            "output_ids": output,
            "output_logprobs": -draw.exponential(0.4, len(output)),
        }


def save(path: str, packs: dict[str, Pack]) -> None:
    arrays = {}
    for name, pack in packs.items():
        for column in TENSORS:
            arrays[f"{name}/{column}"] = getattr(pack, column).numpy()
        arrays[f"{name}/advantage"] = pack.column("advantage").numpy()
    np.savez_compressed(path, **arrays)


def load(path: str) -> dict[str, Pack]:
    arrays: dict[str, dict[str, Any]] = {}
    with np.load(path) as file:
        for key in file.files:
            name, column = key.split("/")
            arrays.setdefault(name, {})[column] = torch.from_numpy(file[key])
    return {
        name: Pack(columns={"advantage": a.pop("advantage")}, **a)
        for name, a in arrays.items()
    }


def few_ids(pack: Pack) -> Pack:
    """The pack with a small vocabulary, whose logits a CPU computes in time."""
    return replace(
        pack,
        input_ids=pack.input_ids % VOCABULARY,
        edge_target=pack.edge_target % VOCABULARY,
    )


def make_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    if CUDA:
        sizes = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
        heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        num_hidden_layers=8 if CUDA else 2,
        max_position_embeddings=262_144,
        tie_word_embeddings=True,
        **sizes,
        **heads,
    )
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="trajkit")
    model = model.to(DEVICE, torch.bfloat16 if CUDA else torch.float32)
    model.train()
    return model


# --- ways to train -----------------------------------------------------------------


def train_tree(model: Any, pack: Pack, kernel: str, options: Any = None) -> Any:
    model.set_attn_implementation("trajkit")
    logprobs = edge_logprobs(
        model, pack, kernel=kernel, kernel_options=options, check="never"
    )
    policy_loss(logprobs, pack).backward()
    return logprobs.detach()


def one_row(model: Any, pack: Pack, row: Row) -> Any:
    hidden = model.base_model(
        input_ids=row.input_ids[None, :-1].to(DEVICE), use_cache=False
    ).last_hidden_state
    part = row_pack(pack, row)
    logprobs = gather_logprobs(hidden, model.lm_head, part)
    policy_loss(logprobs, part).backward()
    return logprobs.detach()


def row_pack(pack: Pack, row: Row, offset: int = 0) -> Pack:
    """The edges of a row, by its positions."""
    n = len(row.input_ids) - 1
    ids = row.input_ids[:-1]
    return replace(
        pack,
        input_ids=ids,
        position_ids=torch.arange(n, dtype=torch.int32),
        subtree_end=torch.full((n,), n, dtype=torch.int32),
        edge_source=row.position - 1 + offset,
        edge_target=pack.edge_target[row.edges],
        edge_row=pack.edge_row[row.edges],
        edge_position=row.position,
        edge_weight=pack.edge_weight[row.edges],
        edge_logprob=pack.edge_logprob[row.edges],
        columns={k: v[row.edges] for k, v in pack.columns.items()},
    )


def train_rows(model: Any, pack: Pack, rows: list[Row]) -> Any:
    model.set_attn_implementation("sdpa")
    result = torch.zeros(len(pack.edge_source), dtype=torch.float64, device=DEVICE)
    for row in rows:
        result[row.edges.to(DEVICE)] = one_row(model, pack, row).double()
    return result


def train_flash(model: Any, pack: Pack) -> Any:
    """One causal row of the pack's tokens, with the pack's loss."""
    model.set_attn_implementation("sdpa")
    hidden = model.base_model(
        input_ids=pack.input_ids[None].to(DEVICE), use_cache=False
    ).last_hidden_state
    logprobs = gather_logprobs(hidden, model.lm_head, pack)
    policy_loss(logprobs, pack).backward()


def varlen_attention(
    module: Any, q: Any, k: Any, v: Any, mask: Any, bounds: Any = None, **kwargs: Any
) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    most = int(bounds.diff().max())
    repeat = q.shape[1] // k.shape[1]
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    # the oldest varlen_attn has no option for shared key heads
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    causal = varlen_options()
    return varlen_attn(q, k, v, bounds, bounds, most, most, **causal)[None], None


def varlen_options() -> dict[str, Any]:
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    return {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}


AttentionInterface.register("varlen", varlen_attention)


def train_varlen(model: Any, pack: Pack, rows: list[Row]) -> None:
    model.set_attn_implementation("varlen")
    group: list[Row] = []
    size = 0
    for row in [*rows, None]:
        if row is None or size + len(row.input_ids) - 1 > VARLEN_TOKENS:
            if group:
                train_group(model, pack, group)
            group, size = [], 0
        if row is not None:
            group.append(row)
            size += len(row.input_ids) - 1


def train_group(model: Any, pack: Pack, group: list[Row]) -> None:
    lengths = [len(row.input_ids) - 1 for row in group]
    bounds = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    parts = [row_pack(pack, row, a) for row, a in zip(group, bounds, strict=False)]
    joined: dict[str, Any] = {
        name: torch.cat([getattr(p, name) for p in parts]) for name in TENSORS
    }
    advantage = torch.cat([p.column("advantage") for p in parts])
    one = Pack(**joined, columns={"advantage": advantage})
    hidden = model.base_model(
        input_ids=one.input_ids[None].to(DEVICE),
        position_ids=one.position_ids[None].to(DEVICE),
        bounds=torch.tensor(bounds, dtype=torch.int32, device=DEVICE),
        use_cache=False,
    ).last_hidden_state
    logprobs = gather_logprobs(hidden, model.lm_head, one)
    policy_loss(logprobs, one).backward()


# --- measuring ---------------------------------------------------------------------


def seconds(
    function: Callable[[], object], repeat: int = 3, warm: bool = True
) -> float:
    """The median time of a call with all its work on the device.

    On the CPU it is processor time of one thread, which other programs disturb less.
    """
    clock = time.perf_counter if CUDA else time.process_time
    times = []
    for k in range(repeat + warm):
        synchronize()
        start = clock()
        function()
        synchronize()
        if k >= warm:
            times.append(clock() - start)
    return statistics.median(times)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def peak() -> str:
    """The most memory since the last call."""
    if not CUDA:
        return ""
    gib = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return f"   peak {gib:5.1f} GiB"


def gradient(model: Any) -> torch.Tensor:
    """All gradients end to end, which are then cleared."""
    parts = [p.grad.flatten().float().cpu() for p in model.parameters()]
    model.zero_grad()
    return torch.cat(parts)


def check(model: Any, pack: Pack, rows: list[Row], reference: torch.dtype) -> None:
    """Rows and tree against rows in a wider dtype: logprobs and gradients."""
    dtype = next(model.parameters()).dtype
    model.to(reference)
    expected = train_rows(model, pack, rows)
    exact = gradient(model)
    model.to(dtype)
    largest = exact.abs().max()
    ways: dict[str, Callable[[], Any]] = {
        "rows": lambda: train_rows(model, pack, rows),
        "tree": lambda: train_tree(model, pack, "masked"),
        "trunk": lambda: train_tree(model, pack, "trunk"),
    }
    for name, way in ways.items():
        logprobs = way().double()
        off = (logprobs - expected).abs()
        grad = (gradient(model) - exact).abs().max() / largest
        print(
            f"    {name:6} against rows in {str(reference)[6:]}: logprobs "
            f"{off.max():.1e} (mean {off.mean():.1e}), gradients {grad:.1e} of the largest"
        )


def attention_inputs(n: int, config: Qwen3Config) -> list[torch.Tensor]:
    dtype = torch.bfloat16 if CUDA else torch.float32
    heads = (config.num_attention_heads,) + (config.num_key_value_heads,) * 2
    return [
        torch.randn(
            1, h, n, config.head_dim, device=DEVICE, dtype=dtype, requires_grad=True
        )
        for h in heads
    ]


def attention_seconds(pack: Pack, config: Qwen3Config, kernel: Any) -> float:
    """Forward and backward of one layer's attention over a pack."""
    from trajkit.torch.attention import tree_attention

    n = len(pack.input_ids)
    q, k, v = attention_inputs(n, config)
    module = torch.nn.Identity()
    if kernel == "flash":

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ).transpose(1, 2)

    else:
        tree = TreeAttention(pack, DEVICE, kernel)

        def forward() -> torch.Tensor:
            return tree_attention(module, q, k, v, None, tree=tree)[0]

    weight = torch.randn_like(forward())
    return seconds(lambda: forward().backward(weight), 5)


def head_seconds(model: Any, pack: Pack) -> float:
    """Forward and backward of the logprobs, from given hidden states."""
    hidden = torch.randn(
        len(pack.input_ids),
        model.config.hidden_size,
        device=DEVICE,
        dtype=next(model.parameters()).dtype,
        requires_grad=True,
    )
    return seconds(
        lambda: policy_loss(
            gather_logprobs(hidden, model.lm_head, pack), pack
        ).backward()
    )


def measure(name: str, model: Any, pack: Pack, ways: set[str]) -> None:
    """Prints one case."""
    rows = rows_of(pack)
    n = len(pack.input_ids)
    n_rows = sum(len(row.input_ids) - 1 for row in rows)
    print(f"{name}: {len(rows)} rows of {n_rows:,} tokens, tree of {n:,}", flush=True)
    line = line_of(pack, n)
    if n > RECOMPUTE_FROM:
        model.gradient_checkpointing_enable()
        print("    activations of layers are computed again in the backward pass")
    all_ways: dict[str, Callable[[], object]] = {
        "rows": lambda: train_rows(model, pack, rows),
        "varlen": lambda: train_varlen(model, pack, rows),
        "tree": lambda: train_tree(model, pack, "masked"),
        "trunk": lambda: train_tree(model, pack, "trunk"),
        "carried": lambda: carry_backward(model, cut, policy_loss, check="never"),
        "line": lambda: train_tree(model, line, "masked"),
        "flash": lambda: train_flash(model, line),
    }
    cut = []
    if "carried" in ways:
        shape, turns, context = name.split("-")
        cut = build(shape, int(turns), int(context), -(-n // 4))
        cut = cut if CUDA else [few_ids(part) for part in cut]
    took: dict[str, float] = {}
    for way, function in all_ways.items():
        if way not in ways or (way == "varlen" and not CUDA):
            continue
        model.zero_grad()
        peak()
        long = way in ("rows", "varlen") and n_rows > 500_000
        try:
            took[way] = seconds(function, 1 if long else 3, warm=not long)
        except torch.OutOfMemoryError:
            print(f"    {way:6} out of memory")
            continue
        print(f"    {way:6} {took[way]:8.3f} s{peak()}", flush=True)
    verdicts(name, took)
    parts(model, pack, line, took)


def verdicts(name: str, took: dict[str, float]) -> None:
    def ratio(a: str, b: str, bar: str = "") -> None:
        if a in took and b in took:
            print(f"    {a} / {b}: {took[a] / took[b]:.2f}{bar}")

    shape, turns, context = name.split("-")
    least = BARS.get((shape, int(turns), int(context)))
    bar = f" (bar: at least {least:g})" if CUDA and least else ""
    ratio("rows", "trunk", bar)
    ratio("rows", "tree", bar)
    ratio("varlen", "trunk")
    ratio("carried", "tree")
    ratio("tree", "line", " (bar: at most 1.05)" if CUDA else "")
    ratio("trunk", "flash")
    ratio("tree", "flash")


def parts(model: Any, pack: Pack, line: Pack, took: dict[str, float]) -> None:
    """The share of mask, attention and head."""
    config = model.config
    mask = seconds(lambda: flex_block_mask(pack.subtree_end.to(DEVICE)), 5)
    layers = config.num_hidden_layers
    each = {
        "tree": attention_seconds(pack, config, "masked"),
        "trunk": attention_seconds(pack, config, "trunk"),
        "line": attention_seconds(line, config, "masked"),
        "flash": attention_seconds(line, config, "flash"),
    }
    head = head_seconds(model, pack)
    print(
        f"    mask {1e3 * mask:.2f} ms, head {1e3 * head:.1f} ms; attention of a layer:"
    )
    for way, s in each.items():
        share = f", {layers * s / took[way]:.0%} of the step" if way in took else ""
        print(f"      {way:6} {1e3 * s:8.2f} ms{share}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packs", metavar="FILE", help="packs written by --save")
    parser.add_argument("--save", metavar="FILE", help="write the packs and stop")
    parser.add_argument("--cases", help="names, such as tail_changed-32-33000")
    parser.add_argument(
        "--ways",
        default="rows,varlen,tree,trunk,line,flash",
        help="ways to train (all but carried)",
    )
    parser.add_argument("--small", action="store_true", help="the cases for a CPU")
    options = parser.parse_args()
    cases = FULL if (CUDA or options.save) and not options.small else SMALL
    if options.packs:
        packs = load(options.packs)
    else:
        packs = {f"{s}-{n}-{c}": build(s, n, c)[0] for s, n, c in cases}
    if options.save:
        save(options.save, packs)
        return
    if not CUDA:
        torch.set_num_threads(1)
        print("no GPU: small cases on the CPU, whose times say little about a GPU")
        packs = {name: few_ids(pack) for name, pack in packs.items()}
    wanted = options.cases.split(",") if options.cases else list(packs)
    model = make_model()
    least = min(packs.values(), key=lambda pack: len(pack.input_ids))
    print("check:")
    check(model, least, rows_of(least), torch.float32 if CUDA else torch.float64)
    for name in wanted:
        measure(name, model, packs[name], set(options.ways.split(",")))


if __name__ == "__main__":
    main()
