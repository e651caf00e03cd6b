"""What a cell of the parity suite computes, and how far it may differ from the reference.

How far a training may differ from the reference, as its arithmetic allows. On a CPU no bound is wider than about three
times what was measured there. In fp32 only the order of sums differs. In bf16 every product is rounded to 8 binary
digits, but the reference takes the same micro batches and rounds where the strategy does. So the first gradient and
the first update are equal in six digits. A training that sums in another precision, drops or doubles a micro batch,
decays a bias or has another epsilon is out of bounds. Later steps differ more under every strategy, because one weight
that is rounded in the other direction changes the products of the next step. After 20 steps loss and weights differ as
if every product had been rounded once more.

On a GPU nothing was measured yet. The bounds of 16-bit precisions there allow for a different rounding of every
product, in the first step too. A sum in another precision, or a bias that decays, is within them
(``parity_rank.Bug.visible_on``).

What a cell computes: optimizer, precision, and how the global batch is split and rounded. In fp32 the split changes
none of the first five digits. In bf16 every product is rounded to 8 binary digits, and differently for another split,
so only a reference with the same split can be compared closely.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from dsgpt.benchmarks.cells import ACCUMULATED, EVERY, STRATEGIES, Cell

PIPELINES = ("pipeline.json", "3d.json")
"""Recipes with a pipeline."""


@dataclass(frozen=True, kw_only=True, order=True)
class Split:
    """How one training splits the global batch; the reference does the same in one process."""

    data_ranks: int = 1
    """Each takes an equal, contiguous part of the global batch."""
    accumulation: int = 1
    """Micro batches, equal and contiguous parts of a data rank's share."""
    low: str = ""
    """Where gradients are rounded to the low precision between ranks: ``ACCUMULATED``, ``EVERY``, or empty for nowhere:
    gradients are fp32 from the end of a micro batch's backward pass on."""

    whole_logits: bool = False
    """Whether the loss is that of all logits of a micro batch at once, as in a pipeline, which rounds the scale of the
    loss with them; in fp32 the reference always computes it so."""

    def simplest(self) -> "Split":
        """The canonical form of this split: cells that compute the same have equal forms, and so share a reference.

        A single micro batch is itself the accumulated sum; one data rank's gradients are in the low precision already.
        """
        low = self.low
        if self.accumulation == 1 and low == EVERY:
            low = ACCUMULATED
        if self.data_ranks == 1 and (self.accumulation == 1 or low == EVERY):
            low = ""
        return replace(self, low=low)


class Work(NamedTuple):
    """What is computed; cells that agree in this have the same reference."""

    optimizer: str
    precision: str
    training: str
    """A key of ``TRAININGS``."""
    split: Split = Split()
    """In a low precision the cell's; in fp32 the whole global batch at once."""


def work_of(cell: Cell) -> Work:
    """What the cell must compute."""
    strategy = STRATEGIES[cell.strategy]
    split = Split()
    if cell.precision != "fp32":
        data_ranks = cell.ranks // strategy.model_ranks
        split = Split(
            data_ranks=data_ranks,
            accumulation=cell.accumulation,
            low=strategy.low if cell.ranks > 1 or strategy.low_alone else "",
            whole_logits=strategy.recipe in PIPELINES,
        ).simplest()
    return Work(cell.optimizer, cell.precision, strategy.training, split)


RATE = 1e-12
"""Bound on the learning rate, absolute: two formulas of one schedule differ in the last of 16 digits."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """A bound for every fact of a training; relative distances are of 2-norms."""

    loss: float
    """Nats per token, at every step."""
    validation: float
    """Nats per token, at every validation."""
    norm: float
    """Of the gradient's norm, relative, at every step."""
    gradient: float
    """Of the first step's gradient: relative distance, for every parameter."""
    layer_norm_gradient: float | None = None
    """The same for weights and biases of LayerNorms; None if ``gradient`` applies to them."""
    update: float
    """Of the weights after the first step that changes them: relative distance, for every parameter."""
    weights: float
    """Of the weights after the last step: relative distance, for every parameter."""
    tied_gradient: float | None = None
    """Of the first step's gradient of the tied embedding; None if ``gradient`` applies to it."""
    tied_update: float | None = None
    """Of the tied embedding after the first step that changes it; None if ``update`` applies to it."""

    def for_gradient(self, name: str) -> float:
        """The bound of one parameter's first gradient, by its canonical name."""
        special = {"wte.weight": self.tied_gradient}.get(name, self.layer_norm_gradient if "ln_" in name else None)
        return self.gradient if special is None else special

    def for_update(self, name: str) -> float:
        """The bound of one parameter after its first change, by its canonical name."""
        return self.tied_update if name == "wte.weight" and self.tied_update is not None else self.update


