"""Machines: the table of GPUs, prices, calibrations, and the share of a peak that is reached."""

import datetime
import json
import random
import shlex
import statistics

import pytest
from planner_records import RECORD, machine

from dsgpt.common.errors import UserError
from dsgpt.common.json_files import parse_as
from dsgpt.model.config import PRESETS
from dsgpt.planner.hardware import PRICES as TABLE
from dsgpt.planner.hardware import costs, find_gpu, gpus, read_prices, recognise
from dsgpt.planner.rates import ALLOWANCE, Calibration, Machine, calibrated_machine, read_calibration, utilisation
from dsgpt.planner.setup import Setup, model_parameters, total
from dsgpt.planner.step_time import (
    START_SEC,
    MeasuredStep,
    best_save_every,
    fit,
    predict_step,
    run_time,
    with_interruptions,
)

# The table of GPUs is complete, dense, and finds what drivers report.


MIB = 1 << 20
REPORTED = [
    ("Tesla T4", 15360, "t4"),
    ("Tesla V100-SXM2-16GB", 16160, "v100-16gb"),
    ("Tesla V100-SXM2-32GB", 32510, "v100-32gb"),
    ("NVIDIA A10G", 23028, "a10g"),
    ("NVIDIA L4", 23034, "l4"),
    ("NVIDIA L40S", 46068, "l40s"),
    ("NVIDIA GeForce RTX 3090", 24576, "rtx-3090"),
    ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
    ("A100-SXM4-40GB", 40536, "a100-40gb"),
    ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb"),
    ("NVIDIA H100 80GB HBM3", 81559, "h100-80gb"),
    ("NVIDIA H100 PCIe", 81559, "h100-pcie"),
    ("NVIDIA H200", 143771, "h200"),
    ("NVIDIA B200", 183359, "b200"),
]
"""Names and MiB as drivers report them."""


@pytest.mark.parametrize(("name", "mebibytes", "key"), REPORTED)
def test_a_gpu_is_known_by_what_its_driver_reports(name, mebibytes, key):
    assert recognise(name, mebibytes * MIB) == find_gpu(key)
    assert [key for _, _, key in REPORTED] == list(gpus())


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [
        ("NVIDIA GeForce RTX 3090 Ti", 24564),
        ("NVIDIA L40", 46068),
        ("NVIDIA A10", 23028),
        ("NVIDIA A100-PCIE-40GB", 40536),
        ("NVIDIA H100 NVL", 95830),
        ("NVIDIA H200 NVL", 143771),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40192),
        ("NVIDIA H200", 143771 // 2),
        ("", 0),
    ],
)
def test_no_other_gpu_is_taken_for_one_of_the_table(name, mebibytes):
    assert recognise(name, mebibytes * MIB) is None


def test_peaks_are_dense_and_null_without_units():
    assert find_gpu("h100-80gb").peak("bf16") == 989_400_000_000_000
    assert find_gpu("l4").peak("bf16") == 121_000_000_000_000  # its datasheet prints 242, with sparsity
    assert find_gpu("t4").peak("fp16") == 65_000_000_000_000
    for key in ("t4", "v100-16gb", "v100-32gb"):
        assert find_gpu(key).peak("bf16") is None
        assert find_gpu(key).peak("tf32") is None
    for gpu in gpus().values():
        assert gpu.sources
        assert all(source.url.startswith("https://") for source in gpu.sources)


# The time of a training and its cost, by hand; and the price table.


def simulated(steps: int, *, save_every: int, save: float, restart: float, mtbf: float, seed: int) -> float:
    """Seconds of a training of steps of a second each that is interrupted at random, played step by step."""
    draws, seconds, done = random.Random(seed), 0.0, 0
    left = draws.expovariate(1 / mtbf)
    while done < steps:
        needed = save_every + save
        if left >= needed:
            seconds, left, done = seconds + needed, left - needed, done + save_every
            continue
        seconds, left = seconds + left, draws.expovariate(1 / mtbf)
        while left < restart:
            seconds, left = seconds + left, draws.expovariate(1 / mtbf)
        seconds, left = seconds + restart, left - restart
    return seconds


