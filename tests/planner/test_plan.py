"""A plan: what it prints, how it compares with published and measured runs, and the search for the best."""

import json
import math
import random
import re
import shlex
import subprocess
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from planner_records import RECORD
from small_run import REPOSITORY, SEQUENCE, VOCABULARY
from training_runs import resolved

from dsgpt.common.errors import EXIT_USER_ERROR, Problems, UserError
from dsgpt.common.json_files import parse_as, read_as
from dsgpt.common.text import divisors
from dsgpt.config.compatibility import ALLOW_MASKS, check_split
from dsgpt.planner.hardware import gpus, read_prices
from dsgpt.planner.options import read_plan_options
from dsgpt.planner.plan import Plan, held_in_words, plan_of
from dsgpt.planner.published import PUBLISHED, Published, projections_page, published_page
from dsgpt.planner.rates import Calibration
from dsgpt.planner.request import PlanRequest, candidate_setups, fixed_setup, read_measured, read_request
from dsgpt.planner.search import Judged, recommendation_files, search
from dsgpt.planner.step_time import fit, predict_step

# One setup planned, and mistakes in what is asked for.


MASKED = (" --mask_documents 1_000_000", " --mask_documents 64")
THREE_D = f"--deepspeed_config {REPOSITORY}/ds_configs/3d.json"
XL = "--model_size xl --gpu a100-80gb --gpus 8 --tokens 10e9"
ZERO2 = f"--deepspeed_config {REPOSITORY}/ds_configs/zero2.json"


def test_a_plan_for_people(plan, snapshot):
    assert plan(f"{XL} {ZERO2} --eval_every 1000 --val_tokens 1e7") == snapshot


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


def test_interruptions_are_counted_and_the_best_interval_of_saves_is_planned(plan):
    calm, rough = (json.loads(plan(f"{XL} {ZERO2} --json{more}"))["training"] for more in ("", " --mtbf 8h"))
    lost = rough["parts"].pop("interruptions")
    assert lost > 0
    assert rough["seconds"] == pytest.approx(sum(rough["parts"].values()) + lost)
    assert rough["parts"]["steps"] == calm["parts"]["steps"]
    one = calm["parts"]["checkpoints"] / math.ceil(calm["steps"] / 500)
    assert rough["parts"]["checkpoints"] == pytest.approx(math.ceil(rough["steps"] / rough["save_every"]) * one)
    assert rough["restart_seconds"] == pytest.approx(60 + one)
    young = math.sqrt(2 * one * 8 * 3600) / (calm["parts"]["steps"] / calm["steps"])
    assert rough["save_every"] == pytest.approx(young, rel=0.1)
    assert rough["goodput"] == rough["parts"]["steps"] / rough["seconds"]
    two = json.loads(plan(f"{XL} {ZERO2} --json --gpus_per_machine 4"))["training"]
    assert two["parts"]["checkpoints"] == pytest.approx(calm["parts"]["checkpoints"] / 2)  # both write at once
    said = plan(f"{XL} {ZERO2} --mtbf 8h")
    assert f"--save_every {rough['save_every']}: " in said
    assert f"goodput {rough['goodput']:.0%}, " in said


def test_a_setup_that_does_not_fit_says_what_would(plan):
    t4 = "--model_size large --gpu t4 --tokens 1e9"
    out = plan(f"{t4} --gpus 4 {ZERO2} --micro_batch_size_per_gpu 8", code=1)
    assert "it fits with --" in out
    assert out.splitlines()[-1].startswith("DOES NOT FIT: 21.")
    assert not [word for word in ("step:", "MFU", "$") if word in out]
    assert "take --recommend" in plan(f"{t4} --gpus 1 {ZERO2} --run_type baseline", code=1)


def test_headroom_decides_what_fits_and_is_printed(plan):
    """16 GB less 20% and 0.6 GB are 12.2 GB."""
    line = "--model_size xl --gpu t4 --gpus 2 --global_batch_size 8 --micro_batch_size_per_gpu 4 --tokens 1B"
    line += " --strategy fsdp --activation_checkpointing"
    memory = json.loads(plan(f"{line} --json"))["memory"]
    assert memory["usable_bytes"] == 0.92 * 16e9 - 0.6e9 > memory["bytes"]
    assert "12.2 GB is 16.0 GB less 20% headroom (--headroom) and 600.0 MB of" in plan(f"{line} --headroom 20", code=1)
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
    assert {each["plan"]["micro_batch_size"] for each in found["ranked"]} == {same["micro_batch_size"]}
    assert same == {key: value for key, value in by_name.items() if key != "assumptions"}


