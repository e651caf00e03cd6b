"""Train by a pipeline on CPU ranks, beside the baseline, from every recipe in a folder; rank 0 writes what was seen.

Run under torchrun with the folder and the flags of ``src/gpt2.py``. A recipe named ``fp16...`` is trained in fp16,
which the product allows on GPUs alone; what it computes is the same on a CPU.
"""

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsgpt.checkpointing.training_state import StateReader, write_training_state
from dsgpt.cli import parse_arguments
from dsgpt.config import RunConfig, resolve
from dsgpt.model.gpt2 import Block, parameter_shapes
from dsgpt.model.initialization import initial_value
from dsgpt.process_group import barrier, gather_objects, joined
from dsgpt.strategies.base import ParamState, Strategy
from dsgpt.strategies.baseline import Baseline
from dsgpt.strategies.build import build_strategy
from dsgpt.strategies.deepspeed_setup import import_deepspeed
from dsgpt.topology import read_topology
from dsgpt.training.loop import training_batches, validation_batches
from dsgpt.training.run import _dropout_seed

CPU = torch.device("cpu")
STEPS, SAVED = 4, 2


def configured(run_type: str, recipe: Path, flags: list[str]) -> RunConfig:
    topology = read_topology() if run_type == "optimized" else read_topology({})
    options, problems = parse_arguments(["--run_type", run_type, "--deepspeed_config", str(recipe), *flags])
    config = resolve(options, topology=topology, problems=problems)
    return replace(config, precision="fp16") if recipe.stem.startswith("fp16") else config


def stepped(config: RunConfig, strategy: Strategy, steps: range) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    batches = training_batches(config, first_step=steps.start - 1)
    results = (strategy.train_step(batches, step) for step in steps)
    return [(float(result.loss), float(result.grad_norm)) for result in results]


def whole_state(strategy: Strategy) -> dict[str, ParamState]:
    copies = {}
    for name, state in strategy.iter_state():
        copies[name] = ParamState(*(None if value is None else value.clone() for value in state))
    return copies


def against_the_baseline(recipe: Path, flags: list[str]) -> list[dict[str, Any]]:
    """Every rank compares what it sees with the baseline in its own process."""
    alone, config = configured("baseline", recipe, flags), configured("optimized", recipe, flags)
    reference, blocks = Baseline(alone, CPU), _BuiltBlocks()
    with blocks:
        strategy = build_strategy(config, CPU)
    start = whole_state(strategy)
    expected, actual = stepped(alone, reference, range(1, 2)), stepped(config, strategy, range(1, 2))
    first = whole_state(strategy)
    gradients = [
        float((first[name].exp_avg - state.exp_avg).norm() / state.exp_avg.norm())
        for name, state in reference.iter_state()
        if state.exp_avg is not None
    ]
    expected += stepped(alone, reference, range(2, STEPS + 1))
    actual += stepped(config, strategy, range(2, STEPS + 1))
    facts = {
        "strategy": config.strategy_name,
        "blocks": blocks.layers,
        "held": {name: parameter.numel() for name, parameter in strategy._parameters.items()},
        "starts_equal": all(
            state.exp_avg is None
            and torch.equal(
                state.weight, initial_value(name, state.weight.shape, config=config.model, seed=config.options.seed)
            )
            for name, state in start.items()
        ),
        "names": list(start),
        "gradient": max(gradients),
        "expected": expected,
        "actual": actual,
        "validation": [
            [float(value) for value in one.eval_step(validation_batches(its))]
            for its, one in ((alone, reference), (config, strategy))
        ],
        "state": digests(strategy),
        "replicas": {name: digest(value) for name, value in strategy.replicated_weights()},
    }
    return gather_objects(facts)


def with_dropout(recipe: Path, flags: list[str], folder: Path) -> list[dict[str, Any]]:
    """Train, save on the way, and go on from there in a new strategy; and train again with recomputed activations."""
    config = configured("optimized", recipe, [*flags, "--dropout", "0.2"])
    checkpoint = folder / f"{recipe.stem}-step"
    checkpoint.mkdir(exist_ok=True)
    torch.manual_seed(_dropout_seed(config))
    strategy = build_strategy(config, CPU)
    before = stepped(config, strategy, range(1, SAVED + 1))
    shapes, writes = parameter_shapes(config.model), config.topology.is_main
    write_training_state(checkpoint, strategy.iter_state(), strategy.counters(), shapes=shapes, writes=writes)
    barrier()
    random = torch.get_rng_state()
    after = stepped(config, strategy, range(SAVED + 1, STEPS + 1))

    resumed = build_strategy(config, CPU)
    resumed.load_state(StateReader(checkpoint))
    torch.set_rng_state(random)
    again = stepped(config, resumed, range(SAVED + 1, STEPS + 1))

    recomputing = replace(config, recipe=replace(config.recipe, activation_checkpointing=True))
    torch.manual_seed(_dropout_seed(config))
    recomputed = stepped(recomputing, build_strategy(recomputing, CPU), range(1, STEPS + 1))
    facts = {
        "straight": before + after,
        "resumed": again,
        "recomputed": recomputed,
        "end": digests(strategy),
        "resumed_end": digests(resumed),
        "replicas": {name: digest(value) for name, value in strategy.replicated_weights()},
    }
    return gather_objects(facts)


class _BuiltBlocks:
    """Notes the blocks for which memory is taken while the context lasts."""

    def __enter__(self) -> None:
        self.layers: list[int] = []
        self._build = Block.__init__

        def build(block: Block, config: Any, layer: int) -> None:
            self._build(block, config, layer)
            if block.ln_1.weight.device.type != "meta":
                self.layers.append(layer)

        Block.__init__ = build

    def __exit__(self, *_: object) -> None:
        Block.__init__ = self._build


def digest(value: torch.Tensor) -> str:
    return hashlib.blake2b(value.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def digests(strategy: Strategy) -> dict[str, list[str]]:
    return {
        name: [digest(value) for value in state if value is not None] for name, state in whole_state(strategy).items()
    }


def main() -> None:
    torch.set_num_threads(1)
    folder, flags = Path(sys.argv[1]), sys.argv[2:]
    with joined(read_topology(), CPU):
        import_deepspeed(CPU)
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True
        recipes = sorted(folder.glob("*.json"))
        barrier()
        facts = {recipe.stem: against_the_baseline(recipe, flags) for recipe in recipes}
        facts["dropout"] = with_dropout(folder / "usual.json", flags, folder)
    if read_topology().is_main:
        (folder / "facts").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
