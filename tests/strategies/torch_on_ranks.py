"""Train with DDP or FSDP on CPU ranks, and with the baseline, in several ways; rank 0 prints the facts as JSON.

Run under torchrun with ``ddp`` or ``fsdp`` and flags of ``src/gpt2.py``. The command line refuses fp16 on a CPU, where
it is slow; here the configuration is changed after the check, and all arithmetic is real. The baseline takes the same
micro batches one after the other that the ranks take in parallel. So in every precision only the order of fp32 sums can
differ.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from training_runs import resolved

from dsgpt.config.recipe_blocks import ActivationCheckpointing, DdpRecipe, Fp16, FsdpRecipe, TorchStrategies
from dsgpt.config.run_config import RunConfig
from dsgpt.machine.device import gather_objects, joined
from dsgpt.machine.launcher import exit_rank
from dsgpt.machine.topology import Topology, read_topology
from dsgpt.strategies.base import build_strategy
from dsgpt.strategies.pytorch import Baseline, TorchStrategy
from dsgpt.telemetry.cost import Communication
from dsgpt.training.run import dropout_seed
from dsgpt.training.trainer import training_batches, validation_batches

CPU = torch.device("cpu")
PRECISIONS = ("fp32", "bf16", "fp16")
STEPS = 5
SMALL_BUCKETS = DdpRecipe(bucket_cap_mb=0.01)
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "ddp": {
        "usual": {},
        "checkpointing": {"activation_checkpointing": ActivationCheckpointing()},
        "small buckets": {"dsgpt": TorchStrategies(ddp=SMALL_BUCKETS)},
        "own gradients": {"dsgpt": TorchStrategies(ddp=DdpRecipe(gradient_as_bucket_view=False))},
    },
    "fsdp": {
        "usual": {},
        "checkpointing": {"activation_checkpointing": ActivationCheckpointing()},
        "no reshard": {"dsgpt": TorchStrategies(fsdp=FsdpRecipe(reshard_after_forward=False))},
        "offload": {"dsgpt": TorchStrategies(fsdp=FsdpRecipe(cpu_offload=True))},
        "low reduce": {"dsgpt": TorchStrategies(fsdp=FsdpRecipe(reduce_dtype="low"))},
    },
}


def configured(run_type: str, flags: list[str], topology: Topology, *, precision: str = "fp32", **recipe) -> RunConfig:
    config = resolved(["--run_type", run_type, *flags], topology)
    return replace(config, precision=precision, recipe=replace(config.recipe, **recipe))


def trained(config: RunConfig, strategy: TorchStrategy) -> dict[str, Any]:
    """Every step's loss, norm and whether it was skipped; the first step's Adam moments; the second step's traffic."""
    batches = training_batches(config, first_step=0)
    steps, own_losses, moments, traffic = [], [], {}, {}
    for step in range(1, STEPS + 1):
        with Communication() as communication:
            result = strategy.train_step(batches, step)
        steps.append((float(result.loss), float(result.grad_norm), bool(result.skipped)))
        own_losses.append(float(result.own_loss))
        if step == 1:
            moments = {name: state.exp_avg.clone() for name, state in strategy.iter_state() if not steps[0][2]}
        if step == 2:
            traffic = {entry.operation: (entry.calls, entry.payload_bytes) for entry in communication.traffic}
    return {"steps": steps, "own_losses": own_losses, "moments": moments, "traffic": traffic}


def against_the_baseline(run_type: str, flags: list[str], topology: Topology, precision: str) -> dict[str, Any]:
    alone = configured("baseline", flags, read_topology({}), precision=precision)
    config = configured(run_type, flags, topology, precision=precision)
    reference, strategy = Baseline(alone, CPU), build_strategy(config, CPU)
    initial = {name: state.weight.clone() for name, state in reference.iter_state()}
    same_start = all(torch.equal(state.weight, initial[name]) for name, state in strategy.iter_state())
    expected, actual = trained(alone, reference), trained(config, strategy)
    return {
        "same_start": same_start,
        "expected": expected["steps"],
        "actual": actual["steps"],
        "own_losses": gather_objects(actual["own_losses"]),
        "gradient": farthest(expected["moments"], actual["moments"]),
        "validation": (validated(alone, reference), validated(config, strategy)),
        "equal_weights": same_on_every_rank(strategy),
        "tied": strategy.model.lm_head.weight is strategy.model.wte.weight,
        "left_whole": sorted(
            name for name, value in strategy.model.named_parameters() if not isinstance(value, DTensor)
        ),
        "held": gather_objects(sum(p.numel() for p in strategy._weights.parameters.values())),
        "parameters": {name: list(value.shape) for name, value in initial.items()},
        "traffic": actual["traffic"],
    }


def farthest(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> float:
    """The largest relative L2 distance of a parameter's first moment: after one step, a share of its gradient."""
    assert expected.keys() == actual.keys()
    return max(float((actual[name] - value).norm() / value.norm()) for name, value in expected.items())


def validated(config: RunConfig, strategy: TorchStrategy) -> list[float]:
    return [float(value) for value in strategy.eval_step(validation_batches(config))]


def same_on_every_rank(strategy: TorchStrategy) -> bool:
    """Whether all ranks hold the same bits of the weights that they hold whole."""
    held = gather_objects({name: value.float().numpy() for name, value in strategy.replicated_weights()})
    return all((held[0][name] == other[name]).all() for other in held for name in held[0])


def in_other_ways(run_type: str, flags: list[str], topology: Topology) -> dict[str, Any]:
    facts = {}
    for way, recipe in WAYS[run_type].items():
        config = configured(run_type, flags, topology, precision="bf16", **recipe)
        facts[way] = trained(config, build_strategy(config, CPU)) | {"moments": None}
    config = configured(run_type, flags, topology, dsgpt=TorchStrategies(ddp=SMALL_BUCKETS))
    compiled = replace(config, options=replace(config.options, compile=True))
    facts["compiled"] = trained(compiled, build_strategy(compiled, CPU)) | {"moments": None}
    return facts


def overflowing(run_type: str, flags: list[str], topology: Topology) -> list[tuple[list[bool], float]]:
    """For every rank: which fp16 steps it skipped, and its loss scale after them."""
    scaling = Fp16(initial_scale_power=22, hysteresis=1)
    config = configured(run_type, flags, topology, precision="fp16", fp16=scaling)
    strategy = build_strategy(config, CPU)
    steps = trained(config, strategy)["steps"]
    return gather_objects(([skipped for _, _, skipped in steps], strategy._scale.factor))


def dropped_out(run_type: str, flags: list[str], topology: Topology) -> list[tuple[float, float]]:
    """For every rank: its training loss on the same batch, twice from the start of its random stream."""
    config = configured(run_type, [*flags, "--dropout", "0.5"], topology)
    batch = next(training_batches(configured("baseline", flags, read_topology({})), first_step=0))
    strategy = build_strategy(config, CPU)
    strategy.model.train()
    losses = []
    for _ in range(2):
        torch.manual_seed(dropout_seed(config))
        losses.append(float(strategy._training_loss(batch)))
    return gather_objects(tuple(losses))


def main() -> None:
    torch.set_num_threads(1)
    run_type, *flags = sys.argv[1:]
    topology = read_topology()
    given = run_type, flags, topology
    with joined(topology, CPU):
        facts = {
            "baseline": {precision: against_the_baseline(*given, precision) for precision in PRECISIONS},
            "ways": in_other_ways(*given),
            "overflowing": overflowing(*given),
            "dropout": dropped_out(*given),
        }
    if topology.is_main:
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
    exit_rank(0)