FP32, BF16, FP16 = "fp32", "bf16", "fp16"
CONSTANT_RATE = "constant rate"
"""The training without a schedule, as ``dsgpt.benchmarks.cells`` names it."""
FP32_CONSTANT_RATE = f"fp32, {CONSTANT_RATE}"
BF16_MANY, BF16_PIPELINE, BF16_SPLIT = "bf16, 4 data ranks", "bf16, pipeline", "bf16, tensor or sequence"
_AFTER_20_STEPS = {"loss": 2.4e-3, "validation": 1.8e-3, "norm": 1.7e-2, "weights": 3.3e-2}

CPU = {
    # Only the order of sums over micro batches or ranks differs.
    FP32: Bounds(loss=5e-6, validation=2e-6, norm=2e-6, gradient=2e-6, update=2e-6, weights=2e-6),
    # The rate is whole from the first step on, so the "first" update is that of three steps, in which Adam enlarges the
    # differences of the smallest gradients. Plain PyTorch with three micro batches instead of one differs by 4.3e-5 in
    # the update and by 2.7e-5 in the last weights, all of it in one element of a matrix of 1,156.
    FP32_CONSTANT_RATE: Bounds(loss=5e-6, validation=2e-6, norm=2e-6, gradient=2e-6, update=1.3e-4, weights=8e-5),
    # The same roundings in the same places. Only the order of fp32 sums differs, and a product of DeepSpeed's CPU Adam.
    BF16: Bounds(gradient=1e-6, update=1e-6, **_AFTER_20_STEPS),
    # Gradients of more than two ranks are added up in bf16, in no defined order.
    BF16_MANY: Bounds(gradient=1.6e-2, update=1.3e-2, **_AFTER_20_STEPS),
    # The tied embedding's two gradients are summed in fp32 over stages, where the reference's backward pass adds them
    # in bf16; clipping by the norm carries the difference to all others.
    BF16_PIPELINE: Bounds(gradient=1e-6, tied_gradient=9e-3, update=3.6e-5, tied_update=4.8e-4, **_AFTER_20_STEPS),
    # Activations are summed in parts, or gradients over half of the positions, so every product is rounded differently.
    # The gradients of LayerNorms are sums over all positions that almost cancel, and differ most.
    BF16_SPLIT: Bounds(gradient=1.5e-2, layer_norm_gradient=6e-2, update=4e-2, **_AFTER_20_STEPS),
}
"""fp16 is refused on a CPU."""
_WIDE = {"loss": 3e-3, "validation": 3e-3, "norm": 2e-2, "gradient": 1.5e-2, "layer_norm_gradient": 1.5e-1}
_LOW_ON_GPU = Bounds(**_WIDE, update=4e-2, weights=5e-2)
CUDA = {
    FP32: Bounds(loss=2e-4, validation=2e-4, norm=1e-4, gradient=1e-5, update=1e-4, weights=1e-3),
    FP32_CONSTANT_RATE: Bounds(loss=2e-4, validation=2e-4, norm=1e-4, gradient=1e-5, update=1e-3, weights=1e-3),
    **dict.fromkeys((BF16, BF16_MANY, BF16_PIPELINE, BF16_SPLIT, FP16), _LOW_ON_GPU),
}
"""Wider, because not measured yet: kernels of GPUs add up in an order that changes from call to call."""
BOUNDS = {"cpu": CPU, "cuda": CUDA}


def bounds_class(precision: str, split: Split, *, training: str, model_ranks: int, pipeline: bool) -> str:
    """Which of a device's bounds fit a training.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``.
        split: of the global batch.
        training: a key of ``TRAININGS``.
        model_ranks: ranks that share a micro batch.
        pipeline: whether they are the stages of a pipeline, and nothing else.
    """
    if precision == FP32 and training == CONSTANT_RATE:
        return FP32_CONSTANT_RATE
    if precision != BF16:
        return precision
    if model_ranks > 1 and not pipeline:
        return BF16_SPLIT
    if split.data_ranks > 2 and split.low:
        return BF16_MANY
    return BF16_PIPELINE if pipeline else BF16
