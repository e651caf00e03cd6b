"""Whole trainings with ``--device cuda`` on the stand-in GPU: their losses, records, copies and waits.

``waits.json`` lists how often the host waits for the device in the six steps of each cell, by operation and place. A
changed line is a change of what a GPU does: look at it, then write the file anew with ``REWRITE_WAITS=1``.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_script
from small_run import REPOSITORY, SEQUENCE, command_line, write_inputs
from training_runs import SCRIPT, finished, read_lines, read_record, roll_back, weights_of

from dsgpt.benchmarks import stand_in_gpu

WAITS = Path(__file__).with_name("waits.json")
STEPS, SAVES, GLOBAL_BATCH = 6, 2, 8
FLAGS = {"max_train_steps": STEPS, "save_every": 3, "eval_every": 3, "steps_per_print": 2}
ONE_RANK = ["baseline", "ddp", "fsdp", *(f"zero{stage}" for stage in range(4)), "zero2_offload", "zero3_offload"]
TWO_RANKS = [*ONE_RANK[1:], "tensor", "sequence", "pipeline"]
CELLS = [
    "baseline fp32 1",
    *(f"{strategy} {precision} 1" for strategy in ONE_RANK for precision in ("bf16", "fp16")),
    *(f"{strategy} fp32 2" for strategy in TWO_RANKS),
    *(f"{strategy} bf16 2" for strategy in ("ddp", "fsdp", "tensor", "sequence", "pipeline")),
]
CORE = {"baseline fp16 1", "zero1 bf16 1", "fsdp fp32 2", "pipeline fp32 2"}
"""Cells of every run of the tests; the others are long."""
SCALAR_BYTES = 64
"""DeepSpeed copies numbers of a step, such as norms, one by one."""


@dataclass
class Trained:
    """A finished training on the stand-in, with the ledger of rank 0."""

    folder: Path
    ledger: dict[str, Any]

    def in_steps(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.ledger[kind] if one["section"] == "step"]


def train(folder: Path, strategy: str, ranks: int, *, device: str, **flags: Any) -> Trained:
    """Train in forked ranks, on stand-in GPUs if ``device`` is ``cuda``."""
    deepspeed = strategy not in {"baseline", "ddp", "fsdp"}
    recipe = json.loads((REPOSITORY / "ds_configs" / f"{strategy if deepspeed else 'zero1'}.json").read_text())
    recipe |= {"train_batch_size": GLOBAL_BATCH}
    inputs = folder / "inputs"
    if not inputs.exists():
        write_inputs(inputs)
    (inputs / "recipe.json").write_text(json.dumps(recipe))
    out, ledger = flags.pop("out", folder / device), folder / f"{device}.json"
    changes = {"run_type": "optimized" if deepspeed else strategy, "device": device, "checkpoint_path": out}
    words = [SCRIPT, *command_line(inputs, **FLAGS | changes | flags)]
    if device == "cuda":
        words = [stand_in_gpu.__file__, "--gpus", str(ranks), *words]
    environment = {name: os.environ.get(name, "") for name in ("PATH", "PYTHONPATH")}
    environment |= {stand_in_gpu.LEDGER: str(ledger), "OMP_NUM_THREADS": "1"}
    launched = None if ranks == 1 and strategy == "baseline" else ranks
    finished(run_script(words[0], words[1:], ranks=launched, cwd=folder, environment=environment))
    own = ledger.with_stem(f"{ledger.stem}-0")
    return Trained(out, json.loads(own.read_text()) if device == "cuda" else {})


def figures(run: Trained) -> list[tuple[Any, ...]]:
    """Loss, gradient norm and validation loss of every step."""
    keys = ("step", "loss", "grad_norm", "lr", "val_loss")
    return [
        tuple(line.get(key) for key in keys) for key in ("loss", "val_loss") for line in read_lines(run.folder, key)
    ]


@pytest.fixture(
    scope="module", params=[pytest.param(cell, marks=[] if cell in CORE else pytest.mark.long) for cell in CELLS]
)
def cell(request, tmp_path_factory) -> tuple[str, Trained]:
    """A cell and its training on the stand-in."""
    strategy, precision, ranks = request.param.split()
    folder = tmp_path_factory.mktemp("cell")
    return request.param, train(folder, strategy, int(ranks), device="cuda", precision=precision)


def test_losses_are_those_of_the_cpu(cell):
    """To the last bit; the CPU does not train in fp16, whose losses are within 1e-3 of fp32."""
    name, run = cell
    strategy, precision, ranks = name.split()
    same = "fp32" if precision == "fp16" else precision
    expected = figures(train(run.folder.parent, strategy, int(ranks), device="cpu", precision=same))
    if precision == "fp16":
        losses = [line[1] or line[4] for line in figures(run)]
        assert losses == pytest.approx([line[1] or line[4] for line in expected], abs=1e-3)
    else:
        assert figures(run) == expected


def test_the_host_waits_only_where_it_is_known_to(cell):
    name, run = cell
    waits = {f"{one['what']} in {one['place']}": one["times"] for one in run.in_steps("waits")}
    known = json.loads(WAITS.read_text()) if WAITS.exists() else {}
    if os.environ.get("REWRITE_WAITS"):
        WAITS.write_text(json.dumps(dict(sorted((known | {name: waits}).items())), indent=1, sort_keys=True) + "\n")
        known = json.loads(WAITS.read_text())
    assert waits == known[name]


def test_batches_are_pinned_and_copied_beside_the_computation(cell):
    """And besides batches, scalars and offload, nothing is copied in a step."""
    name, run = cell
    ranks = int(name.split()[2])
    model_ranks = ranks if name.split()[0] in {"tensor", "sequence", "pipeline"} else 1
    copies = [one for one in run.in_steps("copies") if one["bytes"] > SCALAR_BYTES * one["times"]]
    batches = [one for one in copies if "data/loader.py" in one["place"] and one["target"] == "cuda"]
    assert {(one["source"], one["target"], one["pinned"], one["asynchronous"]) for one in batches} == {
        ("cpu", "cuda", True, True)
    }
    read = STEPS * GLOBAL_BATCH * SEQUENCE * 2 * 8 * model_ranks // ranks
    assert sum(one["bytes"] for one in batches) == read
    others = [one for one in copies if one not in batches]
    expected = "deepspeed/" if "offload" in name or name.startswith(("zero3", "tensor")) else "nothing"
    assert [one for one in others if expected not in one["place"]] == []


def test_the_record_agrees_with_the_ledger(cell):
    _, run = cell
    record, lines = read_record(run.folder), read_lines(run.folder)
    summary, hardware = record["summary"], record["hardware"]
    assert (hardware["device"], hardware["gpu_name"]) == ("cuda", stand_in_gpu.NAME)
    assert hardware["gpu_memory_bytes"] == stand_in_gpu.MEMORY
    steps = [line["step_time_sec"] for line in lines]
    assert 0 < sum(steps) <= summary["train_time_sec"] <= summary["total_wall_time_sec"]
    allocated, reserved = (summary[f"max_cuda_mem_{kind}_bytes_rank0"] for kind in ("allocated", "reserved"))
    in_training = {"step", "data", "forward", "backward", "optimizer", "validation"}
    most = max(size for phase, size in run.ledger["peaks"].items() if phase in in_training)
    assert most <= allocated <= reserved <= allocated + 2 * stand_in_gpu.BLOCK
    assert allocated <= 1.02 * most
    assert run.ledger["resets"] >= 1 + SAVES


@pytest.mark.parametrize("strategy", ["baseline", "zero1", "fsdp"])
def test_a_resumed_run_continues_to_the_last_bit(tmp_path, strategy):
    """With dropout: the random state of the device is saved, and set again, also before activations are recomputed."""
    flags = {"device": "cuda", "dropout": 0.2, "activation_checkpointing": True}
    run = train(tmp_path, strategy, 1, **flags)
    again = train(tmp_path, strategy, 1, **flags, resume=True, out=roll_back(run.folder, tmp_path / "copy", 3))
    assert figures(again) == figures(run)
    last = f"step-{STEPS:08d}"
    one, other = weights_of(run.folder / last), weights_of(again.folder / last)
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "ranks"), [("baseline", 1), ("fsdp", 2), ("zero1", 2), ("zero3", 2)])
@pytest.mark.parametrize(("first", "then"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_run_resumes_on_the_other_device(tmp_path, first, then, strategy, ranks):
    run = train(tmp_path, strategy, ranks, device=first, precision="fp32")
    copy = roll_back(run.folder, tmp_path / "copy", 3)
    moved = train(tmp_path, strategy, ranks, device=then, precision="fp32", resume=True, out=copy)
    assert figures(moved) == figures(run)