def test_an_instance_is_its_gpus_network_and_price(plan):
    line = "--model_size small --strategy zero1 --tokens 1e9 --gpus 16 --json"
    found = json.loads(plan(f"{line} --instance P5.48xlarge"))
    same = json.loads(plan(f"{line} --gpu h100 --network_gbps 3200"))
    assert found["step"] == same["step"]
    assert [cost["offer"] for cost in found["costs"]] == ["AWS p5.48xlarge"]
    assert found["costs"][0] in same["costs"]
    assert "p5.48xlarge with 32 cards, 2024-12-01: https://" in found["assumptions"][0]["value"]
    slower = json.loads(plan(f"{line} --instance p5.48xlarge --network_gbps 25"))
    assert slower["step"]["seconds"] > 2 * found["step"]["seconds"]
    unpriced = plan(f"{line.removesuffix('--json')} --instance a3-megagpu-8g")
    assert "1,600 Gbit/s (a3-megagpu-8g with 8 cards, 2026-11-27: https://cloud.google.com/" in unpriced
    assert "cost: no price of a3-megagpu-8g is known" in unpriced


def test_what_to_know_first_is_noted(plan):
    assert json.loads(plan("--gpu H100 --tokens 50M --json"))["notes"] == [
        "--gpu H100 is taken as h100-80gb",
        "the training ends at step 95, and the recipe warms up for 715 steps: lower scheduler.params.warmup_num_steps, "
        "or train on more tokens",
        "list prices of 2024-06-01 are over a year old: check their source, or give --price_per_gpu_hour",
    ]
    assert json.loads(plan("--gpu h100-80gb --tokens 10b --price_per_gpu_hour 2 --json"))["notes"] == []


def test_offload_needs_the_memory_of_the_host(plan):
    """12 bytes a parameter at least, of each GPU's share."""
    line = f"--model_size xl --gpu t4 --tokens 1e9 --deepspeed_config {REPOSITORY}/ds_configs/zero3_offload.json --json"
    little, much = (
        json.loads(plan(f"{line} --micro_batch_size_per_gpu 1 --host_memory_gb {size}", code=code))["memory"]
        for size, code in ((20, 1), (90, 0))
    )
    assert 12 * 1.56e9 < little["host_bytes"] == much["host_bytes"] < 72e9
    assert not little["fits"]
    assert much["fits"]


def test_the_picture_has_the_same_bytes_twice(plan, tmp_path):
    line = f"--model_size large --gpu a100-40gb --gpus 8 --tokens 1e9 {THREE_D}"
    for path in (tmp_path / "plan.svg", tmp_path / "plan.png"):
        plan(f"{line} --picture {path}")
        first = path.read_bytes()
        plan(f"{line} --picture {path}")
        assert path.read_bytes() == first


def test_who_holds_what():
    """As ``Topology`` deals ranks: stages outermost, then data, then tensor."""
    setup = fixed_setup(request_of(f"--model_size large --gpu t4 --gpus 8 --tokens 1e9 {THREE_D}"), Problems())
    assert held_in_words(setup, 0) == "embedding, blocks 0-17, matrices 1/2, data 1/2"
    assert held_in_words(setup, 3) == "embedding, blocks 0-17, matrices 2/2, data 2/2"
    assert held_in_words(setup, 6) == "embedding, blocks 18-35, matrices 1/2, data 2/2"
    assert held_in_words(replace(setup, run_type="ddp"), 5) == "all layers, data 6/8"


# The page of published figures says what the planner predicts now.


TABLE = read_as(PUBLISHED, dict[str, list[Published]])["rows"]


@pytest.mark.parametrize(("name", "made"), [("planner-published", published_page), ("projections", projections_page)])
def test_the_pages_are_those_of_the_code_and_of_the_records(name, made):
    """After a change of the model of time: ``src/plan.py --published`` and ``--projections``."""
    assert (REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8") == made()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.program} {row.model} {row.gpus} x {row.gpu}")
