"""Train in fp16 on CPU ranks: the baseline, then DeepSpeed at every stage, in one process group; rank 0 prints JSON.

Run under torchrun with the flags of ``src/gpt2.py`` and, last, the number of steps. The command line and DeepSpeed both
refuse fp16 on a CPU, where it is slow. This script stands in for the GPU that says yes; all arithmetic is the real one.
"""

import json
import sys
from dataclasses import replace

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from dsgpt.config.options import parse_arguments
from dsgpt.config.recipe_blocks import ZeroRecipe
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.machine.launcher import exit_rank
from dsgpt.machine.process_group import joined
from dsgpt.machine.topology import Topology, read_topology
from dsgpt.strategies.deepspeed.zero import Zero
from dsgpt.strategies.pytorch import Baseline
from dsgpt.training.trainer import training_batches

CPU = torch.device("cpu")


def configured(flags: list[str], topology: Topology, *, stage: int) -> RunConfig:
    options, problems = parse_arguments(flags)
    config = resolve(options, topology=topology, problems=problems)
    raw = {**config.recipe.raw, "zero_optimization": {"stage": stage}}
    return replace(
        config, precision="fp16", recipe=replace(config.recipe, raw=raw, zero_optimization=ZeroRecipe(stage=stage))
    )


def trained(config: RunConfig, strategy: Baseline | Zero, steps: int) -> list[tuple[float, float, bool]]:
    batches = training_batches(config, first_step=0)
    results = [strategy.train_step(batches, step) for step in range(1, steps + 1)]
    return [(float(result.loss), float(result.grad_norm), bool(result.skipped)) for result in results]


def main() -> None:
    torch.set_num_threads(1)
    CPU_Accelerator.is_fp16_supported = lambda _: True
    CPU_Accelerator.supported_dtypes = lambda _: [torch.float, torch.half, torch.bfloat16]
    flags, steps, topology = sys.argv[1:-1], int(sys.argv[-1]), read_topology()
    alone = configured(["--run_type", "baseline", *flags], read_topology({}), stage=0)
    runs = {"baseline": trained(alone, Baseline(alone, CPU), steps)}
    with joined(topology, CPU):
        for stage in range(4):
            config = configured(["--run_type", "optimized", *flags], topology, stage=stage)
            runs[f"zero{stage}"] = trained(config, Zero(config, CPU), steps)
    if topology.is_main:
        print(json.dumps(runs))


if __name__ == "__main__":
    main()
    exit_rank(0)
