"""The language-modelling head and its loss in one operation that does not hold all logits of a large batch.

Logits and their gradients are the largest tensors of a GPT-2: with 50,257 ids, the logits of 1,024 tokens take 206 MB
in fp32. Here a chunk of tokens at a time goes through head, softmax and loss. Its gradients are computed at once, in
the memory of its logits, so that no logits are kept for the backward pass or computed again in it.

A process may have only a part of the head's rows (``VocabularyPart``): the vocabulary-parallel loss of Megatron-LM
(Shoeybi et al. 2019, section 3). For each token the parts exchange three fp32 numbers instead of logits.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


class VocabularyPart(NamedTuple):
    """What the loss needs where the rows of the head lie in several processes, each with consecutive ones."""

    first: int
    """The id of this process's first row."""
    most: int
    """The most rows that a process has. So the chunks of all processes have the same tokens."""
    share: Callable[[Tensor], Tensor]
    """Returns what it gets, the same on every process; its gradient is summed over them."""
    gather: Callable[[Tensor], Tensor]
    """Maps figures of this process, (3, N), to those of all, (parts, 3, N), without gradients. All but the first are
    finite if this process's logits are."""

    def own(self, vocab_size: int) -> int:
        """From how many of this process's rows on there is only padding; more than it has if none of them is."""
        return max(0, vocab_size - self.first)


def logits_of(x: Tensor, weight: Tensor, *, vocab_size: int, padded: bool) -> Tensor:
    """``x @ weight[:vocab_size].T``, (..., V); if ``padded``, a column of -inf for each further row of ``weight``.

    The products then have the sizes of the padded vocabulary, at which GPUs are fast. -inf has no probability, and its
    gradient is 0. So it is, too, where all rows are padding.
    """
    if not padded and vocab_size:
        return F.linear(x, weight[:vocab_size])
    logits = F.linear(x, weight)
    logits[..., vocab_size:] = -torch.inf
    return logits


def cross_entropy_of_part(logits: Tensor, targets: Tensor, *, reduction: str, vocabulary: VocabularyPart) -> Tensor:
    """``linear_cross_entropy`` of this part's logits, (N, V of the part)."""
    loss: Tensor = _LossOfPart.apply(logits, targets, reduction == "mean", vocabulary)  # type: ignore[no-untyped-call]
    return loss


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    reduction: str,
    padded: bool = False,
    vocabulary: VocabularyPart | None = None,
    whole: bool = False,
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
        vocabulary: which rows of the head ``weight`` has; None if all.
        whole: compute all logits at once, and the loss by PyTorch's own operation, as a pipeline does.

    Returns:
        Nats, 0-dim fp32; the same in every process that has a part.
    """
    if vocabulary is not None:
        x, vocab_size = vocabulary.share(x), vocabulary.own(vocab_size)
    if x.dtype == torch.float16 or x.dtype != weight.dtype or whole or not len(x):
        if vocabulary is not None:
            logits = logits_of(x, weight, vocab_size=vocab_size, padded=padded)
            return cross_entropy_of_part(logits, targets, reduction=reduction, vocabulary=vocabulary)
        return F.cross_entropy(  # no name keeps the logits in fp16 beside those in fp32
            logits_of(x, weight, vocab_size=vocab_size, padded=padded).float(), targets, reduction=reduction
        )
    differentiate = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]  # torch's has no types
        x, weight, targets, vocab_size, reduction == "mean", differentiate, padded, vocabulary
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
        vocabulary: VocabularyPart | None,
    ) -> Tensor:
        """The loss of all chunks, 0-dim; if asked, ``ctx`` keeps the gradients of ``x`` and ``weight``."""
        ids, share = _ids_and_shares(targets, mean=mean, dtype=x.dtype)
        exact = share.dtype
        columns = len(weight) if padded or not vocab_size else min(vocab_size, len(weight))
        head, loss = weight[:columns], torch.zeros((), dtype=exact, device=x.device)
        rows = max(1, CHUNKS[x.device.type] // (vocabulary.most if vocabulary else vocab_size))
        of_x = of_weight = x
        if differentiate:
            of_x, of_weight = torch.empty_like(x), torch.empty_like(weight, dtype=exact if rows < len(x) else x.dtype)
            of_weight[columns:] = 0
        for first in range(0, len(x), rows):
            part = slice(first, first + rows)
            logits = logits_of(x[part], weight, vocab_size=vocab_size, padded=padded)  # (n, columns)
            if vocabulary is None:
                loss += _softmax_loss(logits, ids[part], share[part], differentiate=differentiate)
            else:
                own_ids = ids[part] - vocabulary.first
                figures = _figures(logits, own_ids, vocabulary, dtype=exact)
                loss += _loss_of(figures, share[part])
                if differentiate:
                    _gradient_of_part(logits, own_ids, share[part], figures, out=logits)
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
        return of_x, of_weight.to(of_x.dtype), None, None, None, None, None, None


def _ids_and_shares(targets: Tensor, *, mean: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Ids, 0 where none counts, and the share of each in the loss, in the precision of softmax and sums; (N,) each."""
    counts = targets != _IGNORED
    share = counts.to(torch.promote_types(dtype, torch.float32))
    return torch.where(counts, targets, 0), share / share.sum() if mean else share