def test_a_range_contains_the_figure_or_the_row_says_why_not(row: Published):
    low, likely, high = row.tokens_per_sec(row.gpus)
    assert low < likely < high < 3 * low  # a wider range would say nothing
    assert (low <= row.tokens_per_sec_per_gpu <= high) == (row.why_outside is None)
    assert row.source.startswith("https://")
    blocks = 12 * row.shape["n_layer"] * row.shape["n_embd"] ** 2
    flops = 6 * (blocks + 50_257 * row.shape["n_embd"]) * row.tokens_per_sec_per_gpu
    peak = gpus()[row.gpu].peak(row.precision)
    assert 0.1 * peak < flops < 0.7 * peak, "a slip of the pen in the figure"


# `--measured`: records of sweeps and of `benchmark.py plan` are read as setups and fitted to.


MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 8192}


def result(run_type: str, ranks: int, seconds: float, *, fit: bool = True) -> dict:
    """A result of ``benchmark.py plan``."""
    work = {"model": {"name": "4 x 256"} | MODEL, "seq_length": 256, "micro_batch_size": 4, "run_type": run_type}
    work |= {"gradient_accumulation_steps": 1, "precision": "fp32", "activation_checkpointing": False}
    work |= {"recipe": "zero1.json", "changes": {"zero_optimization": {"reduce_bucket_size": 5_000_000}}}
    return {"fit": fit, "work": work, "ranks": ranks, "step_seconds": {"measured": seconds}}


SWEEP = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores" / "sweep-scaling.json"


def measured(path, record=None):
    """The steps of ``record``, which is written to ``path`` first."""
    if record is not None:
        path.write_text(json.dumps(record))
    return read_measured((path,), parse_as(json.dumps(RECORD).encode(), Calibration))


def test_cells_of_a_plan_suite_and_of_a_sweep_are_the_setups_that_ran(tmp_path):
    """Those that only test, or have a precision without rates, are not fitted."""
    tests, bf16 = result("ddp", 2, 0.7, fit=False), result("ddp", 2, 0.7)
    bf16["work"]["precision"] = "bf16"
    cells = [result("baseline", 1, 0.5), result("ddp", 2, 0.7), tests, bf16]
    alone, ddp = measured(tmp_path / "plan.json", {"cells": cells})
    assert (alone.setup.world_size, ddp.setup.world_size) == (1, 2)
    assert ddp.setup.model.n_embd == 256
    assert ddp.setup.recipe.zero_optimization.reduce_bucket_size == 5_000_000
    assert (alone.machine.rates.bus, ddp.seconds) == ({2: 1e9}, 0.7)
    steps, swept = measured(SWEEP), json.loads(SWEEP.read_text())["cells"]
    for step, cell in zip(steps, swept, strict=True):
        found, work = step.setup, cell["turns"][0]["work"]
        batch = found.micro_batch_size * found.gradient_accumulation_steps * found.world_size
        assert (found.world_size, found.run_type, batch) == (cell["devices"], cell["flags"][1], work["global batch"])
        assert found.model.n_embd == work["model n_embd"]
        assert step.seconds == batch * work["sequence length"] / cell["tokens_per_sec"]["median"]


CELL = "a cell is not as this program writes it"


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ([result("ddp", 2, 0.7, fit=False)], "has no measured step of a setup that the planner knows"),
        ([{"fit": True, "step_seconds": {"measured": 1.0}}], CELL),
        ([3], CELL),
        ({"fit": True}, CELL),
    ],
)
def test_records_without_a_usable_cell_are_refused_in_a_line(tmp_path, cells, why):
    with pytest.raises(UserError, match=rf"plan.json: {why}[^\n]*$"):
        measured(tmp_path / "plan.json", {"cells": cells})


def test_a_plan_uses_the_fitted_rates(plan, tmp_path, calibration):
    path = tmp_path / "plan.json"
    step = measured(path, {"cells": [result("baseline", 1, 1.0)]})[0]
    factors = fit([step])
    assert predict_step(step.setup, factors.applied(step.machine)).seconds == pytest.approx(step.seconds)
    line = f"--machine {calibration} --gpus 1 --run_type baseline --model_size demo --tokens 1e6 --json"
    plain, fitted = (json.loads(plan(f"{line} {more}")) for more in ("", f"--measured {path}"))
    for part in ("forward", "backward", "head and loss"):
        assert fitted["step"]["parts"][part] == pytest.approx(
            factors.compute["fp32"] * plain["step"]["parts"][part], rel=0.01
        )
    assert "fitted to measured steps (1)" in fitted["machine"]["rates"]


