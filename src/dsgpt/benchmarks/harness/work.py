"""Makes the recipe file and the flags of ``src/gpt2.py`` for a cell."""

import copy
import json
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.harness.cells import Cell
from dsgpt.benchmarks.harness.corpus import Corpus
from dsgpt.benchmarks.harness.tested import STRATEGIES, TRAININGS
from dsgpt.common.files import write_json_atomic

STEPS = 20
GLOBAL_BATCH = 12
"""Divisible by 1, 2 and 4 data ranks times 1 and 3 micro batches."""
SEQUENCE = 32
VALIDATION_WINDOWS = 17
"""The second global batch of a validation is padded: of two data ranks the second has no target in it, of four the last
two. Ranks and micro batches then have unequal weights."""
CLIPPING = {"adamw": 1.0, "sgd": 0.3}
OPTIMIZERS = {
    "adamw": {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "sgd": {"type": "SGD", "params": {"lr": 1.0}},
}
SCHEDULER = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "cos_min_ratio": 0.1}}
WIDTHS = {"cpu": 34, "cuda": 128}
"""34 is not divisible by 4 ranks: shards are uneven or padded. The fused attention of GPUs needs heads of 64."""
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 8}
"""Dynamic, and so low that this model never overflows: after a skipped step, different steps would be compared."""

SMALL_BUCKETS = {
    "reduce_bucket_size": 5_000,
    "allgather_bucket_size": 5_000,
}
SMALL_BUCKETS_3 = {
    "reduce_bucket_size": 5_000,
    "stage3_prefetch_bucket_size": 5_000,
    "stage3_param_persistence_threshold": 200,
    "stage3_max_live_parameters": 20_000,
    "stage3_max_reuse_distance": 20_000,
    "sub_group_size": 20_000,
}
"""In parameters. At the usual sizes this model would fit into one bucket, and ZeRO-3 would shard nothing."""


def shape(device: str) -> dict[str, int]:
    """The model's shape on ``device``, ``cpu`` or ``cuda``, as flags of ``src/gpt2.py``."""
    return {
        "num_layers": 2,
        "num_heads": 2,
        "embedding_size": WIDTHS[device],
        "max_position_embeddings": SEQUENCE,
        "seq_length": SEQUENCE,
    }


def write_recipe(path: Path, cell: Cell, *, recipes: Path, training: str | None = None) -> Path:
    """Write the shipped recipe of the cell's strategy, as the cell changes it, to ``path``.

    Args:
        path: the new file.
        cell: which strategy and settings.
        recipes: the folder of the shipped ones.
        training: a key of ``TRAININGS``; by default that of the cell's strategy.
    """
    strategy = STRATEGIES[cell.strategy]
    recipe = json.loads((recipes / strategy.recipe).read_text(encoding="utf-8"))
    torch_adam = recipe["optimizer"]["params"].get("torch_adam")
    recipe["optimizer"] = copy.deepcopy(OPTIMIZERS[cell.optimizer])
    if torch_adam is not None and cell.optimizer == "adamw":
        recipe["optimizer"]["params"]["torch_adam"] = torch_adam
    recipe |= {
        "train_batch_size": GLOBAL_BATCH,
        "scheduler": SCHEDULER,
        "gradient_clipping": CLIPPING[cell.optimizer],
    }
    if cell.precision == "fp16":
        recipe["fp16"] = FP16
    if cell.option != "compile":  # PyTorch compiles DDP with buckets of at least 1 MiB
        recipe = merged(recipe, {"dsgpt": {"ddp": {"bucket_cap_mb": 0.02}}})
    recipe = merged(recipe, TRAININGS[strategy.training if training is None else training])
    recipe = merged(recipe, strategy.changes)
    stage = recipe.get("zero_optimization", {}).get("stage", 0)
    if stage:
        recipe = merged(recipe, {"zero_optimization": SMALL_BUCKETS_3 if stage == 3 else SMALL_BUCKETS})
    write_json_atomic(path, recipe)
    return path


def merged(recipe: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``recipe`` with ``changes`` laid over it, object by object; None removes a key."""
    result = dict(recipe)
    for key, value in changes.items():
        below = result.get(key)
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def flags(cell: Cell, *, recipe: Path, corpus: Corpus, run_dir: Path, device: str, steps: int = STEPS) -> list[str]:
    """The flags of ``src/gpt2.py`` that train this cell for ``steps`` optimizer steps."""
    values = {
        "run_type": STRATEGIES[cell.strategy].run_type,
        "train_data_path": corpus.train,
        "val_data_path": corpus.val,
        "checkpoint_path": run_dir,
        "deepspeed_config": recipe,
        **shape(device),
        "dropout": 0,
        "max_train_steps": steps,
        "grad_accum_steps": cell.accumulation,
        "precision": cell.precision,
        "device": device,
    }
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    if cell.option:
        words.append(f"--{cell.option.replace(' ', '_')}")
    return words
