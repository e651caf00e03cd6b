"""The language-modelling head and its loss in one operation that does not hold all logits of a large batch.

Logits and their gradients are the largest tensors of a GPT-2: with 50,257 ids, the logits of 1,024 tokens take 206 MB
in fp32. Here a chunk of tokens at a time goes through head, softmax and loss. Its gradients are computed at once, in
the memory of its logits, so that no logits are kept for the backward pass or computed again in it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_IGNORED = -100
"""A target that does not count: ``cross_entropy``'s ``ignore_index``."""
CHUNKS = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Most logits that exist at a time, by device. Every chunk reads and writes the gradient of the whole head, which costs
less of a chunk's time if the chunk is larger; on GPUs the number is an estimate."""
CACHED = 256 << 10
"""Most logits in a step of the softmax on a CPU: what fits into its caches."""


def logits_of(x: Tensor, weight: Tensor, *, vocab_size: int, padded: bool) -> Tensor:
    """``x @ weight[:vocab_size].T``, (..., V); if ``padded``, a column of -inf for each further row of ``weight``.

    The products then have the sizes of the padded vocabulary, at which GPUs are fast. -inf has no probability, and its
    gradient is 0.
    """
    if not padded:
        return F.linear(x, weight[:vocab_size])
    logits = F.linear(x, weight)
    logits[..., vocab_size:] = -torch.inf
    return logits


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int, reduction: str, padded: bool = False
) -> Tensor:
    """The cross-entropy of ``targets`` under the softmax of ``x @ weight[:vocab_size].T``, computed in fp32.

    In fp16 there are no chunks: gradients of logits need the loss scale, which only the backward pass knows. In bf16 a
    loss that is multiplied by anything but a power of two, such as 1/3 for three micro batches, rounds gradients once
    more than cross_entropy does.

    Args:
        x: hidden states, (N, C).
        weight: of the head, (at least V, C); rows from ``vocab_size`` on are padding, and never predicted.
        targets: ids, (N,); those equal to -100 do not count.
        vocab_size: V.
        reduction: ``"mean"`` over the targets that count, or ``"sum"``.
        padded: multiply by the padding as well (``logits_of``).

    Returns:
        Nats, 0-dim fp32.
    """
    if x.dtype == torch.float16 or x.dtype != weight.dtype or not len(x):
        return F.cross_entropy(  # no name keeps the logits in fp16 beside those in fp32
            logits_of(x, weight, vocab_size=vocab_size, padded=padded).float(), targets, reduction=reduction
        )
    differentiate = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]  # torch's has no types
        x, weight, targets, vocab_size, reduction == "mean", differentiate, padded
    )
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients in the forward pass; the backward pass multiplies them by the one of the loss."""

    @staticmethod
    def forward(  # noqa: PLR0917 - ``apply`` takes no keywords
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        mean: bool,
        differentiate: bool,
        padded: bool,
    ) -> Tensor:
        """The loss of all chunks, 0-dim; if asked, ``ctx`` keeps the gradients of ``x`` and ``weight``."""
        exact = torch.promote_types(x.dtype, torch.float32)  # the precision of softmax and sums
        counts = targets != _IGNORED
        share = counts.to(exact)  # of each target in the loss
        if mean:
            share = share / share.sum()
        ids = torch.where(counts, targets, 0)
        columns = len(weight) if padded else vocab_size
        head, loss = weight[:columns], torch.zeros((), dtype=share.dtype, device=x.device)
        rows = max(1, CHUNKS[x.device.type] // vocab_size)
        of_x = of_weight = x
        if differentiate:
            of_x, of_weight = torch.empty_like(x), torch.empty_like(weight, dtype=exact if rows < len(x) else x.dtype)
            of_weight[columns:] = 0
        for first in range(0, len(x), rows):
            part = slice(first, first + rows)
            logits = logits_of(x[part], weight, vocab_size=vocab_size, padded=padded)  # (n, columns)
            loss += _softmax_loss(logits, ids[part], share[part], differentiate=differentiate)
            if differentiate:
                torch.mm(logits, head, out=of_x[part])
                _add_product(of_weight[:columns], logits.T, x[part], first=first == 0)
            del logits  # before the next chunk takes as much
        if differentiate:
            ctx.gradients = of_x, of_weight
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        """The kept gradients, times the gradient of the loss; once."""
        if ctx.gradients is None:
            raise RuntimeError("the gradients of the loss were used by an earlier backward pass")
        of_x, of_weight = ctx.gradients
        ctx.gradients = None  # frees each of them as soon as autograd has used it
        # On a GPU nobody asks whether the factor is 1: the answer would be waited for.
        readable = factor.device.type == "cpu" and not torch.compiler.is_compiling()
        if not (readable and factor.item() == 1):
            of_x, of_weight = of_x.mul_(factor), of_weight.mul_(factor)
        return of_x, of_weight.to(of_x.dtype), None, None, None, None, None


def _softmax_loss(logits: Tensor, ids: Tensor, share: Tensor, *, differentiate: bool) -> Tensor:
    """The loss of a chunk; if asked, replaces its ``logits``, (n, V), by their gradients."""
    loss = torch.zeros((), dtype=share.dtype, device=logits.device)
    # A GPU takes the whole chunk in one step, and so does a compiler, which arranges the steps itself.
    whole = logits.device.type != "cpu" or torch.compiler.is_compiling()
    rows = len(logits) if whole else max(1, CACHED // logits.shape[1])
    for first in range(0, len(logits), rows):
        part = slice(first, first + rows)
        values = F.log_softmax(logits[part], dim=-1, dtype=share.dtype)  # (k, V)
        target, weights = ids[part, None], share[part, None]  # (k, 1) each
        loss -= (values.gather(1, target) * weights).sum()
        if differentiate:
            values.exp_().scatter_add_(1, target, torch.full_like(weights, -1))
            torch.mul(values, weights, out=logits[part])
    return loss


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """Set ``total`` to ``left @ right`` the first time, and add it later."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=0 if first else 1, out=total)
    elif first:
        total.copy_(left @ right)
    else:
        total += left @ right