@pytest.mark.parametrize(("save", "restart", "mtbf"), [(5, 60, 3600), (60, 300, 1200), (1, 20, 100)])
def test_interruptions_cost_what_they_cost_when_they_are_played(save, restart, mtbf):
    best = best_save_every(1.0, save=save, mtbf=mtbf)
    expected = {
        every: with_interruptions(10_000 / every * (every + save), segment=every + save, restart=restart, mtbf=mtbf)
        for every in (best, *range(1, 1000))
    }
    assert expected[best] <= 1.002 * min(expected.values())
    length = best * 400
    played = [
        simulated(length, save_every=best, save=save, restart=restart, mtbf=mtbf, seed=seed) for seed in range(20)
    ]
    assert statistics.fmean(played) / length == pytest.approx(expected[best] / 10_000, rel=0.02)


def test_steps_validations_and_checkpoints(setup):
    """12 sequences of 4 tokens a step; a validation of 96 tokens is 6 micro batches on each of 2 ranks."""
    ddp = setup(run_type="ddp")
    step = predict_step(ddp, machine())
    length = {"tokens": 48 * 100 + 47, "eval_every": 10, "val_tokens": 96, "save_every": 40}
    found = run_time(ddp, machine(), step, **length)
    assert found.steps == 100
    assert found.parts["steps"] == pytest.approx(100 * step.seconds)
    assert found.parts["validation"] == pytest.approx(10 * 6 * step.validation_micro_batch)
    assert found.parts["checkpoints"] == pytest.approx(3 * 12 * total(model_parameters(ddp.model)) / 1e6)
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert found.parts["start"] == START_SEC
    assert found.least < found.seconds < found.most
    only_at_the_end = run_time(ddp, machine(), step, tokens=48 * 100)
    assert only_at_the_end.parts["checkpoints"] == pytest.approx(found.parts["checkpoints"] / 3)
    assert "validation" not in only_at_the_end.parts
    sgd = setup(run_type="ddp", top={"optimizer": {"type": "SGD", "params": {"lr": 1.0}}})
    assert run_time(sgd, machine(), step, **length).parts["checkpoints"] == pytest.approx(
        found.parts["checkpoints"] / 3  # no moments
    )
    seldom = run_time(ddp, machine(), step, **length | {"eval_every": 30})  # after 30, 60, 90 and 100 steps
    assert seldom.parts["validation"] == pytest.approx(4 * 6 * step.validation_micro_batch)


def test_cost_of_whole_instances():
    table = read_prices()
    offers = {cost.offer: cost for cost in costs(table, gpu="t4", gpus=4, together=4, spot=False, seconds=_hours(3))}
    aws = offers["AWS g4dn.12xlarge"]
    assert (aws.usd, aws.least, aws.most) == pytest.approx((3 * 3.912, 3.912, 9 * 3.912))
    assert offers["AWS g4dn.metal"].usd == pytest.approx(3 * 7.824)  # all of its 8 GPUs are paid
    assert "AWS g4dn.xlarge" not in offers  # four machines are not one
    two = costs(table, gpu="h100-80gb", gpus=16, together=8, spot=False, seconds=_hours(1))
    p5 = next(cost for cost in two if cost.offer == "AWS p5.48xlarge")
    assert (p5.instances, p5.usd) == (2, pytest.approx(2 * 98.32))
    assert [cost.usd for cost in two] == sorted(cost.usd for cost in two)
    on_spot = costs(table, gpu="a100-40gb", gpus=1, together=1, spot=True, seconds=_hours(1))
    listed = {f"{price.provider} {price.instance}, spot" for price in table.prices if price.spot_usd_per_hour}
    assert set() < {cost.offer for cost in on_spot} <= listed


def _hours(count: float) -> tuple[float, float, float]:
    """The likely time, a third of it and three times as much."""
    return 3600 * count, 1200 * count, 10_800 * count


def test_every_row_of_the_table_is_dated_sourced_and_of_a_known_gpu():
    table = read_prices()
    for price in table.prices:
        assert price.gpu in gpus(), price
        assert datetime.date.fromisoformat(price.known_on) < datetime.date(2026, 12, 1)
        assert price.source.startswith("https://")
        if price.spot_usd_per_hour is not None:
            assert price.spot_usd_per_hour < price.on_demand_usd_per_hour
    assert {price.provider for price in table.prices} == {"AWS", "Google Cloud", "Azure", "Lambda"}
    assert len({(price.provider, price.instance) for price in table.prices}) == len(table.prices)
    assert "not fetched" in table.notice


