"""Attention within documents: no token sees one of another document of its window.

As an input, an end-of-text id begins the document that follows it, at position 0. The first token of a document is
predicted from it alone, as in a generation without a prompt. As a target, it ends the document before. So every target
of a window counts. What a window has before its first end-of-text is a document that begins with the window.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class Documents:
    """The documents of a micro batch. It is no tuple: hooks on modules would take it apart.

    Args:
        ids: (B, T).
        end_of_text: the id that begins a document.
    """

    def __init__(self, ids: Tensor, end_of_text: int) -> None:
        starts = ids == end_of_text
        starts[:, 0] = True
        places = torch.arange(ids.shape[1], device=ids.device)
        self.positions = places - torch.where(starts, places, 0).cummax(dim=1).values
        """Place of each token in its document, (B, T)."""
        firsts = starts.flatten().nonzero()[:, 0]  # a GPU's host waits for it, once per micro batch
        self._bounds = F.pad(firsts, (0, 1), value=ids.numel())
        self._lengths = None if ids.is_cuda else self._bounds.diff().tolist()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Causal attention within each document; (B, nh, T, hs) each.

        On a CPU document by document: as fast as whole windows if documents are as long, and 2.7 times as fast at a
        quarter of it. A mask over whole windows took 1.5 times as long as none. On a GPU PyTorch's kernel for sequences
        of different lengths, which takes bf16 and fp16 without dropout.
        """
        shape = q.transpose(1, 2).shape  # (B, T, nh, hs)
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))  # (B*T, nh, hs)
        if self._lengths is None:
            from torch.nn.attention import varlen  # noqa: PLC0415 - imports Dynamo, for about a second

            bounds = self._bounds.int()
            y = varlen.varlen_attn(q, k, v, bounds, bounds, shape[1], shape[1], window_size=(-1, 0))
            assert isinstance(y, Tensor)  # more only if it is asked for
        else:
            parts = zip(*(torch.split(part, self._lengths) for part in (q, k, v)), strict=True)
            y = torch.cat([_attend(q, k, v, dropout) for q, k, v in parts])
        return y.view(shape).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Causal attention in one document; (tokens, nh, hs) each."""
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))  # (1, nh, tokens, hs)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)[0].transpose(0, 1)
