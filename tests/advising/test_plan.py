"""One setup planned, and mistakes in what is asked for."""

import json

import pytest
from small_run import REPOSITORY

from dsgpt.charts.plan import held_in_words
from dsgpt.common.errors import Problems
from dsgpt.planner.options import read_plan_options
from dsgpt.planner.request import fixed_batch, read_request

THREE_D = f"--deepspeed_config {REPOSITORY}/ds_configs/3d.json"
XL = "--model_size xl --gpu a100-80gb --gpus 8 --tokens 10e9"
FSDP = "--strategy fsdp --activation_checkpointing"
ZERO2 = f"--deepspeed_config {REPOSITORY}/ds_configs/zero2.json"


def test_a_plan_for_people(plan, snapshot):
    assert plan(f"{XL} {ZERO2} --eval_every 1000 --val_tokens 1e7") == snapshot


def test_json_says_the_same(plan):
    found = json.loads(plan(f"{XL} {ZERO2} --json"))
    assert found["strategy"] == "zero2"
    assert found["micro_batch_size"] * found["gradient_accumulation_steps"] * found["data_parallel_size"] == 32
    assert sum(found["step"]["parts"].values()) == pytest.approx(found["step"]["seconds"])
    assert sum(found["memory"]["parts"].values()) == found["memory"]["bytes"]
    assert found["step"]["assumed"]
    cost = found["costs"][0]
    assert cost["usd"] == pytest.approx(cost["usd_per_hour"] * found["training"]["seconds"] / 3600)


def test_what_a_plan_takes_from_the_flags(plan):
    def planned(more: str) -> dict:
        return json.loads(plan(f"{XL} {ZERO2} --json {more}"))

    assert planned("--price_per_gpu_hour 2")["costs"][0]["usd_per_hour"] == 16
    accumulated = planned("--micro_batch_size_per_gpu 1 --activation_checkpointing")
    assert (accumulated["micro_batch_size"], accumulated["gradient_accumulation_steps"]) == (1, 4)
    assert "recomputation" in accumulated["step"]["parts"]
    assert planned("--run_type fsdp")["strategy"] == "fsdp"
    assert planned("--precision fp32")["step"]["seconds"] > 3 * planned("")["step"]["seconds"]
    slow = planned("--gpus_per_machine 4 --network_gbps 10")
    assert slow["step"]["parts"]["communication"] > 10 * planned("")["step"]["parts"]["communication"]
    on_spot = json.loads(plan(f"--model_size small --gpu a100-40gb --tokens 1e9 --spot --json {ZERO2}"))
    assert "Google" in on_spot["costs"][0]["offer"]
    assert all(cost["offer"].endswith(", spot") for cost in on_spot["costs"])
    assert "no spot price of a100-80gb is known" in plan(f"{XL} {ZERO2} --spot")


def test_a_setup_that_does_not_fit_says_what_would(plan):
    t4 = "--model_size large --gpu t4 --tokens 1e9"
    out = plan(f"{t4} --gpus 4 {ZERO2} --micro_batch_size_per_gpu 8", code=1)
    assert "it fits with --" in out
    assert out.splitlines()[-1].startswith("DOES NOT FIT: 21.")
    assert not [word for word in ("step:", "MFU", "$") if word in out]
    assert "take --recommend" in plan(f"{t4} --gpus 1 {ZERO2} --run_type baseline", code=1)


def test_headroom_decides_what_fits_and_is_printed(plan):
    """16 GB less 20% and 0.6 GB are 12.2 GB."""
    line = f"--model_size xl --gpu t4 --gpus 2 --global_batch_size 8 --micro_batch_size_per_gpu 4 --tokens 1B {FSDP}"
    memory = json.loads(plan(f"{line} --json"))["memory"]
    assert memory["usable_bytes"] == 0.92 * 16e9 - 0.6e9 > memory["bytes"]
    assert (memory["headroom_percent"], memory["fixed_bytes"]) == (8.0, 600_000_000)
    assert "12.2 GB is 16.0 GB less 20% headroom (--headroom) and 0.6 GB of" in plan(f"{line} --headroom 20", code=1)
    full = json.loads(plan(f"{line} --headroom 20 --json", code=1))
    assert (full["memory"]["fits"], full["step"], full["training"], full["costs"]) == (False, None, None, [])


