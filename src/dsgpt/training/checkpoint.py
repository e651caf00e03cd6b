"""One checkpoint of a run: the strategy's state, the whole weights, the random states and the tokenizer together."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dsgpt.checkpointing import store
from dsgpt.checkpointing.random_state import save_random_state
from dsgpt.checkpointing.run_state import RunState
from dsgpt.checkpointing.writing import save_tensors
from dsgpt.config import RunConfig
from dsgpt.errors import NonFiniteError
from dsgpt.files import write_json_atomic
from dsgpt.process_group import barrier, from_main
from dsgpt.strategies.base import Strategy
from dsgpt.telemetry.environment import software_versions
from dsgpt.training.data_check import data_tokenizer


def save_checkpoint(
    config: RunConfig,
    strategy: Strategy,
    device: torch.device,
    *,
    state: RunState,
    fixed: dict[str, Any],
    run_id: str | None,
) -> None:
    """Write the checkpoint of ``state``; collective. It appears whole, or not at all.

    Raises:
        NonFiniteError: a weight is NaN or infinite; nothing is left of the attempt.
    """
    is_main = config.topology.is_main
    folder = store.begin(config.run_dir, state.step, is_main=is_main)
    strategy.save(folder)
    save_random_state(folder, rank=config.topology.rank, device=device)
    weights = whole_weights(strategy, keep=is_main)
    _refuse_non_finite(weights, folder, step=state.step, is_main=is_main)
    if is_main:
        save_tensors(weights, folder / store.WEIGHTS)
        write_json_atomic(folder / store.MODEL, config.model.as_dict())
        _copy_tokenizer(config, folder)
    barrier()
    if is_main:
        about = {
            "strategy": config.strategy_name,
            "topology": asdict(config.topology),
            "versions": software_versions(),
            "precision": config.precision,
            "run_id": run_id,
            "fixed": fixed,
        }
        store.publish(config.run_dir, folder, state=state, about=about, keep=config.options.keep_checkpoints)
    barrier()


def _refuse_non_finite(weights: dict[str, torch.Tensor], folder: Path, *, step: int, is_main: bool) -> None:
    """The last update may have spoiled weights whose loss nobody has seen yet."""
    spoiled = from_main([name for name, value in weights.items() if not torch.isfinite(value).all()])
    if spoiled:
        if is_main:
            shutil.rmtree(folder)
        raise NonFiniteError(
            f"step {step}: {', '.join(spoiled[:3])} became NaN or infinite: training stopped, and this state is not "
            "saved; lower the learning rate or lengthen the warm-up"
        )


def whole_weights(strategy: Strategy, *, keep: bool) -> dict[str, torch.Tensor]:
    """Every weight in fp32 on the CPU where ``keep``, nothing elsewhere; collective."""
    weights = {}
    for name, parameter in strategy.iter_state():
        if keep:
            weights[name] = parameter.weight.to("cpu", copy=True).contiguous()
    return weights


def _copy_tokenizer(config: RunConfig, folder: Path) -> None:
    """Take the tokenizer along where data preparation left one; training itself needs none."""
    source, _ = data_tokenizer(config.train)
    if source is None:
        return
    copy = folder / store.TOKENIZER
    shutil.copytree(source, copy, copy_function=shutil.copyfile)
    for place in (copy, *(path for path in copy.rglob("*") if path.is_dir())):
        place.chmod(0o755)  # of a read-only folder the copy could never be removed
