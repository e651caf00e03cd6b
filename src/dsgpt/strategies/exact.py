"""Sums that do not depend on the number of ranks: with ``--exact`` every strategy ends with the same bits.

Floating-point addition is not associative, so gradients, norm and loss depend on who adds up what. The way out is that
of reproducible sums (Demmel and Nguyen 2013, "Fast reproducible floating-point summation"). Every summand is rounded to
a grid that is fixed before the sum, and on which no partial sum is rounded again. The grid here is that of 64-bit
integers, whose addition is associative.

A rank computes one sequence at a time, so the shapes of all kernels are the same under every split. Each use of a
parameter reads an aligned copy of it, because matrix products may round by the alignment of their inputs. The gradient
of the use is turned into integers and added to those of the step's other sequences. After the last one, the data ranks
add up their integers, and the engine gets the mean over the global batch from the first of them, and zeros from the
others. Whatever DeepSpeed, DDP or FSDP then does adds zeros, and multiplies and divides by a power of two.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsgpt.config.run_config import RunConfig
from dsgpt.machine.device import sum_over_ranks
from dsgpt.model.gpt2 import Head

LARGEST = 2.0**10
"""The largest element of a sequence's gradient that has a place on the grid. A larger one makes the step's NaN, on all
ranks, and so ends the run."""


class ExactSums:
    """The sums of one rank.

    Args:
        config: the run, with one sequence per micro batch.
        rank: among the ranks that read different data and hold the same part of the model.
        group: these ranks; None if they are all ranks of the run.
    """

    def __init__(self, config: RunConfig, *, rank: int, group: dist.ProcessGroup | None = None) -> None:
        self._rank, self._group, self._ranks = rank, group, config.batch.data_parallel_size
        self._all_ranks, self._batch = config.topology.world_size, config.batch.global_batch_size
        self._uses_per_step = config.batch.gradient_accumulation_steps
        # All sequences at the largest gradient are below 2^62.
        self._per_unit = 2.0 ** (62 - self._batch.bit_length()) / LARGEST
        self._element_bits = config.model.padded_parameter_count().bit_length()
        self._losses = 0.0

    def watch(self, model: nn.Module) -> None:
        """Let every module of ``model`` read its parameters through ``use``, and every ``Head`` give its loss here.

        Call it after hooks are registered that gather parameters.
        """
        for module in model.modules():
            if names := [name for name, value in module._parameters.items() if value is not None]:
                module.register_forward_pre_hook(partial(self._take_copies, {name: _Sum() for name in names}))
                module.register_forward_hook(_drop_copies, always_call=True)
            if isinstance(module, Head):
                module.whole_logits = True  # as in a pipeline
                module.register_forward_hook(self._take_loss)

    def _take_copies(self, sums: "dict[str, _Sum]", module: nn.Module, _: Any) -> None:
        """Put copies where ``module`` finds them before its parameters."""
        module.__dict__.update({name: self.use(own, getattr(module, name)) for name, own in sums.items()})

    def _take_loss(self, module: nn.Module, _: Any, loss: Tensor) -> Tensor:
        return self.loss(loss) if module.training and loss.ndim == 0 else loss

    def use(self, own: "_Sum", parameter: Tensor) -> Tensor:
        """A copy of ``parameter`` for one use of it, whose gradients are summed exactly, in ``own``."""
        copy = parameter.clone(memory_format=torch.contiguous_format)
        if copy.requires_grad:
            copy.register_hook(partial(self.add, own=own))  # type: ignore[no-untyped-call]  # torch's has no types
        return copy

    def shared_use(self) -> Callable[[Tensor], Tensor]:
        """``use`` for a parameter that is used outside of its module."""
        return partial(self.use, _Sum())

    def loss(self, loss: Tensor) -> Tensor:
        """Note the ``loss`` of one sequence, 0-dim; its gradient will be 1, by whatever an engine scales it."""
        # fp64 has room for the digits of 2^29 fp32 losses of one size: the sum is exact.
        self._losses += float(loss.detach())
        loss.register_hook(torch.ones_like)  # type: ignore[no-untyped-call]
        return loss.clone()  # hooks of an engine on what it gets then come before

    def mean_loss(self, device: torch.device) -> Tensor:
        """The mean loss of the step over the global batch, 0-dim fp32; collective over all ranks."""
        total, self._losses = torch.tensor(self._losses, dtype=torch.float64, device=device), 0.0
        return ((sum_over_ranks(total) if self._all_ranks > 1 else total) / self._batch).float()

    @torch.no_grad()
    def add(self, gradient: Tensor, own: "_Sum") -> Tensor:
        """Add a sequence's ``gradient`` to ``own``; return what the engine gets in its place."""
        if own.units is None:  # the last counts what is not on the grid
            own.units = torch.zeros(gradient.numel() + 1, dtype=torch.int64, device=gradient.device)
        own.units[:-1] += (gradient * self._per_unit).to(torch.int64).flatten()
        own.units[-1] += ~(gradient.abs().amax() <= LARGEST)  # NaN, too
        own.count += 1
        passed = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
        if own.count == self._uses_per_step:
            if self._ranks > 1:
                dist.all_reduce(own.units, group=self._group)
            if self._rank == 0:
                mean = own.units[:-1].double() / (self._per_unit * self._batch)
                passed = torch.where(own.units[-1] == 0, mean.float() * self._ranks, torch.nan).view(gradient.shape)
            own.count, own.units = 0, own.units.zero_()
        return passed

    @torch.no_grad()
    def norm(self, gradients: Iterable[Tensor], *, group: dist.ProcessGroup | None, split: bool) -> Tensor:
        """The 2-norm of all elements of ``gradients``, 0-dim fp32; infinite if one of them is not finite.

        The grid of the squares follows from the largest of them, which all ranks find alike.

        Args:
            gradients: of this rank.
            group: the ranks that together have every element once; None for all ranks of the run.
            split: whether they do; otherwise each has all of them, and nothing is exchanged.
        """
        parts = [gradient.detach().flatten().float() for gradient in gradients]
        largest = torch.stack([part.abs().amax() for part in parts if part.numel()] or [torch.zeros(())]).amax()
        largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a maximum may lose NaN
        if split:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        if largest.isinf() or largest == 0:
            return largest
        exponent = int(torch.frexp(largest).exponent)
        per_unit = 2.0 ** (62 - self._element_bits - 2 * exponent)
        zero = torch.zeros((), dtype=torch.int64, device=largest.device)
        units = sum(((part.double().square_() * per_unit).to(torch.int64).sum() for part in parts), zero)
        if split:
            dist.all_reduce(units, group=group)
        return (units.double() / per_unit).sqrt().float()


