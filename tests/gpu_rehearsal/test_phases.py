"""Bytes of a GPU by phase, on the stand-in, against the moments of the planner: at 1, 2, 8 and 64 ranks."""

import json
from pathlib import Path

import pytest
from forked_ranks import run_script
from small_run import REPOSITORY, command_line, random_ids, write_tokens
from training_runs import finished

RANK = Path(__file__).with_name("memory_rank.py")
MICRO_BATCH, LENGTH, VOCABULARY, STEPS = 6, 64, 1000, 4
CELLS = [
    *("baseline fp32 1", "baseline bf16 1", "baseline fp16 1"),
    *("fsdp fp32 2", "fsdp bf16 64", "fsdp-sharded fp32 2", "fsdp-sharded bf16 8"),
    *("zero0 bf16 8", "zero1 fp32 8", "zero1 bf16 64", "zero2 bf16 8", "zero2 fp16 64"),
    *("zero2_offload bf16 8", "zero3 fp32 8", "zero3 bf16 64", "zero3_offload bf16 8", "sequence bf16 8"),
    "pipeline bf16 8",
]
CORE = {"baseline bf16 1", "fsdp bf16 64", "zero1 bf16 64", "zero2 bf16 8", "zero3 bf16 64", "pipeline bf16 8"}
"""Cells of every run of the tests; the others are long."""


@pytest.mark.parametrize("cell", [pytest.param(cell, marks=[] if cell in CORE else pytest.mark.long) for cell in CELLS])
def test_every_phase_needs_what_the_planner_says(tmp_path, cell):
    """Within 2%. Without one activation of each block it would be more than 2% under.

    ZeRO-3's start is predicted higher, by a whole embedding in fp32. Between the steps of a pipeline DeepSpeed keeps
    buffers that the planner counts in its steps only. Neither is ever the peak.
    """
    strategy, precision, ranks = cell.split()
    strategy, _, sums = strategy.partition("-")
    micro_batches = 2 if sums else 1
    run_type = strategy if strategy in {"baseline", "fsdp"} else "optimized"
    recipe = json.loads(
        (REPOSITORY / "ds_configs" / f"{strategy if run_type == 'optimized' else 'zero1'}.json").read_text()
    )
    batch = MICRO_BATCH * int(ranks) * micro_batches
    recipe |= {"train_batch_size": batch, "gradient_accumulation_steps": micro_batches}
    recipe |= {"dsgpt": {"fsdp": {"accumulation": sums}}} if sums else {}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    count = batch * LENGTH * STEPS + 1
    for name in ("train", "val"):
        write_tokens(tmp_path / f"{name}.bin", random_ids(count), vocab_size=VOCABULARY)
    words = command_line(
        tmp_path,
        **{"run_type": run_type, "precision": precision, "device": "cuda", "max_train_steps": STEPS},
        **{"num_layers": 4, "num_heads": 4, "embedding_size": 64, "vocab_size": VOCABULARY},
        **{"max_position_embeddings": LENGTH, "seq_length": LENGTH},
    )
    finished(run_script(RANK, [ranks, *words, tmp_path / "out.json"], cwd=tmp_path))
    phases = json.loads((tmp_path / "out.json").read_text())
    if not strategy.startswith("zero2"):  # others reduce or convert gradients in the range of another phase
        phases.pop("optimizer")
    if precision == "fp16":  # the gradient of the logits waits for the scale of the loss, in the backward pass
        phases["step"] = [max(values) for values in zip(phases.pop("forward"), phases.pop("rest"), strict=True)]
    ratios = {name: predicted / measured for name, (measured, predicted) in phases.items() if predicted}
    if strategy.startswith("zero3"):
        assert ratios.pop("start") > 0.98
    if strategy == "pipeline":
        for name in ("evaluation", "save"):
            del ratios[name]
            assert max(phases[name]) < min(phases["rest"])
    assert ratios == {name: pytest.approx(1, abs=0.02) for name in ratios}