def test_masks_are_planned_for_cpus_and_refused_for_gpus_as_training_does(plan, refused, calibration, monkeypatch):
    line = f"--machine {calibration} --gpus 1 --run_type baseline --model_size demo --tokens 1e6 --json"
    whole, same, masked = (json.loads(plan(line + more)) for more in ("", *MASKED))
    assert [each["attended_length"] for each in (whole, same, masked)] == [None, whole["seq_length"], 64]
    assert masked["step"]["seconds"] < whole["step"]["seconds"] == same["step"]["seconds"]
    (rule,) = refused(f"{XL} {ZERO2} --mask_documents 64")
    assert "kernel of PyTorch on GPUs that no GPU has compared with a CPU" in rule and ALLOW_MASKS in rule
    monkeypatch.setenv(ALLOW_MASKS, "1")
    assert "attention within documents of 64 tokens" in plan(f"{XL} {ZERO2} --mask_documents 64")
    (rule,) = refused(f"{XL} --mask_documents 64 --strategy pipeline")
    assert rule.startswith("--mask_documents does not go with a pipeline")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        # a negative time of an operation would be a plan with negative steps; a rate of 0 ended in a traceback
        ({"matrix_flops_per_sec": {"fp32": {"256": {"1024": 0.0}}}}, "fp32.256.1024: Input should be greater than 0"),
        ({"matrix_flops_per_sec": {"fp32": {}}}, "fp32: Dictionary should have at least 1 item"),
        ({"bus_bytes_per_sec": {"all_gather": {"fp32": 1e9}}}, "bus_bytes_per_sec: has no all_reduce of fp32"),
        ({"operation_sec": -1.0}, "operation_sec: Input should be greater than 0"),
        ({"logits_per_sec": {"bf16": 1e9}}, "logits_per_sec: has other precisions than matrix_flops_per_sec"),
    ],
)
def test_a_calibration_without_possible_rates_is_refused(refused, calibration, changes, why):
    calibration.write_text(json.dumps(RECORD | {"ceilings": [RECORD["ceilings"][0] | changes]}))
    (line,) = refused(f"--machine {calibration} --model_size tiny --tokens 1e6")
    assert line.startswith(f"--machine {calibration}: cannot be read as a calibration (ceilings.0")
    assert why in line


def test_a_calibration_of_an_older_schema_or_of_fewer_devices_is_refused(refused, calibration):
    line = f"--machine {calibration} --gpus 4 --model_size tiny --tokens 1e6"
    assert refused(line)[0].startswith("--gpus 4: the calibration measured 2 devices of one machine:")
    calibration.write_text(json.dumps(RECORD | {"schema_version": "1.0"}))
    assert "has schema 1.0, but this program reads 2.1: write it again with --calibrate" in refused(line)[0]


def test_calibrated_machines_are_several_once_their_network_is_known(plan, refused, calibration):
    line = f"--machine {calibration} --gpus 4 --run_type ddp --model_size tiny --tokens 1e6 --json"

    def planned(more: str = "", **network: object) -> tuple[float, float]:
        measured = {"timestamp_utc": "2026-11-26", "machines": 2, "transport": "gloo", "latency_sec": 1e-9} | network
        calibration.write_text(json.dumps(RECORD | ({"network": measured} if network else {})))
        found = json.loads(plan(f"{line} {more}"))
        return found["machine"]["network_gbps"], found["step"]["parts"]["communication"]

    assert "measure the network between several (doctor.py --machine)" in refused(line)[0]
    assert "are not whole machines of 2 GPUs" in refused(f"{line.replace('--gpus 4', '--gpus 3')} --network_gbps 1")[0]
    (gbps, fast), (_, slow), (_, late) = (
        planned(bytes_per_sec=1e7), planned(bytes_per_sec=5e6), planned(bytes_per_sec=1e7, latency_sec=1e-3)
    )  # fmt: skip
    assert gbps == pytest.approx(0.08)
    assert slow - fast == pytest.approx(fast, rel=0.05)
    assert late > fast
    stated = planned("--network_gbps 0.04", bytes_per_sec=1e9)
    assert stated == pytest.approx(planned("--network_gbps 0.04"))  # the latency stays the measured one
    assert stated[1] == pytest.approx(slow / 0.65, rel=0.05)


# The search for the best setup.


SHAPE = f"--num_layers 4 --num_heads 4 --embedding_size 32 --max_position_embeddings {SEQUENCE}"


def request_of(line: str) -> PlanRequest:
    return read_request(*read_plan_options(line.split()))


def searched(line: str) -> list[Judged]:
    return search(request_of(line), read_prices())


