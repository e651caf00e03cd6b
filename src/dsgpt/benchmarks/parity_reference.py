"""The reference of the parity suite, what a training measured, and how both are compared.

What one rank measured in one training: numbers per step, the samples it read, and on rank 0 gradient and weights. The
reference and every strategy write the same files, so that one comparison serves all.

The reference: a training loop in plain PyTorch, on one device, without anything from ``dsgpt.strategies``. In fp32 it
takes the whole global batch at once, without ranks or accumulation. In bf16 and fp16 it takes the micro batches of a
``Split``, one after the other, and sums their gradients. From this package it uses the model, its initial weights and
the order of the samples, which have separate golden tests. The learning rate and the validation are computed here. So
is the loss in fp32, and where the split says so, by PyTorch's ``cross_entropy`` of all logits; else it is the model's
own, which rounds as the strategies do.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsgpt.benchmarks.cells import ACCUMULATED, BYTES_BOUND, EVERY, RATE_BOUND, CellEnd
from dsgpt.benchmarks.launch import write_end
from dsgpt.benchmarks.parity import Bounds, Split
from dsgpt.config.recipe_blocks import SchedulerRecipe
from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import Batch
from dsgpt.formats.tensor_files import DTYPES
from dsgpt.model.gpt2 import GPT2, initialize
from dsgpt.record.schema import finite

STATE_FILE = "state.safetensors"
GRADIENT, CHANGED, WEIGHT = "gradient/", "changed/", "weight/"
FIRST_CHANGE = 3
"""The first step with a learning rate above 0 under the suite's schedule: the weights after it show one update."""


def validated_after(total_steps: int) -> tuple[int, int]:
    """The steps after which to validate: the middle one and the last.

    The middle one shows that a validation does not change training. None comes before the first step: DeepSpeed's
    ZeRO-3 learns from its first forward pass what to gather when, and sends an eighth more in every training step if
    that pass was a validation.
    """
    return total_steps // 2, total_steps


