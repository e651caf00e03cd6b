"""What must hold in every step of a run, checked without a reference run: ``--check_invariants``.

A rank compares what it sees alone. Its part of the state must change as the optimizer's formula says, its weights must
be their fp32 masters, rounded, and the state at the start must be that of its source. Then the ranks exchange small
facts, and each judges all of them in the same way. So all of them stop after the same step.

Everything between the backward pass and the optimizer is linear in the gradients: sums over micro batches, averages
over ranks, the loss scale, the factor of clipping. So the product with fixed random vectors compares what was computed
with what the optimizer used, and no rank needs a whole gradient (Johnson and Lindenstrauss 1984). Which gradient was
used, Adam's first moment before and after the step tells (Kingma and Ba 2015, algorithm 1).
"""

import contextlib
import functools
import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsgpt.checkpoints.pieces import Box
from dsgpt.checkpoints.store import folder_name
from dsgpt.checkpoints.training_state import KeptState, ParamState, StateReader
from dsgpt.common.errors import InvariantError
from dsgpt.config.run_config import RunConfig
from dsgpt.data.data_set import Windows
from dsgpt.data.loader import IGNORED_TARGET, Batch
from dsgpt.data.order import SampleOrder
from dsgpt.formats.tensor_files import DTYPES
from dsgpt.machine.device import HostGroup
from dsgpt.model.config import decays
from dsgpt.model.gpt2 import WEIGHT_STD, parameter_shapes
from dsgpt.strategies.base import Strategy, build_schedule, initial_values
from dsgpt.telemetry.meter import StepResult
from dsgpt.training.journal import Validation

ROUNDING = 2.0**-23
"""Largest relative error of two roundings to fp32."""
EXACT, LOW, QUANTIZED = 1e-4, 0.03, 0.3
"""Largest difference of two gradients, relative to their norm: where they differ in the order of fp32 sums; where micro
batches or ranks are summed in bf16 or fp16; where ranks exchange rounded integers."""


class Found(NamedTuple):
    """A violation."""

    rank: int | None
    """None where it is not known which rank is wrong."""
    parameter: str
    """Empty if it is not about one."""
    what: str


class Used(NamedTuple):
    """A rank's part of a gradient as the optimizer used it, clipped."""

    sketch: float
    squares: float
    noise: float
    """Square of the norm of its rounding errors."""


@dataclass(kw_only=True)
class Facts:
    """What the other ranks need to know of one; also the ``Watch`` that collects some of it."""

    shapes: Mapping[str, torch.Size]
    data_rank: int
    tensor_rank: int
    found: list[Found] = field(default_factory=list)
    """What the rank found by itself."""
    samples: list[str] = field(default_factory=list)
    """Hash of each window that it read."""
    losses: list[Tensor] = field(default_factory=list)
    """Sum over its targets of each loss."""
    weights: list[Tensor] = field(default_factory=list)
    """How each backward pass weighs the loss of one target."""
    modes: set[bool] = field(default_factory=set)
    """Whether the model was in training mode."""
    computed: dict[str, Tensor] = field(default_factory=dict)
    """Sketches of the gradients of all backward passes together, before any exchange."""
    used: dict[str, Used] = field(default_factory=dict)
    positions: list[float] = field(default_factory=list)
    """Square sum of the gradient of each position; of this rank's part."""
    replicas: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Checksums of weights that it holds whole."""
    reported: tuple[float, ...] = ()
    """Loss, norm, rate, and whether the step was skipped; of a validation, loss and targets."""

    @property
    def finite(self) -> bool:
        """Whether the step has a gradient, or fp16 skipped it; if it has not on any rank, the journal stops the run."""
        return bool(self.reported[-1]) or all(map(math.isfinite, self.reported))

    def loss(self, loss: Tensor, targets: Tensor, reduction: str, *, training: bool) -> None:
        """See ``Watch``."""
        count = (targets != IGNORED_TARGET).sum() if reduction == "mean" else 1
        self.losses.append(loss.detach() * count)
        self.modes.add(training)
        if loss.requires_grad:
            loss.register_hook(  # type: ignore[no-untyped-call]  # torch's has no types
                lambda gradient: self.weights.append(gradient.detach() / count)
            )

    def gradient(self, name: str, boxes: list[Box], gradient: Tensor) -> None:
        """See ``Watch``; what tensor ranks compute alike counts once."""
        shape = self.shapes[name]
        if self.tensor_rank == 0 or boxes != [Box.whole(shape)]:
            own = sketch(name, shape, boxes, gradient.detach())
            self.computed[name] = self.computed[name] + own if name in self.computed else own

    def read(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The ``batches``, noted."""
        for batch in batches:
            self.samples += map(_hash, batch.inputs.cpu().numpy(), batch.targets.cpu().numpy())
            yield batch