def test_a_table_of_the_users(tmp_path):
    table = json.loads(TABLE.read_text())
    table["prices"] = [table["prices"][0] | {"on_demand_usd_per_hour": 1.0}]
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(table))
    assert [price.on_demand_usd_per_hour for price in read_prices(path).prices] == [1.0]
    table["prices"][0]["on_demand_usd_per_hour"] = -1.0
    path.write_text(json.dumps(table))
    with pytest.raises(UserError, match=r"prices\.json: cannot be read as a price table .*on_demand_usd_per_hour"):
        read_prices(path)


# The share of the peak is computed from dense peaks, and unknown without one.


H200 = {"gpu_name": "NVIDIA H200", "gpu_memory_bytes": 150_754_820_096, "world_size": 4}
SMALL = PRESETS["small"]
PEAK = 989.4e12 / (6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024)
"""Tokens per second at which one H200 would reach its dense bf16 peak."""


def test_four_gpus_at_half_their_dense_peak():
    found = utilisation(SMALL, H200, seq_length=1024, precision="bf16")
    assert found.mfu(4 * PEAK / 2) == pytest.approx(0.5)
    assert (found.per_device(4000.0), found.mfu(None), found.per_device(None)) == (1000, None, None)
    in_fp32 = utilisation(SMALL, H200, seq_length=1024, precision="fp32")
    assert in_fp32.mfu(4 * PEAK / 2) == pytest.approx(0.5 * 989.4 / 66.9)


@pytest.mark.parametrize(
    "hardware",
    [
        {},
        {"gpu_name": None, "gpu_memory_bytes": None, "world_size": 2},
        H200 | {"gpu_name": "NVIDIA H300"},
        H200 | {"gpu_memory_bytes": 75_000_000_000},
        H200 | {"gpu_name": "Tesla T4", "gpu_memory_bytes": 15_828_320_256},
        H200 | {"world_size": None},
    ],
    ids=["nothing", "cpu", "unknown GPU", "slice", "no bf16", "other ranks"],
)
def test_without_a_peak_the_share_is_unknown(hardware):
    found = utilisation(SMALL, hardware, seq_length=1024, precision="bf16")
    assert found.mfu(1e6) is None
    assert found.per_device(1e6) == (1e6 / hardware["world_size"] if hardware.get("world_size") else None)


HERE = {"device": "cpu", "cpu_name": "Some Processor", "cpu_count": 2}
ON_CPU = HERE | {"gpu_name": None, "threads_per_device": 1, "local_world_size": 2, "world_size": 2}


def on_cpu(precision: str = "fp32", **hardware: object) -> float | None:
    """The share that a throughput of a million FLOP/s for each of two devices is."""
    calibration = parse_as(json.dumps(RECORD | {"hardware": HERE}).encode(), Calibration)
    found = utilisation(SMALL, ON_CPU | hardware, seq_length=1024, precision=precision, calibration=calibration)
    return found.mfu(2e6 / found.flops_per_token)


@pytest.mark.parametrize(
    "hardware", [{"cpu_name": "Other"}, {"cpu_count": 4}, {"threads_per_device": 2}, {"local_world_size": None}, {}]
)
def test_on_a_cpu_the_peak_is_the_fastest_product_that_was_measured_there(hardware):
    """A calibration of other hardware or of another precision says nothing."""
    assert on_cpu() == pytest.approx(1e6 / 4e11)
    assert on_cpu("fp32" if hardware else "bf16", **hardware) is None


# Rates fitted to measured steps.


def slower(setup: Setup, *, compute: float, communication: float) -> MeasuredStep:
    """A step on a machine that computes and sends slower than its rates say; reading memory costs nothing there."""
    rates = machine(memory=1e30).rates
    for precision in ("fp32", "bf16"):
        rates = rates.in_precision(precision, slower=compute)
    true = _with(rates.scaled(compute=1, communication=communication))
    return MeasuredStep(setup=setup, machine=machine(memory=1e30), seconds=predict_step(setup, true).seconds)


def _with(rates) -> Machine:
    return machine(**{name: getattr(rates, name) for name in vars(rates)})


