"""The search for the best setup."""

import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from small_run import REPOSITORY, SEQUENCE, VOCABULARY, write_data, write_recipe

from dsgpt.common.errors import Problems
from dsgpt.common.text import divisors
from dsgpt.config.compatibility import check_split
from dsgpt.config.options import parse_arguments
from dsgpt.config.run_config import BatchPlan, resolve
from dsgpt.machine.topology import Topology
from dsgpt.planner.hardware import read_prices
from dsgpt.planner.options import read_plan_options
from dsgpt.planner.plan import Plan, plan_of
from dsgpt.planner.request import PlanRequest, read_request, ways
from dsgpt.planner.search import Judged, command_text, search, write_recommendation

CASES = 80
SHAPE = f"--num_layers 4 --num_heads 4 --embedding_size 32 --max_position_embeddings {SEQUENCE}"


def request_of(line: str) -> PlanRequest:
    return read_request(*read_plan_options(line.split()), repository=REPOSITORY)


def everything(request: PlanRequest) -> dict[tuple[str, bool], list[Plan]]:
    """The plans of every way, with and without checkpointing, at every micro batch, that fit into memory."""
    found: dict[tuple[str, bool], list[Plan]] = {}
    for way, checkpointing in product(ways(request.devices, together=8, repository=REPOSITORY), (False, True)):
        total = request.options.global_batch_size
        recipe = way.recipe(request.recipe, Path("recipe.json"), train_batch_size=total)
        problems = Problems()
        check_split(request.training(recipe, way.run_type, problems=problems), problems)
        ranks = request.devices // recipe.parallel_of(way.run_type).ranks_per_copy
        if problems or total % ranks:
            continue
        share = total // ranks
        for micro in divisors(share):
            batch = BatchPlan(
                global_batch_size=total,
                micro_batch_size=micro,
                gradient_accumulation_steps=share // micro,
                data_parallel_size=ranks,
            )
            setup = request.setup(recipe, way.run_type, batch, activation_checkpointing=checkpointing)
            plan = plan_of(setup, request, read_prices())
            if plan.fits:
                found.setdefault((way.name, checkpointing), []).append(plan)
    return found


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
    request = request_of(line)
    options = request.options
    tried, found = everything(request), search(request, read_prices(), repository=REPOSITORY)
    within = {
        key: fast
        for key, plans in tried.items()
        if (fast := min(plans, key=lambda plan: plan.run.seconds)).run.seconds <= (options.deadline or math.inf)
        and (not options.budget or any(cost.usd <= options.budget for plan in plans for cost in plan.costs))
    }
    ranked = [each for each in found if each.fits]
    assert {(each.way.name, each.activation_checkpointing) for each in ranked} == set(within), line
    for each in ranked:
        same = within[each.way.name, each.activation_checkpointing]
        assert each.plan.run.seconds == pytest.approx(same.run.seconds), line
    seconds = [each.plan.run.seconds for each in ranked]
    assert seconds == sorted(seconds), line
    return ranked[0].name if ranked else ""


def test_the_search_finds_what_brute_force_finds():
    """Seen failing: a search that ended at the first micro batch that does not fit missed setups in 7 of 80 cases."""
    winners = [check_against_everything(random_line(number)) for number in range(CASES)]
    assert len(set(winners)) >= 5, "the cases are all alike"


def test_a_larger_micro_batch_may_fit_where_a_smaller_one_does_not():
    """It accumulates nothing, so it needs no second copy of the gradients."""
    line = "--model_size xl --gpu t4 --gpus 2 --tokens 1e9 --recommend --global_batch_size 8"
    assert check_against_everything(line) == "fsdp, checkpointing"
    micros = [plan.setup.micro_batch_size for plan in everything(request_of(line))["fsdp", True]]
    assert micros == [4]


def test_every_way_is_ranked_or_has_a_reason(plan):
    out = json.loads(
        plan("--model_size xl --gpu t4 --gpus 4 --tokens 1e9 --recommend --deadline 40h --budget 110 --json")
    )
    reasons = {each["name"]: each["reason"] for each in out["refused"]}
    assert "does not divide the model's 25 heads: take 1 or 5" in reasons["tensor2-zero1"]
    assert "does not fit: needs" in reasons["ddp"]
    assert any("longer than the deadline of 40.0 h" in reason for reason in reasons.values())
    assert any("more than the budget of $110" in reason for reason in reasons.values())
    assert len(reasons) + len(out["ranked"]) == 2 * len(list(ways(4, together=8, repository=REPOSITORY)))
    for each in out["ranked"]:
        assert each["plan"]["training"]["seconds"] <= 40 * 3600
        assert each["plan"]["costs"][0]["usd"] <= 110
    assert out["recommended"]["plan"].items() >= out["ranked"][0]["plan"].items()


