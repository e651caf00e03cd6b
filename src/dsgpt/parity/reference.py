"""The reference: a training loop in plain PyTorch, on one device, without anything of ``dsgpt.strategies``.

It takes the whole global batch at once, so that it knows neither ranks nor accumulation. Of this package it uses the
model, its initial weights, the order of the samples and the schedule, which have golden tests of their own.
"""

import math

import numpy as np
import torch
from torch import Tensor

from dsgpt.config import RunConfig
from dsgpt.model.gpt2 import GPT2
from dsgpt.model.initialization import initialize
from dsgpt.optimization.schedule import build_schedule
from dsgpt.parity.measurement import Measurement, sample_hash

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP16_LOSS_SCALE = 256.0
"""A power of two, which changes no digit of a gradient that neither overflows nor vanishes."""


def train_reference(config: RunConfig, device: torch.device) -> Measurement:
    """Train ``config`` from its first to its last step."""
    recipe, measurement = config.recipe, Measurement(data_rank=0, strategy="reference")
    model = GPT2(config.model)
    initialize(model, config=config.model, seed=config.options.seed)
    model.to(device, DTYPES[config.precision])
    # Mixed precision begins with rounded weights: the fp32 ones are copies of those that the model computes with.
    masters = {name: value.detach().float().clone().requires_grad_() for name, value in model.named_parameters()}
    scale = FP16_LOSS_SCALE if config.precision == "fp16" else 1.0
    optimizer = _optimizer(config, masters)
    schedule = build_schedule(recipe.scheduler, base_lr=recipe.optimizer.lr, total_steps=config.total_steps)
    for step in range(1, config.total_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        inputs, targets = _global_batch(config, step)
        model.zero_grad()
        loss = model(inputs.to(device), targets.to(device))
        (loss * scale).backward()
        for name, value in model.named_parameters():
            masters[name].grad = value.grad.float() / scale
        if step == 1:
            for name, master in masters.items():
                measurement.gradient(name, master.grad)
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), recipe.gradient_clipping or math.inf)
        optimizer.step()
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(masters[name])
        samples = [sample_hash(*sample) for sample in zip(inputs, targets, strict=True)]
        measurement.step(loss=float(loss), grad_norm=float(norm), lr=schedule(step), skipped=False, samples=samples)
    for name, master in masters.items():
        measurement.weight(name, master)
    return measurement


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