@dataclass(kw_only=True)
class Measurement:
    """Collects measurements step by step; ``write`` writes them at the end."""

    data_rank: int
    bytes_per_rank: dict[str, Any] = field(default_factory=dict)
    """The bytes of a step; see ``parity_rank._measure``."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Of each optimizer step: ``loss`` is the mean over the global batch, and ``grad_norm`` the norm before clipping.
    ``lr`` is the learning rate that was reported, and ``used`` has every one that an optimizer of this rank stepped
    with. ``skipped`` says whether the step was skipped. ``samples`` are sorted hashes of what this rank read for it."""
    validations: list[dict[str, Any]] = field(default_factory=list)
    """Of each validation: ``after_step``; ``loss``, the mean over all targets of the validation file in nats per token;
    ``targets``, their number."""
    replicas: dict[str, tuple[str, float]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def tensor(self, kind: str, name: str, value: Tensor) -> None:
        """Note a parameter's first gradient before clipping (``GRADIENT``) or its value (``CHANGED``, ``WEIGHT``)."""
        self.tensors[kind + name] = value.detach().to("cpu", torch.float32, copy=True)

    def replica(self, name: str, value: Tensor) -> None:
        """Note a weight that this rank holds whole: a hash, to compare with other ranks', and a norm, to show."""
        value = value.detach().cpu().contiguous()
        self.replicas[name] = (digest(value), float(torch.linalg.vector_norm(value.double())))

    def write(self, folder: Path, *, rank: int) -> None:
        """Write the rank's file, and beside it the tensors, if any were noted."""
        if self.tensors:
            save_file({name: value.contiguous() for name, value in self.tensors.items()}, folder / STATE_FILE)
        write_end(folder, rank, **finite({name: value for name, value in vars(self).items() if name != "tensors"}))


def digest(value: Tensor) -> str:
    """A hash of a tensor's bytes."""
    return hashlib.blake2b(value.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def sample_hash(inputs: Tensor, targets: Tensor) -> str:
    """A hash of one sample: its ids, (T,), and the ids to predict, (T,)."""
    return digest(torch.cat([inputs, targets]).cpu())


class WatchedBatches:
    """Passes micro batches on, and remembers the hashes of their samples."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = iter(batches)
        self._samples: list[str] = []

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._samples += [sample_hash(*sample) for sample in zip(batch.inputs, batch.targets, strict=True)]
        return batch

    def take(self) -> list[str]:
        """The hashes since the last call."""
        samples, self._samples = self._samples, []
        return samples


FP16_LOSS_SCALE = 256.0
"""A power of two, which changes no digit of a gradient that neither overflows nor vanishes."""

Gradients = list[Tensor]


def train_reference(config: RunConfig, device: torch.device, split: Split) -> Measurement:
    """Train ``config`` from its first to its last step."""
    recipe, how, measurement = config.recipe, config.recipe.optimizer, Measurement(data_rank=0)
    model = GPT2(config.model)
    initialize(model, config=config.model, seed=config.options.seed)
    model.to(device, DTYPES[config.precision])
    # Mixed precision begins with rounded weights: the fp32 ones are copies of those that the model computes with.
    masters = {name: value.detach().float().clone().requires_grad_() for name, value in model.named_parameters()}
    decayed, plain = [w for w in masters.values() if w.dim() > 1], [w for w in masters.values() if w.dim() == 1]
    groups = [{"params": decayed, "weight_decay": how.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    if how.type == "AdamW":  # each writes its defaults into the groups
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=how.lr, betas=how.betas, eps=how.eps)
    else:
        optimizer = torch.optim.SGD(groups, lr=how.lr, momentum=how.momentum, nesterov=how.nesterov)
    for step in range(1, config.total_steps + 1):
        lr = learning_rate(recipe.scheduler, base=how.lr, total_steps=config.total_steps, step=step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        tokens, length = config.train.files[0].memmap(), config.seq_length
        windows = [tokens[i * length : i * length + length + 1] for i in config.order.batches(step - 1, step)[0]]
        ids = torch.from_numpy(np.stack(windows).astype(np.int64))  # (B, T + 1)
        inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()  # (B, T) each
        loss, gradients = _loss_and_gradients(config, model, inputs.to(device), targets.to(device), split)
        for master, gradient in zip(masters.values(), gradients, strict=True):
            master.grad = gradient
        if step == 1:
            for name, gradient in zip(masters, gradients, strict=True):
                measurement.tensor(GRADIENT, name, gradient)
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), recipe.gradient_clipping or math.inf)
        optimizer.step()
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(masters[name])
        if step == FIRST_CHANGE:
            for name, master in masters.items():
                measurement.tensor(CHANGED, name, master)
        if step in validated_after(config.total_steps):
            val_loss, targets_in_all = _validate(config, model, device)
            measurement.validations.append({"after_step": step, "loss": val_loss, "targets": targets_in_all})
        samples = sorted(sample_hash(*sample) for sample in zip(inputs, targets, strict=True))
        facts = {"loss": loss, "grad_norm": float(norm), "lr": lr, "used": [lr], "skipped": False, "samples": samples}
        measurement.steps.append(facts)
    for name, master in masters.items():
        measurement.tensor(WEIGHT, name, master)
    return measurement


def _loss_and_gradients(
    config: RunConfig, model: GPT2, inputs: Tensor, targets: Tensor, split: Split
) -> tuple[float, Gradients]:
    """The mean loss over a global batch, ids and targets (B, T), and its fp32 gradients in the parameters' order."""
    low, micro_batches = DTYPES[config.precision], split.data_ranks * split.accumulation
    scale = FP16_LOSS_SCALE if config.precision == "fp16" else 1.0
    losses, gradients = [], []
    for chunk in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        model.zero_grad()
        if split.whole_logits or config.precision == "fp32":  # by PyTorch's own function, instead of the model's
            logits = model(chunk[0]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), chunk[1].flatten()) / split.accumulation
        else:
            loss = model(*chunk) / split.accumulation
        torch.autograd.backward(loss * scale)
        losses.append(float(loss))
        gradients.append([value.grad.clone() for value in model.parameters() if value.grad is not None])
    by_rank = [gradients[first : first + split.accumulation] for first in range(0, micro_batches, split.accumulation)]
    if split.low == EVERY:
        parts = [_added(same, low) for same in zip(*by_rank, strict=True)]
    else:
        between = low if split.low == ACCUMULATED else torch.float32
        sums = [_added(micro, torch.float32) for micro in by_rank]
        parts = [_added([[value.to(between) for value in one] for one in sums], between)]
    factor = scale * split.data_ranks
    return sum(losses) / split.data_ranks, [value / factor for value in _added(parts, torch.float32)]


def _added(several: list[Gradients] | tuple[Gradients, ...], dtype: torch.dtype) -> Gradients:
    """The sum, one summand after the other, each partial sum rounded to ``dtype``."""
    total = [value.to(dtype) for value in several[0]]
    for one in several[1:]:
        total = [(so_far + value.to(dtype)) for so_far, value in zip(total, one, strict=True)]
    return total


@torch.no_grad()
def _validate(config: RunConfig, model: GPT2, device: torch.device) -> tuple[float, int]:
    """Mean loss over every whole window of the validation file, one after the other, and the number of targets."""
    tokens, length = config.val.files[0].memmap(), config.seq_length
    loss_sum, targets = 0.0, 0
    for first in range(0, len(tokens) - length, length):
        ids = torch.from_numpy(tokens[first : first + length + 1].astype(np.int64)).to(device)  # (T + 1,)
        logits = model(ids[None, :-1])[0].float()  # (T, V)
        loss_sum += float(F.cross_entropy(logits, ids[1:], reduction="sum"))
        targets += length
    return loss_sum / targets, targets


def learning_rate(scheduler: SchedulerRecipe | None, *, base: float, total_steps: int, step: int) -> float:
    """The learning rate of optimizer step ``step`` (the first is 1), by DeepSpeed's documentation of the schedule.

    WarmupCosineLR with logarithmic warm-up (deepspeed.readthedocs.io, "Learning Rate Schedulers"). With w steps of
    warm-up and n in all, counter i gives log(i + 1) / log(w) up to w, then half a cosine from 1 down to the lowest
    ratio. The counter starts at -1 and is advanced after a step, so both of the first two steps are at the start of the
    warm-up.
    """
    if scheduler is None:
        return base
    if (scheduler.type, scheduler.warmup_type, scheduler.warmup_min_ratio) != ("WarmupCosineLR", "log", 0.0):
        raise NotImplementedError(f"the reference does not implement {scheduler.type} ({scheduler.warmup_type})")
    warm_up, counter = scheduler.warmup_num_steps, max(0, step - 2)
    if counter < warm_up:
        return base * math.log(counter + 1) / math.log(warm_up)
    done = (counter - warm_up + 1) / (total_steps - warm_up)
    return base * (scheduler.cos_min_ratio + (1 - scheduler.cos_min_ratio) * math.cos(math.pi * done / 2) ** 2)


# Compares a training with its reference: every fact, at every step, for every parameter, against its bound.

Facts = dict[str, Any]
"""A part of a rank's file, as ``Measurement`` writes it."""
Place = tuple[str, Any, Any]
"""Place, expected and actual value: numbers, of which the actual one is None if it was not finite, or tensors."""


def _distance(expected: Any, actual: Any, *, relative: bool) -> float:
    """How far two numbers are apart, or two tensors, which are always compared in relation to their length."""
    if not isinstance(expected, Tensor):
        return float(abs(actual - expected) / (abs(expected) or 1 if relative else 1))
    if actual.shape != expected.shape:
        return math.inf
    size, distance = _norm(expected), _norm(actual.double() - expected.double())
    return distance / size if size else distance


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double()))