def test_the_network_at_which_another_way_is_the_fastest():
    """Planned again for speeds around the one that the plan names."""
    line = "--gpu h100-80gb --gpus 16 --tokens 1e9 --num_layers 3 --embedding_size 1600 --num_heads 25 --recommend"

    def best(network: float) -> Plan:
        return search(request_of(f"{line} --network_gbps {network}"), read_prices(), repository=REPOSITORY)[0].plan

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


def test_a_micro_batch_that_is_asked_for_is_kept(plan):
    out = json.loads(plan("--gpu l4 --gpus 2 --tokens 1e9 --recommend --micro_batch_size_per_gpu 4 --json"))
    assert {each["plan"]["micro_batch_size"] for each in out["ranked"]} == {4}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_recipe(write_data(tmp_path) / "base.json")
    return tmp_path


def recommended(data: Path, devices: int) -> tuple[PlanRequest, list[Judged]]:
    """Everything that fits, on data of a small vocabulary."""
    request = request_of(
        f"--gpu h100-80gb --gpus {devices} --tokens {SEQUENCE * 16} {SHAPE} --vocab_size {VOCABULARY} "
        f"--val_tokens {SEQUENCE * 8} --precision fp32 --recommend "
        f"--deepspeed_config {data}/base.json --into {data}/plan "
        f"--train_data_path {data}/train.bin --val_data_path {data}/val.bin"
    )
    return request, [each for each in search(request, read_prices(), repository=REPOSITORY) if each.fits]


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_training_accepts_every_recipe_that_could_be_recommended(data, devices):
    """As its dry run does, on the ranks that the command starts."""
    request, found = recommended(data, devices)
    names = {each.way.name for each in found}
    assert names >= ({"baseline"} if devices == 1 else {"ddp", "fsdp", "zero3", "tensor2-zero1", "pipeline2-zero1"})
    for each in found:
        recipe, _, _ = write_recommendation(each, request)
        words = shlex.split(command_text(each, request, recipe).splitlines()[-1])
        options, problems = parse_arguments(words[words.index("src/gpt2.py") + 1 : -1])
        launcher = words[1]
        ranks = 1 if launcher == "python" else int(words[words.index("src/gpt2.py") - 1])
        topology = Topology(rank=0, local_rank=0, world_size=ranks, local_world_size=ranks, launcher=launcher)
        config = resolve(options, topology=topology, problems=problems)
        setup = each.plan.setup
        assert (config.batch.micro_batch_size, config.batch.gradient_accumulation_steps) == (
            setup.micro_batch_size,
            setup.gradient_accumulation_steps,
        )
        assert config.activation_checkpointing == setup.activation_checkpointing
        assert config.strategy_name == each.way.name
        assert config.total_steps == each.plan.run.steps == 2
        assert config.val_windows == 8
        assert config.model == setup.model


@pytest.mark.parametrize(("devices", "name"), [(1, "baseline"), (2, "fsdp"), (2, "pipeline2-zero1")])
def test_the_written_command_passes_a_dry_run(data, devices, name):
    request, found = recommended(data, devices)
    winner = next(each for each in found if each.way.name == name)
    _, command, _ = write_recommendation(winner, request)
    done = subprocess.run(
        ["sh", str(command), "--dry_run"],
        cwd=REPOSITORY,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "dry run: everything checked, nothing started" in done.stdout
    assert f"strategy    {name} " in done.stdout


def test_tensor_peers_are_never_on_two_machines():
    names = {way.name for way in ways(24, together=8, repository=REPOSITORY)}
    assert {"tensor2-zero1", "tensor8-zero1", "sequence4-zero1", "pipeline3-tensor8-zero1", "pipeline6-zero1"} <= names
    assert not [name for name in names if "tensor3" in name or "tensor6" in name or "sequence3" in name]
    assert "tensor3-zero1" in {way.name for way in ways(6, together=8, repository=REPOSITORY)}


def test_several_machines_are_joined_by_torchrun(data):
    request, found = recommended(data, 16)
    text = command_text(found[0], request, data / "recipe.json")
    assert '--nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint "$MASTER:29500" src/gpt2.py' in text


def test_the_page_compares_a_plan_with_a_run_by_keys_that_both_have(data):
    """Of docs/planning.md; the run is the committed one of the demo."""
    request, found = recommended(data, 2)
    _, _, plan = write_recommendation(found[0], request)
    run = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores" / "demo-zero1" / "training_metrics.json"
    page = (REPOSITORY / "docs" / "planning.md").read_text(encoding="utf-8")
    part = page.split("## A recommendation carried out", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1:3] for line in part.splitlines() if line.startswith("| `")]
    assert len(rows) == 5
    for cells in rows:
        for cell, file in zip(cells, (plan, run), strict=True):
            value = json.loads(file.read_text(encoding="utf-8"))
            for key in cell.strip(" `").split("."):
                value = value[int(key)] if isinstance(value, list) else value[key]