def _hash(inputs: "NDArray[np.integer]", targets: "NDArray[np.integer]") -> str:
    return hashlib.blake2b(np.concatenate([inputs, targets]).astype("<i8").tobytes(), digest_size=8).hexdigest()


@functools.lru_cache(maxsize=1024)
def _direction(name: str, axis: int, length: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {axis}".encode()))
    return torch.randn(length, generator=generator).to(device)


def sketch(name: str, shape: Sequence[int], boxes: Sequence[Box], values: Tensor) -> Tensor:
    """The product of a part of the tensor ``name`` with a random vector for each of its dimensions, 0-dim fp64.

    Products of parts add up to that of the whole. Over random vectors, its variance is the square of the norm.

    Args:
        name: chooses the vectors.
        shape: of the whole tensor.
        boxes: the part.
        values: its elements, end to end.
    """
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for box, part in zip(boxes, torch.split(values.reshape(-1).float(), [box.numel for box in boxes]), strict=True):
        product = part.view(box.shape)
        for axis in reversed(range(len(shape))):
            product = product @ _direction(name, axis, shape[axis], values.device)[box.start[axis] : box.stop[axis]]
        total += product.double()
    return total


def checksum(value: Tensor) -> tuple[int, ...]:
    """Sums of the bits of ``value``, which count each row and each column with another factor."""
    width = torch.int16 if value.element_size() == 2 else torch.int32
    bits = value.detach().contiguous().view(width).view(len(value), -1)
    sums = bits.sum(1, dtype=torch.int64), bits.sum(0, dtype=torch.int64)
    return tuple(int((own * torch.arange(1, len(own) + 1, device=own.device)).sum()) for own in sums)


class Step(NamedTuple):
    """One update of one parameter, recomputed from its state."""

    gradient: Tensor | None
    """The clipped gradient; None if the state does not tell it."""
    error: Tensor | None
    """The largest rounding error of each of its elements."""
    off: float
    """The largest difference from the optimizer's formula, as a multiple of the rounding; above 1 it is wrong."""


def recompute(name: str, before: ParamState, after: ParamState, *, config: RunConfig, lr: float, steps: int) -> Step:
    """The update from ``before`` to ``after``, the same elements of ``name``, by the formula of the recipe's optimizer.

    AdamW: Loshchilov and Hutter 2019, algorithm 2. SGD: ``torch.optim.SGD``, whose gradient has the decay in it.

    Args:
        name: of the parameter, which says whether it decays.
        before: its state.
        after: its state, on the same device.
        config: of the run.
        lr: the scheduled rate.
        steps: that changed the weights, with this one.
    """
    recipe, weight, changed = config.recipe.optimizer, before.weight, after.weight
    decay = recipe.weight_decay if decays(name) else 0.0
    size = torch.maximum(weight.abs(), changed.abs())
    if recipe.type == "SGD" and not recipe.momentum:
        if lr == 0:
            return Step(None, None, _off(changed, weight, ROUNDING * size))
        return Step((weight - changed) / lr - decay * weight, 2 * ROUNDING * size / lr, 0.0)
    key, beta = ("exp_avg", recipe.betas[0]) if recipe.type == "AdamW" else ("momentum_buffer", recipe.momentum)
    if key not in after.moments:  # the optimizer does not know the parameter
        return Step(None, None, math.inf)
    new, old = after.moments[key], before.moments.get(key)
    old = torch.zeros_like(new) if old is None else old
    change, error = new - beta * old, ROUNDING * (new.abs() + old.abs())
    if recipe.type == "SGD":
        gradient, error, off = change - decay * weight, error + ROUNDING * decay * size, 0.0
        update, expected = lr * (change + beta * new if recipe.nesterov else new), weight
    else:
        beta2, squares = recipe.betas[1], after.moments["exp_avg_sq"]
        gradient, error = change / (1 - beta), error / (1 - beta)
        mean = (1 - beta2) * gradient.square() + (beta2 * before.exp_avg_sq if before.exp_avg_sq is not None else 0)
        off = _off(squares, mean, 1e-5 * squares + (1 - beta2) * (2 * gradient.abs() + error) * error)
        update = lr / (1 - beta**steps) * new / ((squares / (1 - beta2**steps)).sqrt() + recipe.eps)
        expected = weight * (1 - lr * decay)
    return Step(gradient, error, max(off, _off(changed, expected - update, 3 * ROUNDING * size + 1e-5 * update.abs())))


def _off(actual: Tensor, expected: Tensor, allowed: Tensor) -> float:
    return float(((actual - expected).abs() / allowed.clamp(min=1e-37)).nan_to_num(math.inf).amax())


class Invariants:
    """Takes the steps of a run, and checks some of them; one per rank.

    Args:
        config: the run.
        strategy: takes the steps.
        ranks: all.
        done: steps of earlier processes.
    """

    def __init__(self, config: RunConfig, strategy: Strategy, ranks: HostGroup, *, done: int) -> None:
        self._config, self._strategy, self._ranks, self._done = config, strategy, ranks, done
        self._kept, self._shapes = KeptState(), parameter_shapes(config.model)
        self._watches = not config.options.compile
        base_lr = config.recipe.optimizer.lr
        self._schedule = build_schedule(config.recipe.scheduler, base_lr=base_lr, total_steps=config.total_steps)

    def due(self, step: int) -> bool:
        """Whether ``step`` is checked: the first of a process, every N-th, and each that is saved."""
        every, saved = self._config.options.check_invariants, self._config.options.save_every
        ends = step in {self._done + 1, self._config.total_steps} or (saved > 0 and step % saved == 0)
        return every > 0 and (ends or step % every == 0)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[Facts]:
        place = self._config.topology
        facts = Facts(shapes=self._shapes, data_rank=place.data_rank, tensor_rank=place.tensor_rank)
        with contextlib.ExitStack() as undo:
            if self._watches:
                self._strategy.watch(facts, undo)
            yield facts

    def checked_step(
        self, take: Callable[[Iterator[Batch], int], StepResult], batches: Iterator[Batch], step: int
    ) -> StepResult:
        """The result of ``take``, which takes the optimizer step ``step``, checked if it is due; collective.

        Raises:
            InvariantError: on every rank, with the first violation.
        """
        if not self.due(step):
            return take(batches, step)
        self._kept.keep(self._strategy.shards())
        start = list(self._start()) if step == self._done + 1 else []
        steps = self._strategy.counters().optimizer_steps
        with self._watched() as facts:
            facts.found += start
            result = take(facts.read(batches), step)
        facts.reported = (float(result.loss), float(result.grad_norm), result.lr, float(result.skipped))
        if facts.finite:
            self._note_state(facts, step, steps=steps + (not result.skipped))
        self._agree(step, facts, functools.partial(self._judged, step))
        return result

    def validated(self, measure: Callable[[], Validation | None], step: int) -> Validation | None:
        """The result of ``measure``, checked; collective.

        Raises:
            InvariantError: it is not the mean of the losses that the ranks computed, or was computed as in training.
        """
        if not (self._config.options.check_invariants and self._watches):
            return measure()
        with self._watched() as facts:
            measured = measure()
        if measured is not None:
            facts.reported = (measured.loss, measured.tokens)
            self._agree(step, facts, self._judged_validation)
        return measured

    def _start(self) -> Iterator[Found]:
        """Compare the state before the first step of this process with where it came from."""
        config, kept, low = self._config, self._kept.shards(), DTYPES[self._config.precision]
        source = folder_name(self._done) if self._done else "seed and name"
        reader = StateReader(config.run_dir / source) if self._done else None
        values = initial_values(config) if reader is None else None
        for name, state in kept.states:
            boxes = kept.boxes[name]
            if reader is not None:
                came = reader.state(name, boxes)
            elif values is not None:
                whole = values(name, self._shapes[name])
                if config.init_from is None and (wrong := _distribution(name, whole, config)):
                    yield Found(config.topology.rank, name, wrong)
                came = ParamState(_part(whole, boxes).to(low).float())
            both = zip(came.mapped(Tensor.flatten), state.mapped(Tensor.flatten), strict=True)
            if not all(one is None or (own is not None and torch.equal(one, own)) for one, own in both):
                yield Found(config.topology.rank, name, f"the state at the start is not that of {source}")

    @torch.no_grad()
    def _note_state(self, facts: Facts, step: int, *, steps: int) -> None:
        """Compare this rank's part of the state before and after the step, and note gradients and replicas."""
        strategy, rank, shards = self._strategy, self._config.topology.rank, self._strategy.shards()
        before, held, lr = dict(self._kept.shards().states), dict(strategy.replicated_weights()), self._schedule(step)
        for name, state in shards.states:
            new, boxes = state.mapped(Tensor.flatten), shards.boxes[name]
            old = before[name].mapped(functools.partial(_flat, device=state.weight.device))
            if facts.reported[-1]:
                if not torch.equal(old.weight, new.weight):
                    facts.found.append(Found(rank, name, "changed in a step that was skipped"))
                continue
            update = recompute(name, old, new, config=self._config, lr=lr, steps=steps)
            if update.off > 1:
                what = f"{self._config.recipe.optimizer.type}'s with rate {lr:g} in its step {steps}"
                facts.found.append(Found(rank, name, f"the update is not {what} ({update.off:.2g} times the rounding)"))
            if update.gradient is not None and update.error is not None:
                gradient, squares = update.gradient, update.gradient.double().square()
                noise = update.error.double().square().sum()
                own = sketch(name, self._shapes[name], boxes, gradient), squares.sum(), noise
                facts.used[name] = Used(*map(float, own))
                if name == "wpe.weight":
                    rows = torch.zeros(self._shapes[name][0], dtype=torch.float64, device=squares.device)
                    for box, part in zip(boxes, torch.split(squares, [box.numel for box in boxes]), strict=True):
                        rows[box.start[0] : box.stop[0]] += part.view(box.shape).sum(1)
                    facts.positions = rows.tolist()
            if name in held and not torch.equal(part := _part(held[name], boxes), new.weight.to(part)):
                facts.found.append(Found(rank, name, "the weight of the model is not its fp32 master, rounded"))
        facts.replicas = {name: checksum(value) for name, value in held.items()}
        counts = {float(value) for value in strategy.state_tensors().optimizer if value.dim() == 0}
        if counts | {float(strategy.counters().optimizer_steps)} != {float(steps)}:
            facts.found.append(Found(rank, "", f"the optimizer counts {sorted(counts)} steps instead of {steps}"))

    def _agree(self, step: int, facts: Facts, judge: Callable[[list[Facts]], Iterator[Found]]) -> None:
        """Exchange facts, and stop if something is wrong; collective."""
        facts.losses, facts.weights = [one.cpu() for one in facts.losses], [one.cpu() for one in facts.weights]
        facts.computed = {name: value.cpu() for name, value in facts.computed.items()}
        every: list[Facts] = self._ranks.objects(facts)
        if found := [*(one for each in every for one in each.found), *judge(every)]:
            rank, name, what = found[0]
            where = ", ".join(filter(None, [f"step {step}", "" if rank is None else f"rank {rank}", name]))
            more = f" (and {len(found) - 1} more violations)" if found[1:] else ""
            then = "training stopped, and this state is not saved (docs/training.md)"
            raise InvariantError(f"{where}: {what}{more}: {then}")

    def _judged_validation(self, every: list[Facts]) -> Iterator[Found]:
        (loss, tokens), expected = every[0].reported, self._config.val_windows * self._config.seq_length
        mean = _sum(every) / expected
        if tokens != expected or not math.isclose(loss, mean, rel_tol=1e-6):
            what = f"reports {loss:.6g} of {tokens:g} targets; the ranks computed {mean:.6g} of {expected}"
            yield Found(None, "", f"the validation {what}")
        if any(True in each.modes for each in every):
            yield Found(None, "", "the validation computed in training mode")

    def _judged(self, step: int, every: list[Facts]) -> Iterator[Found]:
        (loss, norm, _, skipped), tokens = every[0].reported, self._config.tokens_per_step
        if not any(each.finite for each in every):
            return
        yield from self._judged_samples(step, every)
        expected = (loss, norm, self._schedule(step), skipped)
        for rank, each in enumerate(every):
            if not np.allclose(each.reported, expected, rtol=1e-5, atol=0, equal_nan=True):
                yield Found(rank, "", f"reports loss, norm, rate and skipped as {each.reported}, not {expected}")
            if False in each.modes:
                yield Found(rank, "", "computed the step in evaluation mode")
        if self._watches and not math.isclose(loss, _sum(every) / tokens, rel_tol=1e-5):
            yield Found(None, "", f"the loss is reported as {loss:.6g}; the ranks computed {_sum(every) / tokens:.6g}")
        weights = [
            (rank, micro, float(one)) for rank, each in enumerate(every) for micro, one in enumerate(each.weights)
        ]
        most = max((weight for _, _, weight in weights), default=0.0)
        for rank, micro, weight in weights:
            if not math.isclose(weight, most, rel_tol=1e-5):
                yield Found(rank, "", f"micro batch {micro + 1} weighs {weight / most:.3g} times as much as another")
        first: dict[str, int] = {}
        for rank, each in enumerate(every):
            for name, sums in each.replicas.items():
                if sums != every[first.setdefault(name, rank)].replicas[name]:
                    yield Found(rank, name, f"differs from its replica on rank {first[name]}")
        if not skipped and all(each.finite for each in every):
            yield from self._judged_gradients(every, norm=norm, weight=most * tokens)

    def _judged_samples(self, step: int, every: list[Facts]) -> Iterator[Found]:
        """Compare the windows that ranks read with those of seed and step, which are read from the files here."""
        config, order, windows = self._config, self._config.order, Windows(self._config.train, self._config.seq_length)
        expected, left = Counter[str](), {each.data_rank: rank for rank, each in reversed(list(enumerate(every)))}
        for number in order.batches(step - 1, step)[0].tolist():
            spans = windows.spans(number)
            ids = np.concatenate([file.memmap()[begin : begin + tokens] for file, begin, tokens in spans])
            expected[_hash(ids[:-1], ids[1:])] += 1
        for rank, each in enumerate(every):
            if each.samples != every[left[each.data_rank]].samples:
                yield Found(rank, "", f"read other samples than rank {left[each.data_rank]}, which has the same batch")
            if foreign := sum(sample not in expected for sample in each.samples):
                yield Found(rank, "", f"read {foreign} samples that are not of this step, or have other targets")
        if Counter(sample for rank in left.values() for sample in every[rank].samples) != expected:
            yield Found(None, "", "the ranks together did not read each sample of the step once")
        if type(order) is SampleOrder:  # in an epoch of a mixture, a small source begins anew
            epoch = (step - 1) // order.steps_per_epoch * order.steps_per_epoch
            seen = order.batches(max(epoch, step - config.options.check_invariants), step).ravel()
            if len(np.unique(seen)) < len(seen) or seen.min() < 0 or seen.max() >= order.windows:
                yield Found(None, "", "the order has a window twice in an epoch")

    def _judged_gradients(self, every: list[Facts], *, norm: float, weight: float) -> Iterator[Found]:
        """Compare the gradients that the optimizer used with those that the ranks computed, and with the norm."""
        config, recipe, total, total_noise = self._config, self._config.recipe, 0.0, 0.0
        told = recipe.optimizer.type == "AdamW" or recipe.optimizer.momentum > 0  # by a moment; a weight may absorb it
        exact = config.precision == "fp32" or config.run_type in {"baseline", "ddp"}
        share = QUANTIZED if recipe.zero_optimization.zero_quantized_gradients else EXACT if exact else LOW
        clipped = min(1.0, recipe.gradient_clipping / (norm + 1e-6)) if recipe.gradient_clipping > 0 else 1.0
        for name in (name for name in self._shapes if any(name in each.used for each in every)):
            parts = [each.used[name] for each in every if name in each.used]
            used, squares, noise = (sum(column) for column in zip(*parts, strict=True))
            total, total_noise = total + squares, total_noise + noise
            computed = sum(float(each.computed[name]) for each in every if name in each.computed)
            computed *= clipped / (weight or 1)
            if squares <= noise and told:
                yield Found(None, name, "its gradient is zero")
            elif weight and not abs(used - computed) <= share * squares**0.5 + 4 * noise**0.5:  # NaN, too
                times = f"{used / (computed or math.nan):.4g} times the mean of the gradients that the ranks computed"
                yield Found(None, name, f"the gradient that the optimizer used is {times}")
        if total and not abs(total**0.5 - norm * clipped) <= share * norm * clipped + 4 * total_noise**0.5:
            both = f"{norm:.6g}; that of the gradients that the optimizer used is {total**0.5 / clipped:.6g}"
            yield Found(None, "", f"the norm is reported as {both}")
        rows = [sum(row) for row in zip(*(each.positions for each in every if each.positions), strict=True)]
        if rows and recipe.optimizer.type == "AdamW":
            unused = config.end_of_text is None and 0.0 in rows[: config.seq_length]
            if unused or any(rows[config.seq_length :]):
                what = f"position {rows.index(0.0)} has no gradient" if unused else "positions behind the end have one"
                yield Found(None, "wpe.weight", what)


def _sum(every: list[Facts]) -> float:
    return sum(float(loss) for each in every if each.tensor_rank == 0 for loss in each.losses)


def _flat(value: Tensor, *, device: torch.device) -> Tensor:
    return value.flatten().to(device)


def _part(whole: Tensor, boxes: Sequence[Box]) -> Tensor:
    return torch.cat([whole[box.slices(Box.whole(whole.shape))].reshape(-1) for box in boxes])


def _distribution(name: str, value: Tensor, config: RunConfig) -> str:
    """What is wrong with an initial value, by the GPT-2 paper (section 2.3); empty if nothing."""
    if not decays(name):
        constant = float(not name.endswith(".bias"))
        return "" if bool((value == constant).all()) else f"does not start at {constant:g}"
    rows = value[: config.model.vocab_size] if name == "wte.weight" else value
    std, own = WEIGHT_STD / (2 * config.model.n_layer) ** (0.5 * name.endswith("proj.weight")), float(rows.std())
    wrong = abs(own / std - 1) > 5 / rows.numel() ** 0.5
    return f"starts with a deviation of {own:.3g}, not {std:.3g}" if wrong else ""
