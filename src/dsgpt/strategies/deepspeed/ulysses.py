"""Attention over positions that lie on several ranks (Jacobs et al. 2023, "DeepSpeed Ulysses", section 3).

Before attention, an all-to-all turns "some positions, all heads" into "all positions, some heads"; after it, another
one turns the result back.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from dsgpt.model.gpt2 import Attend, dense_attention


def ulysses_attention(group: dist.ProcessGroup) -> Attend:
    """Attention of the ranks in ``group``, each of which brings its slice of the positions, in the order of the ranks.

    Queries, keys and values come as (B, nh, T of this rank, hs); the group's size must divide nh.
    """
    from deepspeed.sequence.layer import DistributedAttention  # noqa: PLC0415

    exchange = DistributedAttention(_attend_by_position, group, scatter_idx=2, gather_idx=1)

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, T of this rank, nh, hs)
        return exchange(q, k, v, 0, None, dropout, causal).transpose(1, 2)

    return attend


def _attend_by_position(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
    """All positions of this rank's heads: (B, T, nh of this rank, hs) each."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return dense_attention(q, k, v, *how).transpose(1, 2)