def test_a_fit_finds_the_factors_of_a_machine(setup):
    setups = [setup(run_type="baseline", world_size=1), setup(run_type="ddp"), setup("zero2"), setup("tensor")]
    found = fit([slower(each, compute=1.7, communication=2.5) for each in setups])
    assert found.compute == {"fp32": pytest.approx(1.7, rel=1e-4)}
    assert found.communication == pytest.approx(2.5, rel=1e-4)
    assert found.spread == pytest.approx(0, abs=1e-4)
    unseen = slower(setup("sequence"), compute=1.7, communication=2.5)
    fitted = found.applied(unseen.machine)
    step = predict_step(unseen.setup, fitted)
    assert step.seconds == pytest.approx(unseen.seconds, rel=1e-4)
    assert step.least < step.seconds < step.most
    assert "fitted to measured steps (4)" in fitted.basis


def test_each_precision_has_its_own_factor(setup):
    alone = {"run_type": "baseline", "world_size": 1}
    steps = [
        slower(setup(**alone), compute=2.0, communication=1),
        slower(setup(**alone, precision="bf16"), compute=3.0, communication=1),
    ]
    found = fit(steps)
    assert found.compute == {"bf16": pytest.approx(3.0), "fp32": pytest.approx(2.0)}
    assert found.communication == 1


def test_the_spread_is_what_a_fit_to_the_others_misses(setup):
    """The first step is predicted from the others as the root of 2 x 4. All three miss it less: by 1."""
    alone = setup(run_type="baseline", world_size=1)
    steps = [slower(alone, compute=each, communication=1) for each in (1.0, 2.0, 4.0)]
    assert fit(steps).compute == {"fp32": pytest.approx(2.0)}
    assert fit(steps).spread == pytest.approx(8**0.5 - 1)
    assert fit(steps[1:2]).spread == pytest.approx(0.5)  # without it nothing is fitted


# A short calibration of this machine, and machines made from calibrations.


def test_a_machine_has_the_rates_of_as_many_devices_as_work(calibration):
    record = read_calibration(calibration)
    alone, together = calibrated_machine(record, devices=1), calibrated_machine(record, devices=2)
    assert [each.rates.matrix_at("fp32", width=768, rows=256) for each in (alone, together)] == [2e11, 1e11]
    assert together.rates.matrix_at("fp32", width=768, rows=1024) == 4e11
    assert alone.rates.attention_at("fp32", head_size=64, length=256) == pytest.approx(2e10**0.5 * 1e10**0.5)
    assert together.rates.bus == {2: 1e9}
    asked = [
        ("all_reduce", "bf16"),
        ("reduce", "bf16"),
        ("all_gather", "bf16"),
        ("all_gather", "fp32"),
        ("send", "fp32"),
    ]
    assert [together.rates.slowness_of(*each) for each in asked] == [2, 2, 1 / 4, 1 / 4, 1]
    assert calibrated_machine(record, devices=8) == together == calibrated_machine(record)
    assert not together.assumed
    assert together.slowest.memory == pytest.approx(together.rates.memory / ALLOWANCE)
    assert together.fastest.bus[2] == pytest.approx(together.rates.bus[2] * ALLOWANCE)


def test_this_machine_is_measured_and_planned_for(plan, tmp_path):
    """Only that figures are there: how fast the machine is, is not a test's business."""
    written, following = plan("--calibrate --seconds 1 --gpus 2").splitlines()
    assert written == "checkpoint/calibration.json"
    assert "13M parameters" in plan(shlex.join(shlex.split(following.removeprefix("next: "))[2:]))
    assert [each.name for each in (tmp_path / "checkpoint").iterdir()] == ["calibration.json"]
    calibration = read_calibration(tmp_path / written)
    assert [each.devices for each in calibration.ceilings] == [1, 2]
    for each in calibration.ceilings:
        figures = list(_numbers({name: value for name, value in vars(each).items() if value is not None}))
        assert all(figure > 0 for figure in figures)
        assert len(figures) == (1 + 18 + 12 + 2 + 2 + 3) + 8 * (each.devices > 1)
    assert calibration.disk_bytes_per_sec > 0
    assert "2 devices of 1 core" in calibration.machine
    step = json.loads(plan("--model_size tiny --seq_length 256 --gpus 2 --tokens 1e6 --json"))["step"]
    assert not step["assumed"]
    assert step["parts"]["communication"] > 0


def _numbers(value):
    for inner in value.values() if isinstance(value, dict) else ():
        yield from _numbers(inner)
    if not isinstance(value, dict):
        yield value