def test_a_strategy_is_trained_with_the_recipe_of_the_size(plan):
    """The command without a recipe, that of the dashboard's page, and the search plan the same training."""
    line = "--model_size small --gpu A100-80GB --gpus 8 --tokens 10B --json"
    by_name, by_size = (json.loads(plan(f"{line} {more}")) for more in ("--strategy fsdp", "--run_type fsdp"))
    assert by_name == by_size
    assert by_name["training"]["steps"] == 19_073
    found = json.loads(plan(f"{line} --recommend --micro_batch_size_per_gpu {by_name['micro_batch_size']}"))
    (same,) = [each["plan"] for each in found["ranked"] if each["name"] == "fsdp"]
    assert same == {key: value for key, value in by_name.items() if key != "assumptions"}


def test_an_instance_is_its_gpus_network_and_price(plan):
    line = "--model_size small --strategy zero1 --tokens 1e9 --gpus 16 --json"
    found = json.loads(plan(f"{line} --instance P5.48xlarge"))
    same = json.loads(plan(f"{line} --gpu h100 --network_gbps 3200"))
    assert found["step"] == same["step"]
    assert [cost["offer"] for cost in found["costs"]] == ["AWS p5.48xlarge"]
    assert found["costs"][0] in same["costs"]
    assert "p5.48xlarge, 2024-12-01: https://" in found["assumptions"][0]["value"]
    slower = json.loads(plan(f"{line} --instance p5.48xlarge --network_gbps 25"))
    assert slower["step"]["seconds"] > 2 * found["step"]["seconds"]


def test_what_to_know_first_is_noted(plan):
    found = json.loads(plan("--gpu H100 --tokens 50M --json"))
    assert found["notes"] == [
        "--gpu H100 is taken as h100-80gb",
        "the training ends at step 95, and the recipe warms up for 715 steps: lower scheduler.params.warmup_num_steps, "
        "or train on more tokens",
        "list prices of 2024-06-01 are over a year old: check their source, or give --price_per_gpu_hour",
    ]
    assert json.loads(plan("--gpu h100-80gb --tokens 10b --price_per_gpu_hour 2 --json"))["notes"] == []


def test_offload_needs_the_memory_of_the_host(plan):
    """12 bytes a parameter at least, of each GPU's share."""
    line = (
        f"--model_size xl --gpu t4 --tokens 1e9 --micro_batch_size_per_gpu 1 "
        f"--deepspeed_config {REPOSITORY}/ds_configs/zero3_offload.json"
    )
    little, much = (
        json.loads(plan(f"{line} --json --host_memory_gb {size}", code=code))["memory"]
        for size, code in ((20, 1), (90, 0))
    )
    assert 12 * 1.56e9 < little["host_bytes"] == much["host_bytes"] < 72e9
    assert not little["fits"]
    assert much["fits"]