@dataclass(kw_only=True)
class Comparison:
    """The result of comparing one cell."""

    measured: dict[str, Facts] = field(default_factory=dict)
    """Largest difference of each fact, and its place."""
    failures: list[Facts] = field(default_factory=list)
    """Facts out of bounds, each with the first place where it is, and both values."""

    def note(
        self, fact: str, places: Iterable[Place], bound: float | Callable[[str], float], *, relative: bool = False
    ) -> None:
        """Compare one fact's differences with its bound; a difference that is not a number fails.

        Args:
            fact: its name.
            places: in their order.
            bound: one number, or a function from a place to a number.
            relative: whether distances of numbers are shares of the expected ones.
        """
        differences = [
            (math.inf if two is None else _distance(one, two, relative=relative), where, one, two)
            for where, one, two in places
        ]
        if not differences:
            return
        largest = max(differences, key=lambda entry: entry[0])
        self.measured.setdefault(fact, {}).update(difference=largest[0], where=largest[1])
        for difference, where, *values in differences:
            allowed = bound(where) if callable(bound) else bound
            if not difference <= allowed:
                expected, actual = (_norm(one) if isinstance(one, Tensor) else one for one in values)
                self._fail(fact, where, expected, actual, difference=difference, bound=allowed)
                return

    def _fail(self, fact: str, where: str, expected: Any, actual: Any, **more: float) -> None:
        self.failures.append({"fact": fact, "where": where, "expected": expected, "actual": actual, **more})

    def require(self, fact: str, where: str, expected: Any, actual: Any) -> None:
        """Compare two values that must be equal; the first difference of a fact is kept."""
        measured = self.measured.setdefault(fact, {})
        if expected != actual and measured.get("equal", True):
            self._fail(fact, where, expected, actual)
        measured["equal"] = measured.get("equal", True) and expected == actual