def everything(request: PlanRequest) -> dict[str, list[Plan]]:
    """The plans of every candidate, with and without checkpointing, at every micro batch, that fit into memory."""
    fitting: dict[str, list[Plan]] = {}
    for candidate, checkpointing in product(candidate_setups(request.devices, together=8), (False, True)):
        total = request.options.global_batch_size
        recipe = candidate.recipe(request.recipe, Path("recipe.json"), train_batch_size=total)
        problems = Problems()
        check_split(request.training(recipe, candidate.run_type, problems=problems), problems)
        ranks = request.devices // recipe.parallel_of(candidate.run_type).ranks_per_copy
        if problems or total % ranks:
            continue
        for micro in divisors(total // ranks):
            steps = total // ranks // micro
            setup = request.setup(recipe, candidate.run_type, micro, steps, activation_checkpointing=checkpointing)
            plan = plan_of(setup, request, read_prices())
            if plan.fits and (steps > 1 or "sharded sums" not in candidate.name):
                fitting.setdefault(candidate.name + ", checkpointing" * checkpointing, []).append(plan)
    return fitting


def random_line(number: int) -> str:
    """A few wide blocks, whose state is about as large as the memory of one or two GPUs, and any limits."""
    draw = random.Random(number)
    gpu, gpus = draw.choice(("t4", "v100-32gb", "l4", "a100-40gb")), draw.choice((1, 2, 3, 4))
    shape = f"--num_layers {draw.randint(1, 4)} --num_heads {draw.choice((4, 6, 8, 25))}"
    width = 600 * draw.randint(4, 20)
    limits = draw.choice(("", f"--budget {draw.uniform(1, 60):.2f}", f"--deadline {draw.randint(1, 40)}h"))
    return (
        f"--gpu {gpu} --gpus {gpus} {shape} --embedding_size {width} --recommend {limits} --tokens 1e8 "
        f"--global_batch_size {gpus * draw.choice((1, 2, 4, 6, 8))} --precision {draw.choice(('fp16', 'fp32'))}"
    )


def check_against_everything(line: str) -> str:
    """Hold the search against brute force; return the name of what it recommends, empty if nothing fits."""
    options, tried = request_of(line).options, everything(request_of(line))
    within = {
        name: fast
        for name, plans in tried.items()
        if (fast := min(plans, key=lambda plan: plan.run.seconds)).run.seconds <= (options.deadline or math.inf)
        and (not options.budget or any(cost.usd <= options.budget for plan in plans for cost in plan.costs))
    }
    ranked = [each for each in searched(line) if each.fits]
    assert {each.name for each in ranked} == set(within), line
    seconds = [each.plan.run.seconds for each in ranked]
    assert seconds == pytest.approx([within[each.name].run.seconds for each in ranked]), line
    assert seconds == sorted(seconds), line
    return ranked[0].name if ranked else ""


def test_the_search_finds_what_brute_force_finds():
    """Seen failing: a search that ended at the first micro batch that does not fit missed setups in 7 of 80 cases."""
    winners = [check_against_everything(random_line(number)) for number in range(20)]
    assert len(set(winners)) >= 5, "the cases are all alike"
    # with whole gradients the larger micro batch alone fits: it accumulates nothing, so it needs no second copy of them
    line = "--model_size xl --gpu t4 --gpus 2 --tokens 1e9 --recommend --global_batch_size 8"
    assert check_against_everything(line) == "fsdp, checkpointing"
    assert [plan.setup.micro_batch_size for plan in everything(request_of(line))["fsdp, checkpointing"]] == [4]


def test_every_way_is_ranked_or_has_a_reason(plan):
    out = json.loads(
        plan("--model_size xl --gpu t4 --gpus 4 --tokens 1e9 --recommend --deadline 40h --budget 110 --json")
    )
    reasons = {each["name"]: each["reason"] for each in out["refused"]}
    assert "does not divide the model's 25 heads: take 1 or 5" in reasons["tensor2-zero1"]
    assert "does not fit: needs" in reasons["ddp"]
    assert any("longer than the deadline of 40.0 h" in reason for reason in reasons.values())
    assert any("more than the budget of $110" in reason for reason in reasons.values())
    assert len(reasons) + len(out["ranked"]) == 2 * len(list(candidate_setups(4, together=8)))
    for each in out["ranked"]:
        assert each["plan"]["training"]["seconds"] <= 40 * 3600
        assert each["plan"]["costs"][0]["usd"] <= 110
    assert out["recommended"]["plan"].items() >= out["ranked"][0]["plan"].items()


def test_the_network_at_which_another_way_is_the_fastest():
    """Planned again for speeds around the one that the plan names."""
    line = "--gpu h100-80gb --gpus 16 --tokens 1e9 --num_layers 3 --embedding_size 1600 --num_heads 25 --recommend"

    def best(network: float) -> Plan:
        return searched(f"{line} --network_gbps {network}")[0].plan

    slow = best(25.0)
    network, *_ = slow.assumptions
    assert network.what == "network between machines"
    name, at = re.fullmatch(r"(.*) is the fastest from ([\d,.]+) Gbit/s", network.break_even[0]).groups()
    at = float(at.replace(",", ""))
    assert best(0.97 * at).name == slow.name != name
    assert best(1.03 * at).name == name
    assert network.seconds["400 Gbit/s"] == pytest.approx(
        plan_of(slow.setup, request_of(f"{line} --network_gbps 400"), read_prices()).run.seconds
    )


def recommended(here: Path, devices: int) -> dict[str, Plan]:
    """Everything that fits, by its name, on data of a small vocabulary."""
    judged = searched(
        f"--gpu h100-80gb --gpus {devices} --tokens {SEQUENCE * 16} {SHAPE} --vocab_size {VOCABULARY} "
        f"--val_tokens {SEQUENCE * 8} --precision fp32 --recommend "
        f"--deepspeed_config {here}/recipe.json --into {here}/plan "
        f"--train_data_path {here}/train.bin --val_data_path {here}/val.bin"
    )
    return {each.name: each.plan for each in judged if each.fits}


def written(plan: Plan) -> tuple[Path, ...]:
    """Recipe, command and plan, as ``--recommend`` writes them."""
    files = recommendation_files(plan)
    plan.request.options.into.mkdir(exist_ok=True)
    for path, content in files.items():
        path.write_bytes(content)
    return tuple(files)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_training_accepts_every_recipe_that_could_be_recommended(here, devices):
    """As its dry run does, on the ranks that the command starts."""
    plans = recommended(here, devices)
    assert set(plans) >= (
        {"baseline"} if devices == 1 else {"ddp", "fsdp", "zero3", "tensor2-zero1", "pipeline2-zero1"}
    )
    for name, plan in plans.items():
        _, command, _ = written(plan)
        words = shlex.split(command.read_text().splitlines()[-1])
        script, launcher, setup = words.index("src/gpt2.py"), words[1], plan.setup
        ranks = 1 if launcher == "python" else int(words[script - 1])
        config = resolved(words[script + 1 : -1], ranks=ranks, launcher=launcher)
        batch = (setup.micro_batch_size, setup.gradient_accumulation_steps)
        assert (config.batch.micro_batch_size, config.batch.gradient_accumulation_steps) == batch
        assert config.activation_checkpointing == setup.activation_checkpointing
        assert config.strategy_name == name.partition(",")[0]
        assert config.total_steps == plan.run.steps == 2
        assert config.val_windows == 8
        assert config.model == setup.model


@pytest.mark.parametrize(("devices", "name"), [(1, "baseline"), pytest.param(2, "zero1", marks=pytest.mark.long)])
def test_the_written_command_passes_a_dry_run_and_names_text_that_is_missing(here, devices, name):
    """The command of several devices starts the deepspeed launcher."""
    _, command, _ = written(recommended(here, devices)[name])
    run = partial(subprocess.run, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    done = run(["sh", command, "--dry_run"])
    assert done.returncode == 0, done.stderr[-2000:]
    assert "dry run: everything checked, nothing started" in done.stdout
    assert f"strategy    {name} " in done.stdout
    done = run(["sh"], input=command.read_text().replace("val.bin", "absent.bin"))
    assert done.returncode == EXIT_USER_ERROR
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(r"error: \S*absent\.bin is missing: download_data\.py and preprocess\.py .* make it .*", line)


def test_tensor_peers_are_never_on_two_machines():
    names = {each.name for each in candidate_setups(24, together=8)}
    assert {"tensor2-zero1", "tensor8-zero1", "sequence4-zero1", "pipeline3-tensor8-zero1", "pipeline6-zero1"} <= names
    assert not [name for name in names if "tensor3" in name or "tensor6" in name or "sequence3" in name]
    assert "tensor3-zero1" in {each.name for each in candidate_setups(6, together=8)}