REFUSED = {
    "several mistakes": "--model_size huge --gpu a100 --gpus 0 --tokens none --num_heads 0 --deadline 3 --micro 2",
    "nothing": "",
    "no GPU of that name": "--gpu h10 --tokens 1e9",
    "an instance that is none": "--instance p4d.24xlrge --strategy zero9 --headroom 100 --tokens 1Q",
    "an instance and a GPU": "--instance p4d.24xlarge --gpu t4 --strategy ddp --recommend --tokens 1e9",
    "two machines": "--gpu t4 --machine calibration.json --tokens 1e9",
    "heads": f"{XL} --deepspeed_config {REPOSITORY}/ds_configs/tensor.json",
    "ranks": f"--gpu t4 --gpus 3 --tokens 1e9 --deepspeed_config {REPOSITORY}/ds_configs/3d.json",
    "global batch": f"--gpu t4 --gpus 3 --tokens 1e9 {ZERO2}",
    "no bf16": "--gpu t4 --tokens 1e9 --precision bf16",
    "Zero++": f"--gpu h200 --gpus 8 --tokens 1e9 --deepspeed_config {REPOSITORY}/ds_configs/zeropp.json",
    "limits without a search": f"{XL} --budget 3 --deadline 4d",
    "validation": f"{XL} --eval_every 100",
    "no whole machines": "--gpu h100-80gb --gpus 12 --tokens 1e9",
    "a network without speed": f"{XL} --network_gbps 0",
    "what a search chooses": f"{XL} --recommend --run_type ddp --activation_checkpointing",
    "machines of no GPU": "--gpus_per_machine 4 --network_gbps 10 --host_memory_gb 64 --tokens 1e9",
    "a budget without prices": "--gpu h200 --tokens 1e9 --spot --recommend --budget 9000",
    "a batch that training refuses": f"{XL} --recommend --global_batch_size 4_000_000_000",
    "a calibration in a file": "--calibrate --machine /dev/null/calibration.json",
    "a calibration that is a folder": "--calibrate --machine /dev",
    "a folder that cannot be": "--gpu h200 --tokens 1e9 --recommend --into /dev/null/plan",
    "a picture that cannot be": f"{XL} {ZERO2} --picture /dev/null/plan.svg",
    "more memory than a number can count": f"{XL} --host_memory_gb 1e300",
    "prices that are replaced": f"{XL} --price_per_gpu_hour 2 --spot --prices mine.json",
    "no recipe": f"{XL} --deepspeed_config none.json",
    "no prices": f"{XL} --prices none.json",
    "no calibration": "--machine none.json --tokens 1e9",
    "fits nowhere": "--model_size xl --num_layers 96 --gpu t4 --tokens 1e9 --recommend",
    "over budget": "--model_size medium --gpu t4 --gpus 4 --tokens 10e9 --recommend --budget 2 --deadline 1h",
    "picture of another kind": f"{XL} --picture plan.gif",
}


@pytest.mark.parametrize("what", REFUSED)
def test_mistakes(refused, what, snapshot):
    assert [line.replace(f"{REPOSITORY}/", "") for line in refused(REFUSED[what])] == snapshot


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_picture_has_the_same_bytes_twice(plan, tmp_path, ending):
    path = tmp_path / f"plan.{ending}"
    line = f"--model_size large --gpu a100-40gb --gpus 8 --tokens 1e9 {THREE_D}"
    plan(f"{line} --picture {path}")
    first = path.read_bytes()
    plan(f"{line} --picture {path}")
    assert path.read_bytes() == first
    assert first.startswith(b"<?xml" if ending == "svg" else b"\x89PNG")


def test_who_holds_what():
    """As ``Topology`` deals ranks: stages outermost, then data, then tensor."""
    words = f"--model_size large --gpu t4 --gpus 8 --tokens 1e9 {THREE_D}".split()
    request = read_request(*read_plan_options(words), repository=REPOSITORY)
    batch = fixed_batch(request, Problems())
    setup = request.setup(request.recipe, "optimized", batch, activation_checkpointing=False)
    assert held_in_words(setup, 0) == "embedding, blocks 0-17, matrices 1/2, data 1/2"
    assert held_in_words(setup, 3) == "embedding, blocks 0-17, matrices 2/2, data 2/2"
    assert held_in_words(setup, 6) == "embedding, blocks 18-35, matrices 1/2, data 2/2"
    whole = request.setup(request.recipe, "ddp", batch, activation_checkpointing=False)
    assert held_in_words(whole, 5) == "all layers, data 6/8"