def compare(end: CellEnd, reference_end: CellEnd, *, bounds: Bounds, replicas: str) -> Comparison:
    """Compare the measurements of all ranks of a cell with those of the reference.

    Args:
        end: every rank's file, and where rank 0 wrote its tensors.
        reference_end: the same of the reference.
        bounds: how far they may be apart.
        replicas: ``all``, ``some`` or ``none``: how much of the model every rank must hold whole.
    """
    comparison, ranks, reference = Comparison(), end.ranks, reference_end.ranks[0]
    ours, theirs = ranks[0]["steps"], reference["steps"]
    comparison.require("steps", "in all", len(theirs), len(ours))
    pairs = {f"step {number}": pair for number, pair in enumerate(zip(theirs, ours, strict=False), start=1)}
    for step, (one, two) in pairs.items():
        comparison.require("skipped", step, one["skipped"], two["skipped"])
    _check_rates(comparison, ranks, theirs)
    losses, norms = (
        [(step, one[key], two[key]) for step, (one, two) in pairs.items()] for key in ("loss", "grad_norm")
    )
    comparison.note("loss", losses, bounds.loss)
    comparison.note("gradient norm", norms, bounds.norm, relative=True)
    _check_validation(comparison, ranks, reference["validations"], bounds)
    _check_samples(comparison, ranks, theirs)
    for number, rank in enumerate(ranks[1:], start=1):
        for index, (one, two) in enumerate(zip(ours, rank["steps"], strict=False), start=1):
            for key in ("loss", "grad_norm", "lr", "skipped"):
                comparison.require("reports of all ranks", f"step {index}, {key} of rank {number}", one[key], two[key])
    for fact, kind, bound in (
        ("first gradient", GRADIENT, bounds.for_gradient),
        ("first update", CHANGED, bounds.for_update),
        ("weights", WEIGHT, bounds.weights),
    ):
        expected, actual = (_seen(where, kind) for where in (reference_end.folder, end.folder))
        comparison.require(fact, "names", sorted(expected), sorted(actual))
        places = [(name, value, actual[name]) for name, value in expected.items() if name in actual]
        comparison.note(fact, places, bound)
    _check_replicas(comparison, ranks, replicas, names=set(expected))
    sizes = ranks[0]["bytes_per_rank"].items()
    places = [(name, size["formula"], size["measured"]) for name, size in sizes if size["measured"] is not None]
    comparison.note("bytes per rank", places, BYTES_BOUND, relative=True)
    return comparison


