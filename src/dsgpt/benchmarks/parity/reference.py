"""The reference: a training loop in plain PyTorch, on one device, without anything from ``dsgpt.strategies``.

In fp32 it takes the whole global batch at once, without ranks or accumulation. In bf16 and fp16 it takes the micro
batches of a ``Split``, one after the other, and sums their gradients. From this package it uses the model, its initial
weights and the order of the samples, which have separate golden tests. The learning rate and the validation are
computed here. So is the loss in fp32, and where the split says so, by PyTorch's ``cross_entropy`` of all logits; else
it is the model's own, which rounds as the strategies do.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dsgpt.benchmarks.harness.tested import ACCUMULATED, EVERY
from dsgpt.benchmarks.parity.computation import Split
from dsgpt.benchmarks.parity.measurement import CHANGED, FIRST_CHANGE, Measurement, sample_hash, validated_after
from dsgpt.config.recipe_blocks import SchedulerRecipe
from dsgpt.config.run_config import RunConfig
from dsgpt.model.gpt2 import GPT2
from dsgpt.model.initialization import initialize

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP16_LOSS_SCALE = 256.0
"""A power of two, which changes no digit of a gradient that neither overflows nor vanishes."""

Gradients = list[Tensor]


def train_reference(config: RunConfig, device: torch.device, split: Split) -> Measurement:
    """Train ``config`` from its first to its last step."""
    recipe, measurement = config.recipe, Measurement(data_rank=0, strategy="reference")
    model = GPT2(config.model)
    initialize(model, config=config.model, seed=config.options.seed)
    model.to(device, DTYPES[config.precision])
    # Mixed precision begins with rounded weights: the fp32 ones are copies of those that the model computes with.
    masters = {name: value.detach().float().clone().requires_grad_() for name, value in model.named_parameters()}
    optimizer = _optimizer(config, masters)
    for step in range(1, config.total_steps + 1):
        lr = learning_rate(recipe.scheduler, base=recipe.optimizer.lr, total_steps=config.total_steps, step=step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = _global_batch(config, step)
        loss, gradients = _loss_and_gradients(config, model, inputs.to(device), targets.to(device), split)
        for master, gradient in zip(masters.values(), gradients, strict=True):
            master.grad = gradient
        if step == 1:
            for name, gradient in zip(masters, gradients, strict=True):
                measurement.gradient(name, gradient)
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), recipe.gradient_clipping or math.inf)
        optimizer.step()
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(masters[name])
        if step == FIRST_CHANGE:
            for name, master in masters.items():
                measurement.weight(name, master, after=CHANGED)
        if step in validated_after(config.total_steps):
            val_loss, targets_in_all = _validate(config, model, device)
            measurement.validation(after_step=step, loss=val_loss, targets=targets_in_all)
        samples = [sample_hash(*sample) for sample in zip(inputs, targets, strict=True)]
        measurement.step(loss=loss, grad_norm=float(norm), lr=lr, used=[lr], skipped=False, samples=samples)
    for name, master in masters.items():
        measurement.weight(name, master)
    return measurement


def _loss_and_gradients(
    config: RunConfig, model: GPT2, inputs: Tensor, targets: Tensor, split: Split
) -> tuple[float, Gradients]:
    """The mean loss over a global batch, ids and targets (B, T), and its fp32 gradients in the parameters' order."""
    low, micro_batches = DTYPES[config.precision], split.data_ranks * split.accumulation
    scale = FP16_LOSS_SCALE if config.precision == "fp16" else 1.0
    losses, found = [], []
    for chunk in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        model.zero_grad()
        whole = split.whole_logits or config.precision == "fp32"
        loss = (_loss_of_all_logits(model, *chunk) if whole else model(*chunk)) / split.accumulation
        (loss * scale).backward()
        losses.append(float(loss))
        found.append([_gradient(value).clone() for value in model.parameters()])
    by_rank = [found[first : first + split.accumulation] for first in range(0, micro_batches, split.accumulation)]
    if split.low == EVERY:
        parts = [_added(same, low) for same in zip(*by_rank, strict=True)]
    else:
        between = low if split.low == ACCUMULATED else torch.float32
        sums = [_added(micro, torch.float32) for micro in by_rank]
        parts = [_added([[value.to(between) for value in one] for one in sums], between)]
    factor = scale * split.data_ranks
    return sum(losses) / split.data_ranks, [value / factor for value in _added(parts, torch.float32)]


def _loss_of_all_logits(model: GPT2, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean loss by PyTorch's own function, instead of the model's."""
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "every parameter of the model takes part in its loss"
    return parameter.grad


def _added(several: list[Gradients] | tuple[Gradients, ...], dtype: torch.dtype) -> Gradients:
    """The sum, one summand after the other, each partial sum rounded to ``dtype``."""
    total = [value.to(dtype) for value in several[0]]
    for one in several[1:]:
        total = [(so_far + value.to(dtype)) for so_far, value in zip(total, one, strict=True)]
    return total


@torch.no_grad()
def _validate(config: RunConfig, model: GPT2, device: torch.device) -> tuple[float, int]:
    """Mean loss over every whole window of the validation file, one after the other, and the number of targets."""
    tokens, length = config.val.memmap(), config.seq_length
    loss_sum, targets = 0.0, 0
    for first in range(0, len(tokens) - length, length):
        ids = torch.from_numpy(tokens[first : first + length + 1].astype(np.int64)).to(device)  # (T + 1,)
        logits = model(ids[None, :-1])[0].float()  # (T, V)
        loss_sum += float(F.cross_entropy(logits, ids[1:], reduction="sum"))
        targets += length
    return loss_sum / targets, targets


def learning_rate(scheduler: SchedulerRecipe | None, *, base: float, total_steps: int, step: int) -> float:
    """The learning rate of optimizer step ``step`` (the first is 1), by DeepSpeed's documentation of the schedule.

    WarmupCosineLR with logarithmic warm-up (deepspeed.readthedocs.io, "Learning Rate Schedulers"): with w steps of
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


def _optimizer(config: RunConfig, weights: dict[str, Tensor]) -> torch.optim.Optimizer:
    recipe = config.recipe.optimizer
    decayed, plain = [w for w in weights.values() if w.dim() > 1], [w for w in weights.values() if w.dim() == 1]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    if recipe.type == "SGD":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov)
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)


def _global_batch(config: RunConfig, step: int) -> tuple[Tensor, Tensor]:
    """Ids and targets, (B, T) each, of one step: window i of the file is ``tokens[i*T : i*T + T + 1]``."""
    tokens, length = config.train.memmap(), config.seq_length
    windows = [tokens[i * length : i * length + length + 1] for i in config.order.batch(step - 1)]
    ids = torch.from_numpy(np.stack(windows).astype(np.int64))  # (B, T + 1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