class _Sum:
    """The gradients of one use of a parameter in a step, in units of the grid."""

    units: Tensor | None = None
    count: int = 0
    """Sequences so far."""


def _drop_copies(module: nn.Module, *_: Any) -> None:
    for name in module._parameters:
        module.__dict__.pop(name, None)


def take_exact_norms(optimizer: Any, sums: ExactSums, *, clipping: float) -> None:
    """Let ``optimizer``, DeepSpeed's of stage 1, 2 or 3, take its norm from ``sums``, and clip by it.

    DeepSpeed's own clipping must be off: it would multiply by another number than PyTorch's.
    """
    parts: list[Tensor] = []
    exact: list[Tensor] = []

    def collect(gradients: Iterable[Tensor], params: Iterable[Tensor]) -> Tensor:
        own = (part for part in gradients if not getattr(part, "_zero_padding", False))
        pairs = zip(own, params, strict=False)  # as DeepSpeed pairs them
        parts.extend(part for part, of in pairs if not getattr(of, "ds_pipe_replicated", False))
        return torch.zeros(())

    def norm(all_groups: Any, *, listed: bool) -> Any:
        all_groups()  # calls ``collect`` for each
        exact[:] = [sums.norm(parts, group=None, split=dist.get_world_size() > 1)]
        parts.clear()
        return exact if listed else exact[0]

    def clip(inner: torch.optim.Optimizer, *_: Any) -> None:
        own = [parameter for group in inner.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grads_with_norm_(own, clipping, exact[0])

    optimizer.get_grad_norm_direct = collect
    for name, listed in (("scaled_global_norm", False), ("_get_norm_groups", True)):  # stages 1 and 2, and 3
        if hasattr(optimizer, name):
            setattr(optimizer, name, partial(norm, getattr(optimizer, name), listed=listed))
    if clipping > 0:
        optimizer.optimizer.register_step_pre_hook(clip)


def exact_sums(config: RunConfig, *, group: dist.ProcessGroup | None = None) -> ExactSums | None:
    """The sums of a run with ``--exact``; None for others."""
    return ExactSums(config, rank=config.topology.data_rank, group=group) if config.options.exact else None