def _check_rates(comparison: Comparison, ranks: list[Facts], reference: list[Facts]) -> None:
    """The rate that a strategy reports, and those that every rank's optimizer stepped with, in all parameter groups."""
    places = []
    for index, expected in enumerate(reference):
        for number, rank in enumerate(ranks):
            for step in rank["steps"][index : index + 1]:
                if not (step["used"] or step["skipped"]):
                    comparison.require("learning rate", f"step {index + 1}, used by rank {number}", "one", "none")
                rates = [step["lr"], *step["used"]]
                places += [(f"step {index + 1}, rank {number}", expected["lr"], lr) for lr in rates]
    comparison.note("learning rate", places, RATE_BOUND)


def _check_validation(comparison: Comparison, ranks: list[Facts], reference: list[Facts], bounds: Bounds) -> None:
    """Every rank's mean loss over all targets of the validation file, and their number."""
    places = []
    for number, rank in enumerate(ranks):
        comparison.require("validations", f"of rank {number}", len(reference), len(rank["validations"]))
        for expected, actual in zip(reference, rank["validations"], strict=False):
            where = f"step {expected['after_step']}, rank {number}"
            comparison.require("validation targets", where, expected["targets"], actual["targets"])
            places.append((where, expected["loss"], actual["loss"]))
    comparison.note("validation loss", places, bounds.validation)


def _seen(folder: Path, kind: str) -> dict[str, Tensor]:
    """The gradients that were noted, by canonical name, or of every weight the part that affects the loss.

    That is all but the keys' biases, the middle third of ``(3C,)``.
    Softmax ignores what all keys share, so the gradient of these biases is only rounding error. Adam takes full steps
    along it, so these biases end at arbitrary values in every precision.
    """
    noted = load_file(folder / STATE_FILE) if (folder / STATE_FILE).exists() else {}
    tensors = {name.removeprefix(kind): value for name, value in noted.items() if name.startswith(kind)}
    if kind == GRADIENT:
        return tensors
    biases = {name: value.tensor_split(3) for name, value in tensors.items() if name.endswith("attn.qkv.bias")}
    return tensors | {name: torch.cat([queries, values]) for name, (queries, _, values) in biases.items()}


def _check_samples(comparison: Comparison, ranks: list[Facts], reference: list[Facts]) -> None:
    """Together the data ranks read each of the reference's samples once; peers of one data rank read the same."""
    for index, step in enumerate(reference):
        readers: dict[int, tuple[int, list[str]]] = {}  # by data rank: the first rank that reads, and its samples
        for number, rank in enumerate(ranks):
            samples = rank["steps"][index]["samples"] if len(rank["steps"]) > index else []
            if not samples:  # middle stages of a pipeline read none
                continue
            first, same = readers.setdefault(rank["data_rank"], (number, samples))
            where = f"step {index + 1}, rank {number} beside rank {first} of data rank {rank['data_rank']}"
            comparison.require("samples", where, same, samples)
        together = sorted(sample for _, samples in readers.values() for sample in samples)
        comparison.require("samples", f"step {index + 1}", step["samples"], together)


def _check_replicas(comparison: Comparison, ranks: list[Facts], replicas: str, *, names: set[str]) -> None:
    """Ranks that hold a weight whole hold the same bits, and every rank holds as many as its strategy says."""
    holders: dict[str, tuple[int, list[Any]]] = {}
    for number, rank in enumerate(ranks):
        for name, value in rank["replicas"].items():
            first, expected = holders.setdefault(name, (number, value))
            comparison.require("replicated weights", f"{name} of rank {number} beside rank {first}", expected, value)
        if replicas == "all":
            on_rank = len(names & rank["replicas"].keys())
            comparison.require("replicated weights", f"number held by rank {number}", len(names), on_rank)
    if replicas == "some" and len(ranks) > 1:
        shared = sum(len(rank["replicas"]) for rank in ranks) > len(holders)
        comparison.require("replicated weights", "any held by two ranks", True, shared)