def _steps(logits: Tensor) -> Iterator[slice]:
    """The rows of ``logits``, (n, V), in steps of the softmax."""
    # A GPU takes the whole chunk in one step, and so does a compiler, which arranges the steps itself.
    whole = logits.device.type != "cpu" or torch.compiler.is_compiling()
    rows = max(1, len(logits) if whole else CACHED // logits.shape[1])
    return (slice(first, first + rows) for first in range(0, len(logits), rows))


def _softmax_loss(logits: Tensor, ids: Tensor, share: Tensor, *, differentiate: bool) -> Tensor:
    """The loss of a chunk; if asked, replaces its ``logits``, (n, V), by their gradients."""
    loss = torch.zeros((), dtype=share.dtype, device=logits.device)
    for part in _steps(logits):
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


# The same of a part of the vocabulary. Ids are counted from the part's first row; those of other parts lie outside.

Figures = tuple[Tensor, Tensor, Tensor]
"""Of all parts together, (n,) each: the largest logit, the sum of exp(logit - largest), and the target's - largest."""


class _LossOfPart(torch.autograd.Function):
    """Cross-entropy of a part's logits. It keeps them, in their precision, and no softmax for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, mean: bool, vocabulary: VocabularyPart) -> Tensor:
        """The loss, 0-dim."""
        ids, share = _ids_and_shares(targets, mean=mean, dtype=logits.dtype)
        ids = ids - vocabulary.first
        figures = _figures(logits, ids, vocabulary, dtype=share.dtype)
        ctx.save_for_backward(logits, ids, share, *figures)
        return _loss_of(figures, share)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the logits, multiplied by that of the loss before it is rounded."""
        logits, ids, share, *figures = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        _gradient_of_part(logits, ids, share * factor, (figures[0], figures[1], figures[2]), out=gradient)
        return gradient, None, None, None


def _place(ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the target of each token is in this part, and its column, else 0; (n, 1) each."""
    here = ((ids >= 0) & (ids < logits.shape[1]))[:, None]
    return here, torch.where(here, ids[:, None], 0)


def _figures(logits: Tensor, ids: Tensor, vocabulary: VocabularyPart, *, dtype: torch.dtype) -> Figures:
    own = torch.empty((3, len(logits)), dtype=dtype, device=logits.device)
    for part in _steps(logits):
        here, column = _place(ids[part], logits)
        # Of a part with nothing but padding -inf, from which -inf cannot be subtracted.
        top = logits[part].amax(1, keepdim=True).to(dtype).clamp(min=torch.finfo(dtype).min)  # (k, 1)
        own[0, part], own[1, part] = top[:, 0], (logits[part] - top).exp_().sum(1)
        own[2, part] = torch.where(here, logits[part].gather(1, column), 0)[:, 0]
    tops, sums, targets = vocabulary.gather(own).unbind(1)  # (parts, n) each
    top = tops.amax(0)
    return top, (sums * (tops - top).exp()).sum(0), targets.sum(0) - top


def _loss_of(figures: Figures, share: Tensor) -> Tensor:
    _, total, target = figures
    return ((total.log() - target) * share).sum()


def _gradient_of_part(logits: Tensor, ids: Tensor, share: Tensor, figures: Figures, *, out: Tensor) -> None:
    """Write the gradient of ``logits``, (n, V of the part), to ``out``, which may be ``logits``."""
    top, total, _ = figures
    for part in _steps(logits):
        here, column = _place(ids[part], logits)
        values = (logits[part] - top[part, None]).exp_()
        values.scatter_add_(1, column, torch.where(here, -total[part, None], 0))
        torch.mul(values, (share / total)[part, None], out=out[part])
