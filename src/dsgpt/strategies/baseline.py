"""The baseline: one process, plain PyTorch. What every other strategy is compared with."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dsgpt.config import RunConfig
from dsgpt.data.loader import IGNORED_TARGET, Batch
from dsgpt.model.gpt2 import GPT2
from dsgpt.model.initialization import initialize
from dsgpt.optimization.clipping import global_norm
from dsgpt.optimization.optimizer import build_optimizer, parameter_groups, set_learning_rate
from dsgpt.optimization.schedule import build_schedule
from dsgpt.strategies.base import ParamState, StepResult, to_device
from dsgpt.strategies.loss_scale import LossScale
from dsgpt.strategies.master_weights import MasterWeights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_STATE_FILE = "baseline.pt"


class Baseline:
    """Plain PyTorch on one device."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        recipe = config.recipe
        self._device = device
        self._accumulation = config.batch.gradient_accumulation_steps
        self._clipping = recipe.gradient_clipping
        self.model = GPT2(config.model, activation_checkpointing=config.options.activation_checkpointing)
        initialize(self.model, config=config.model, seed=config.options.seed)
        self.model.to(device)
        self._weights = MasterWeights(self.model, DTYPES[config.precision])
        self._optimizer = build_optimizer(
            parameter_groups(self._weights.parameters, recipe.optimizer), recipe.optimizer
        )
        self._schedule = build_schedule(recipe.scheduler, base_lr=recipe.optimizer.lr, total_steps=config.total_steps)
        self._scale = LossScale(recipe.loss_scaling if config.precision == "fp16" else None)
        if config.options.compile:
            self.model.compile()

    def train_step(self, batches: Iterator[Batch], step: int) -> StepResult:
        """See ``Strategy``."""
        self.model.train()
        lr = self._schedule(step)
        set_learning_rate(self._optimizer, lr)
        self._optimizer.zero_grad()
        loss_sum = torch.zeros((), device=self._device)
        for _ in range(self._accumulation):
            batch = to_device(next(batches), self._device)
            loss = self.model(batch.inputs, batch.targets) / self._accumulation
            (loss * self._scale.factor).backward()
            self._weights.gather_gradients()
            loss_sum += loss.detach()
        norm = self._unscale_and_clip()
        overflow = self._scale.enabled and not bool(torch.isfinite(norm))  # waits for the device, in fp16 alone
        if not overflow:
            self._optimizer.step()
            self._weights.publish()
        self._scale.update(overflow=overflow)
        return StepResult(loss=loss_sum, grad_norm=norm, lr=lr, skipped=torch.tensor(overflow))

    def _unscale_and_clip(self) -> Tensor:
        parameters = [p for p in self._weights.parameters.values() if p.grad is not None]
        if self._scale.factor != 1:
            for parameter in parameters:
                parameter.grad /= self._scale.factor
        norm = global_norm(p.grad for p in parameters)
        if self._clipping > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._clipping, norm)
        return norm

    @torch.no_grad()
    def eval_step(self, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
        """See ``Strategy``."""
        self.model.eval()
        loss_sum, tokens = torch.zeros(2, dtype=torch.float64, device=self._device)
        for _ in range(self._accumulation):
            batch = to_device(next(batches), self._device)
            loss_sum += self.model(batch.inputs, batch.targets, reduction="sum")
            tokens += (batch.targets != IGNORED_TARGET).sum()
        return loss_sum, tokens

    def iter_state(self) -> Iterator[tuple[str, ParamState]]:
        """See ``Strategy``."""
        for name, parameter in self._weights.parameters.items():
            moments = self._optimizer.state.get(parameter, {})
            yield name, ParamState(parameter.detach(), moments.get("exp_avg"), moments.get("exp_avg_sq"))

    def save(self, folder: Path) -> None:
        """See ``Strategy``."""
        weights = {name: parameter.detach() for name, parameter in self._weights.parameters.items()}
        state = {"weights": weights, "optimizer": self._optimizer.state_dict(), "loss_scale": self._scale.state()}
        torch.save(state, folder / _STATE_FILE)

    def load(self, folder: Path) -> None:
        """See ``Strategy``."""
        state = torch.load(folder / _STATE_FILE, map_location=self._device, weights_only=True)
        for name, value in state["weights"].items():
            self._weights.replace(name, value)
        self._optimizer.load_state_dict(state["optimizer"])
        self._scale.take_up(state["loss_scale"])
