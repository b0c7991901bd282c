"""SGLang's kernel package for a CPU, in plain torch: what a small dense model needs.

Any other kernel can be imported, and says its name when it is called.
"""

import torch
from stand_in import stand_in

__version__ = "0.4.10"


def rmsnorm(x, weight, eps=1e-6, out=None, enable_pdl=None):
    """Root-mean-square norm over the last axis, computed in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    result = (wide * scale).to(x.dtype) * weight
    return result if out is None else out.copy_(result)


def fused_add_rmsnorm(x, residual, weight, eps=1e-6, enable_pdl=None):
    """Add ``x`` to ``residual`` in place, and put the norm of the sum into ``x``."""
    residual += x
    rmsnorm(residual, weight, eps, out=x)


def silu_and_mul(x, out=None):
    """The gated half of a feed-forward layer: silu(first half) * second half."""
    gate, up = x.chunk(2, dim=-1)
    result = torch.nn.functional.silu(gate) * up
    return result if out is None else out.copy_(result)


def assign_req_to_token_pool_cpu(pool_rows, table, starts, stops, locations, width):
    """Write each request's new cache locations, end to end, into its row of a table."""
    taken = 0
    places = zip(pool_rows.tolist(), starts.tolist(), stops.tolist(), strict=True)
    for row, start, stop in places:
        new = locations[taken : taken + stop - start]
        table[row, start:stop] = new.to(table.dtype)
        taken += stop - start


# The module of Qwen's image processors imports models that look these up. None is called.
_operators = torch.library.Library(__name__, "FRAGMENT")
for _name in (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
):
    _operators.define(f"{_name}(Tensor x) -> Tensor")

stand_in(__name__, may_be_called=False)
