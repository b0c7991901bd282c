"""Tree packs in torch: packs, masks, attention for transformers, logprobs, losses.

Needs torch and transformers (``pip install trajkit[torch]``); nothing else of trajkit
imports them.
"""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit.torch.attention import TreeAttention as TreeAttention
    from trajkit.torch.attention import cu_seqlens as cu_seqlens
    from trajkit.torch.attention import dense_mask as dense_mask
    from trajkit.torch.attention import flex_block_mask as flex_block_mask
    from trajkit.torch.models import PackedModel as PackedModel
    from trajkit.torch.models import carry_backward as carry_backward
    from trajkit.torch.models import carry_logprobs as carry_logprobs
    from trajkit.torch.models import check_model as check_model
    from trajkit.torch.models import edge_logprobs as edge_logprobs
    from trajkit.torch.models import model_inputs as model_inputs
    from trajkit.torch.packs import Pack as Pack
    from trajkit.torch.packs import PackDataset as PackDataset
    from trajkit.torch.packs import gather_logprobs as gather_logprobs
    from trajkit.torch.packs import nll_loss as nll_loss
    from trajkit.torch.packs import observation_loss as observation_loss
    from trajkit.torch.packs import policy_loss as policy_loss
else:
    __getattr__, __dir__ = lazy_names(__name__)
