"""What the planner answers for every cell of its suite; ``--snapshot-update`` remakes the golden."""

import json
import math
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_run import REPOSITORY
from syrupy.extensions.json import JSONSnapshotExtension

RECORD = Path(__file__).with_name("planner_record.json")
"""Of the record ``plan.json`` from before the code moved: the machine's calibration, what the cells train, and the
measured steps, to which the rates are fitted. A new record would have other times. Its tensor ranks computed the whole
head, so they are not fitted to."""
CELLS = json.loads(RECORD.read_text(encoding="utf-8"))["cells"]
STRATEGIES = (
    *("ddp", "fsdp", "zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme"),
    *("tensor", "sequence", "pipeline", "3d"),
)
"""Of ``--strategy``, those of several GPUs that have formulas."""


class Plans(JSONSnapshotExtension):
    """Equal, except for the rounding of logarithms and of the fit's linear algebra on another CPU."""

    def matches(self, *, serialized_data: Any, snapshot_data: Any) -> bool:
        found, golden = (dict(leaves(json.loads(data))) for data in (serialized_data, snapshot_data))
        return found.keys() == golden.keys() and all(
            math.isclose(value, golden[at], rel_tol=1e-12)
            if isinstance(value, float) and isinstance(golden[at], float)
            else value == golden[at]
            for at, value in found.items()
        )


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """``.step.seconds`` and what is there."""
    if isinstance(value, dict | list) and value:
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(below, f"{at}.{key}")
    else:
        yield at, value


@pytest.fixture
def plan(capsys, monkeypatch, tmp_path) -> Callable[..., Any]:
    """Calls ``src/plan.py`` in an empty folder; returns its answer."""
    main = runpy.run_path(str(REPOSITORY / "src" / "plan.py"))["main"]
    monkeypatch.chdir(tmp_path)

    def ask(*switches: str, **flags: object) -> Any:
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        monkeypatch.setattr(sys, "argv", ["plan.py", "--json", *switches, *words])
        assert main() == 0
        return json.loads(capsys.readouterr().out)

    return ask


def answer(plan: Callable[..., Any], cell: dict[str, Any]) -> Any:
    work, model = cell["work"], cell["work"]["model"]
    recipe = json.loads((REPOSITORY / "ds_configs" / work["recipe"]).read_text(encoding="utf-8"))
    for block, changes in work["changes"].items():
        recipe[block] |= changes
    recipe["train_batch_size"] = work["global_batch_size"]
    Path(work["recipe"]).write_text(json.dumps(recipe), encoding="utf-8")
    return plan(
        *["--activation_checkpointing"] * work["activation_checkpointing"],
        run_type=work["run_type"],
        deepspeed_config=work["recipe"],
        num_layers=model["n_layer"],
        num_heads=model["n_head"],
        embedding_size=model["n_embd"],
        vocab_size=model["vocab_size"],
        max_position_embeddings=work["seq_length"],
        precision=work["precision"],
        micro_batch_size_per_gpu=work["micro_batch_size"],
        grad_accum_steps=work["gradient_accumulation_steps"],
        gpus=cell["ranks"],
        tokens="1e6",
        machine=RECORD,
        measured=RECORD,
    )


def test_cells(plan, snapshot):
    plans = {cell["key"]: answer(plan, cell) for cell in CELLS}
    assert len(plans) == 34
    assert plans == snapshot(extension_class=Plans)


def test_strategies_on_gpus(plan, snapshot):
    given = {"model_size": "large", "gpu": "a100-80gb", "gpus": 16, "tokens": "1e9", "price_per_gpu_hour": 2}
    plans = {name: plan(**given, strategy=name) for name in STRATEGIES}
    assert plans == snapshot(extension_class=Plans)
