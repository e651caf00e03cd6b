"""Machines: the table of GPUs, prices, calibrations, and the share of a peak that is reached."""

import datetime
import json
import os
import random
import shlex
import statistics
from dataclasses import replace

import pytest
from planner_records import RECORD, gpu_record, machine

from dsgpt.common.json_files import JsonError, parse_as
from dsgpt.model.config import PRESETS
from dsgpt.planner.hardware import PRICES, find_gpu, gpus, read_prices, recognise
from dsgpt.planner.options import PlanOptions
from dsgpt.planner.rates import (
    Calibration,
    Machine,
    calibrated_machine,
    datasheet_machine,
    read_calibration,
    utilisation,
)
from dsgpt.planner.request import MOST, OwnRun, corrected, own_runs
from dsgpt.planner.setup import Setup, model_parameters, total
from dsgpt.planner.step_time import (
    START_SEC,
    MeasuredStep,
    best_save_every,
    fit,
    likely_sec,
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
    ("Quadro RTX 8000", 48601, "quadro-rtx-8000"),
    ("NVIDIA A10G", 23028, "a10g"),
    ("NVIDIA A10", 23028, "a10"),
    ("NVIDIA L4", 23034, "l4"),
    ("NVIDIA L40S", 46068, "l40s"),
    ("NVIDIA GeForce RTX 3090", 24576, "rtx-3090"),
    ("NVIDIA GeForce RTX 3090 Ti", 24564, "rtx-3090-ti"),
    ("NVIDIA RTX A6000", 49140, "rtx-a6000"),
    ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx-6000-ada"),
    ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
    ("A100-SXM4-40GB", 40536, "a100-40gb"),
    ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb"),
    ("NVIDIA H100 80GB HBM3", 81559, "h100-80gb"),
    ("NVIDIA H100 PCIe", 81559, "h100-pcie"),
    ("NVIDIA H200", 143771, "h200"),
    ("NVIDIA GH200 480GB", 97871, "gh200-96gb"),
    ("NVIDIA B200", 183359, "b200"),
    ("AMD Instinct MI300X", 196288, "mi300x"),
]
"""Names and MiB as drivers report them."""
OTHERS = [
    *(("NVIDIA GeForce RTX 3080 Ti", 12288), ("NVIDIA L40", 46068), ("NVIDIA A10M", 23028), ("", 0)),
    *(("NVIDIA A100-PCIE-40GB", 40536), ("NVIDIA H100 NVL", 95830), ("NVIDIA H200 NVL", 143771)),
    *(("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40192), ("NVIDIA H200", 143771 // 2)),
]


def test_a_gpu_is_known_by_what_its_driver_reports_and_no_other_is_taken_for_it():
    assert [recognise(name, mebibytes * MIB) for name, mebibytes, _ in REPORTED] == list(gpus().values())
    assert [key for _, _, key in REPORTED] == list(gpus())
    assert [recognise(name, mebibytes * MIB) for name, mebibytes in OTHERS] == [None] * len(OTHERS)


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
    length = PlanOptions(tokens=48 * 100 + 47, eval_every=10, val_tokens=96, save_every=40)
    found = run_time(ddp, machine(), step, length)
    assert found.steps == 100
    assert found.parts["steps"] == pytest.approx(100 * step.seconds)
    assert found.parts["validation"] == pytest.approx(10 * 6 * step.validation_micro_batch)
    assert found.parts["checkpoints"] == pytest.approx(3 * 12 * total(model_parameters(ddp.model)) / 1e6)
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert found.parts["start"] == START_SEC
    assert found.least < found.seconds < found.most
    only_at_the_end = run_time(ddp, machine(), step, PlanOptions(tokens=48 * 100, save_every=0))
    assert only_at_the_end.parts["checkpoints"] == pytest.approx(found.parts["checkpoints"] / 3)
    assert "validation" not in only_at_the_end.parts
    sgd = setup(run_type="ddp", top={"optimizer": {"type": "SGD", "params": {"lr": 1.0}}})
    assert run_time(sgd, machine(), step, length).parts["checkpoints"] == pytest.approx(found.parts["checkpoints"] / 3)
    seldom = run_time(ddp, machine(), step, replace(length, eval_every=30))  # after 30, 60, 90 and 100 steps
    assert seldom.parts["validation"] == pytest.approx(4 * 6 * step.validation_micro_batch)


def test_cost_of_whole_instances(plan):
    def offers(gpu: str, more: str) -> dict[str, dict]:
        found = json.loads(plan(f"--model_size small --gpu {gpu} --tokens 1e9 --json {more}"))
        hours = found["training"]["seconds"] / 3600
        return {each["offer"]: each | {"hourly": each["usd"] / hours} for each in found["costs"]}

    four = offers("t4", "--gpus 4 --precision fp16")
    assert four["AWS g4dn.12xlarge"]["hourly"] == pytest.approx(3.912)
    assert four["AWS g4dn.metal"]["hourly"] == pytest.approx(7.824)  # all of its 8 GPUs are paid
    assert "AWS g4dn.xlarge" not in four  # four machines are not one
    two = offers("h100-80gb", "--gpus 16")
    assert (two["AWS p5.48xlarge"]["instances"], two["AWS p5.48xlarge"]["hourly"]) == (2, pytest.approx(2 * 98.32))
    assert [each["usd"] for each in two.values()] == sorted(each["usd"] for each in two.values())
    listed = {f"{price.provider} {price.instance}, spot" for price in read_prices().prices if price.spot_usd_per_hour}
    assert set() < offers("a100-40gb", "--spot").keys() <= listed


@pytest.mark.parametrize("way", ["--gpu t4", "--instance g4dn.metal", "--gpu t4 --recommend"])
def test_the_users_price_table_replaces_ours(plan, calibration, way):
    table = json.loads(PRICES.read_text())
    (row,) = [row for row in table["prices"] if row["instance"] == "g4dn.metal"]
    (own := calibration.with_name("own.json")).write_text(
        json.dumps(table | {"prices": [row | {"on_demand_usd_per_hour": 5.0}]})
    )
    line = f"--model_size small --gpus 8 --micro_batch_size_per_gpu 1 --tokens 1e9 --precision fp16 {way}"
    found = json.loads(plan(f"{line} --prices {own} --json"))
    (cost,) = (found["ranked"][0]["plan"] if "ranked" in found else found)["costs"]
    assert (cost["offer"], cost["usd_per_hour"]) == ("AWS g4dn.metal", 5.0)


def test_every_row_of_the_table_and_its_network_is_dated_sourced_and_of_a_known_gpu():
    table = read_prices()
    for price in table.prices:
        assert price.gpu in gpus(), price
        assert datetime.date.fromisoformat(price.known_on) < datetime.date(2026, 12, 1)
        assert price.source.startswith("https://")
        if price.spot_usd_per_hour is not None:
            assert price.spot_usd_per_hour < price.on_demand_usd_per_hour
        assert price.on_demand_usd_per_hour or price.network_gbps, "a row that says nothing"
        pages = [price.network_source] * bool(price.network_gbps) + price.network_more_sources
        assert all(page.startswith("https://") for page in pages)
        assert bool(price.network_gbps) == bool(price.network_known_on) == bool(price.network_source), price
        assert pages or not (price.network_cards or price.gpu_link), price
        if price.network_known_on:
            assert datetime.date.fromisoformat(price.network_known_on) < datetime.date(2026, 12, 1)
        if price.gpu_link:  # else an instance of V100 without NVLink would be planned with it
            kind = gpus()[price.gpu].interconnect.kind
            assert kind.split()[0] == price.gpu_link.partition(",")[0].split()[0].replace("NVSwitch", "NVLink"), price
    assert {price.provider for price in table.prices} == {"AWS", "Google Cloud", "Azure", "Lambda"}
    assert len({(price.provider, price.instance) for price in table.prices}) == len(table.prices)
    assert "not fetched" in table.notice
    of = {price.instance: (price.network_gbps, price.network_cards) for price in table.prices}
    assert (of["p4d.24xlarge"], of["p5.48xlarge"], of["p3dn.24xlarge"]) == ((400, 4), (3200, 32), (100, 1))
    assert (of["a3-highgpu-8g"], of["ND96asr v4"], of["ND40rs v2"]) == ((800, 4), (1600, 8), (100, None))
    assert {price.provider for price in table.prices if not price.network_gbps} <= {"Lambda", "Azure", "Google Cloud"}


def test_a_page_about_a_gpu_that_was_read_is_dated():
    read = {gpu.key: [each for each in gpu.sources if each.read_on] for gpu in gpus().values()}
    assert all(datetime.date.fromisoformat(each.read_on) for found in read.values() for each in found)
    added = {"rtx-3090-ti", "a10", "rtx-a6000", "rtx-6000-ada", "quadro-rtx-8000", "gh200-96gb", "mi300x"}
    assert added <= {key for key, found in read.items() if found}


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


def test_on_a_cpu_the_peak_is_the_fastest_product_that_was_measured_there():
    """A calibration of other hardware or of another precision says nothing."""
    here = {"device": "cpu", "cpu_name": "Some Processor", "cpu_count": 2}
    hardware = here | {"gpu_name": None, "threads_per_device": 1, "local_world_size": 2, "world_size": 2}
    calibration = parse_as(json.dumps(RECORD | {"hardware": here}).encode(), Calibration)

    def share(precision: str = "fp32", **changes: object) -> float | None:
        """That a throughput of a million FLOP/s for each of two devices is."""
        found = utilisation(SMALL, hardware | changes, seq_length=1024, precision=precision, calibration=calibration)
        return found.mfu(2e6 / found.flops_per_token)

    assert share() == pytest.approx(1e6 / 4e11)
    others = ({"cpu_name": "Other"}, {"cpu_count": 4}, {"threads_per_device": 2}, {"local_world_size": None})
    assert [share("bf16"), *(share(**each) for each in others)] == [None] * 5


# Rates fitted to measured steps.


def slower(setup: Setup, *, compute: float, communication: float) -> MeasuredStep:
    """A step on a machine that computes and sends slower than its rates say; reading memory costs nothing there."""
    here = machine(memory=1e30)
    rates = here.rates.in_precision(setup.precision, slower=compute).scaled(compute=1, communication=communication)
    return MeasuredStep(setup=setup, machine=here, seconds=predict_step(setup, replace(here, rates=rates)).seconds)


def test_a_fit_finds_the_factors_of_a_machine_for_each_precision(setup):
    setups = [setup(run_type="baseline", world_size=1), setup(run_type="ddp"), setup("zero2"), setup("tensor")]
    low = [setup(run_type="ddp", world_size=ranks, precision="bf16") for ranks in (2, 4)]
    steps = [slower(each, compute=1.7, communication=2.5) for each in setups]
    found = fit([*steps, *(slower(each, compute=3.0, communication=2.5) for each in low)])
    assert found.compute == {"bf16": pytest.approx(3.0, rel=1e-4), "fp32": pytest.approx(1.7, rel=1e-4)}
    assert found.communication == pytest.approx(2.5, rel=1e-4)
    assert found.spread == pytest.approx(0, abs=1e-4)
    unseen = slower(setup("sequence"), compute=1.7, communication=2.5)
    fitted = found.applied(unseen.machine)
    step = predict_step(unseen.setup, fitted)
    assert step.seconds == pytest.approx(unseen.seconds, rel=1e-4)
    assert step.least < step.seconds < step.most
    assert "fitted to measured steps (6)" in fitted.basis


def test_the_spread_is_what_a_fit_to_the_others_misses(setup):
    """The first step is predicted from the others as the root of 2 x 4. All three miss it less: by 1."""
    alone = setup(run_type="baseline", world_size=1)
    steps = [slower(alone, compute=each, communication=1) for each in (1.0, 2.0, 4.0)]
    assert fit(steps).compute == {"fp32": pytest.approx(2.0)}
    assert fit(steps).spread == pytest.approx(8**0.5 - 1)
    assert fit(steps[1:2]).spread == pytest.approx(0.5)  # without it nothing is fitted


# A calibration replaces a datasheet's constants one by one.


H100 = datasheet_machine(find_gpu("h100-80gb"), devices=2)


def calibrated(record: dict, **arguments: object) -> Machine:
    return calibrated_machine(parse_as(json.dumps(record).encode(), Calibration), **arguments)


def test_a_calibrated_gpu_keeps_of_its_datasheet_what_no_calibration_measures():
    found = calibrated(gpu_record())
    rates, sheet = found.rates, H100.rates
    kept = ("contention", "gathers_hidden", "odd_heads", "host_memory", "network")
    assert [getattr(rates, name) for name in kept] == [getattr(sheet, name) for name in kept]
    assert found.unmeasured == ("memory of the host",)
    assert "(assumed from its datasheet: memory of the host)" in found.basis
    assert (rates.kernel_sec, rates.host_sec) == (1.5e-6, 7e-6)
    assert rates.matrix["bf16"][768][256] == 1e13
    assert rates.half_width == rates.half_rows == 0  # small shapes are slow as measured, and not once more
    assert rates.attention["bf16"] == {64: {1024: 1e14}, 128: {1024: 2e14}}
    assert found.precisions == ("bf16",)
    assert found.slowest.kernel_sec == pytest.approx(1.25 * 1.5e-6)
    assert found.slowest.host_memory == H100.slowest.host_memory
    assert calibrated(gpu_record(), network=5e10).rates.network == pytest.approx(4 * sheet.network)
    between = {"timestamp_utc": "2026-11-27", "machines": 2, "transport": "nccl", "bytes_per_sec": 2e10}
    measured = calibrated(gpu_record() | {"network": between | {"latency_sec": 1e-5}})
    assert measured.rates.rings_power == 0 < rates.rings_power == sheet.rings_power  # measured with all ranks at once


def test_without_a_datasheet_the_whole_range_is_scaled(setup):
    """Also the link that stands for an unmeasured network: a step at the fastest rates is the fastest."""
    found = calibrated(RECORD)
    assert found.fastest.network == pytest.approx(1.25 * found.rates.network)
    step = predict_step(setup("zero3", world_size=8), found)
    assert step.least < step.seconds < step.most


@pytest.mark.parametrize(
    ("lacking", "fields", "name"),
    [
        ("matrix_flops_per_sec", ["matrix", "half_width", "half_rows"], "matrix products"),
        ("attention_flops_per_sec", ["attention"], "attention"),
        ("logits_per_sec", ["logits"], "memory"),
        ("triad_bytes_per_sec", ["memory"], "memory"),
        ("kernel_sec", ["kernel_sec", "host_apart"], "start of an operation"),
        ("operation_sec", ["host_sec", "host_apart"], None),
        ("host_link_bytes_per_sec", ["host_link"], "link to the host"),
        ("bus_bytes_per_sec", ["bus", "collective_sec", "slowness"], "link between GPUs"),
    ],
)
def test_a_datasheet_stands_for_what_a_calibration_lacks(lacking, fields, name):
    """And for nothing else; a CPU, and a GPU that the table lacks, have none."""
    everything, record = calibrated(gpu_record()), gpu_record()
    for each in record["ceilings"]:
        del each[lacking]
    found = calibrated(record)
    assert [getattr(found.rates, each) for each in fields] == [getattr(H100.rates, each) for each in fields]
    assert replace(found.rates, **{each: getattr(everything.rates, each) for each in fields}) == everything.rates
    assert [getattr(found.slowest, each) for each in fields] == [getattr(H100.slowest, each) for each in fields]
    assert set(found.unmeasured) >= {name or "memory of the host"}
    if lacking not in {"kernel_sec", "bus_bytes_per_sec"}:
        for hardware in ({"device": "cpu"}, record["hardware"] | {"gpu_name": "NVIDIA H300"}):
            with pytest.raises(JsonError, match=rf"ceilings: have no {lacking}"):
                calibrated(record | {"hardware": hardware})


def test_an_unmeasured_rate_of_a_calibrated_gpu_is_an_assumption_of_the_plan(plan, calibration):
    """A plan says which rates are assumed, and what other values of them would change; of measured ones, nothing."""
    calibration.write_text(json.dumps(gpu_record(matrix_flops_per_sec={})))
    lines = plan(f"--model_size small --gpus 2 --strategy zero1 --tokens 1e9 --machine {calibration}").splitlines()
    (rates,) = [line for line in lines if line.startswith("rates: ")]
    assert "with 2 of 2 devices at work (assumed from its datasheet: matrix products, memory of the host);" in rates
    assert [line[:24] for line in lines if line.startswith("assumed: ")] == ["assumed: matrix products"]


def test_a_gpu_waits_for_the_host_whose_starts_were_measured(setup):
    """A block's forward pass has 14 operations; for tiny ones the GPU needs less time than the host."""
    tiny, machine = setup(run_type="baseline", world_size=1, precision="bf16"), calibrated(gpu_record())
    operations = 3 * 14 * tiny.model.n_layer  # of three micro batches
    assert predict_step(tiny, machine).parts["forward"] == pytest.approx(operations * 7e-6)
    slow = replace(machine, rates=replace(machine.rates, kernel_sec=1e-3))
    assert predict_step(tiny, slow).parts["forward"] > operations * 1e-3


def test_a_message_starts_as_messages_of_every_size_say():
    """All-reduce: 50 microseconds, and a nanosecond for each byte, as its rate says. All-gather: an eighth of that."""

    def start(**changes: object) -> float:
        return calibrated(gpu_record(**changes)).rates.collective_sec[2]

    rates = calibrated(gpu_record()).rates
    assert (rates.bus, rates.slowness["all_gather"]["fp32"]) == ({2: 1e9}, 0.25)
    assert start() == pytest.approx(5e-5)  # and not the 100 of a sum of one number
    assert start(message_sec={}) == 1e-4
    sizes = {1 << 16: 1.2e-4, 1 << 20: 1.4e-3}  # they start after 54 and 351 microseconds
    assert start(message_sec={"all_reduce": sizes}) == pytest.approx(5.4464e-5)  # the second is 21% off, the first 0
    slow_and_fast = {"all_reduce": {1: 1e-3, 2: 1.1e-3, 3: 1.2e-3}, "all_gather": {1: 1e-5}}
    assert start(message_sec=slow_and_fast) == pytest.approx(1e-3, rel=1e-3)  # the fast one does not outweigh others
    too_fast = {"all_reduce": {1 << 20: 1e-4}}  # than the rate: no message starts before it is sent
    assert start(message_sec=too_fast) == 1e-4


# A short calibration of this machine, and machines made from calibrations.


@pytest.mark.long
def test_this_machine_is_measured_and_planned_for(plan, tmp_path):
    """Only that figures are there: how fast the machine is, is not a test's business."""
    written, following = plan("--calibrate --seconds 1 --gpus 2").splitlines()
    assert written == "checkpoint/calibration.json"
    assert "13M parameters" in plan(shlex.join(shlex.split(following.removeprefix("next: "))[2:]))
    assert [each.name for each in (tmp_path / "checkpoint").iterdir()] == ["calibration.json"]
    calibration = read_calibration(tmp_path / written)
    assert [each.devices for each in calibration.ceilings] == [1, 2]
    assert "2 devices of 1 core" in calibration.machine
    step = json.loads(plan("--model_size tiny --seq_length 256 --gpus 2 --tokens 1e6 --json"))["step"]
    assert not step["assumed"]
    assert step["parts"]["communication"] > 0


# Runs that were held against a plan correct the next plan of their machine.


MACHINE = datasheet_machine(find_gpu("h100-80gb"))
HARDWARE = {"device": "cuda", "gpu_name": "NVIDIA H100 80GB HBM3", "gpu_memory_bytes": 85_000_000_000}
PLAN = {"fingerprint": MACHINE.fingerprint, "planned_tokens_per_sec": 1000.0, "tokens_per_sec": 800.0}


def test_the_newest_runs_of_the_machine_count(tmp_path):
    times = iter(range(1, 20))

    def write(name, *, hardware=None, others=0.0, **plan):
        """The record of a run, newer than the last."""
        path = tmp_path / name / "training_metrics.json"
        path.parent.mkdir()
        segments = [{"cpu_share_of_others": 0.0}, {"cpu_share_of_others": others}]
        values = {"hardware": HARDWARE | (hardware or {}), "plan": PLAN | plan, "segments": segments}
        path.write_text(json.dumps(values))
        os.utime(path, (age := next(times), age))
        return path

    for number, measured in enumerate([100.0, 700.0, 800.0, 900.0]):
        write(f"run {number}", tokens_per_sec=measured)
    write("on another GPU", hardware={"gpu_name": "NVIDIA A100-SXM4-80GB"})
    write("on the CPU", hardware={"device": "cpu"})
    write("planned with other rates", fingerprint="0" * 12)
    write("with other settings", planned_tokens_per_sec=None)
    write("beside other programs", others=0.5)
    write("too short", tokens_per_sec=None)
    write("torn").write_text("{")
    assert [run.measured for run in own_runs(tmp_path, MACHINE)] == [900.0, 800.0, 700.0]
    assert own_runs(tmp_path / "nowhere", MACHINE) == []


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("zero1", {"run_type": "fsdp", "world_size": 8}),
        ("zero3_offload", {"run_type": "optimized", "world_size": 8}),
        ("tensor", {"run_type": "optimized", "world_size": 2}),
    ],
)
@pytest.mark.parametrize("truth", [1.5, 0.6])
def test_a_correction_settles_at_the_speed_of_the_runs(setup, recipe, changes, truth):
    """Each run is compared with the plan before corrections, so that they do not grow from run to run."""
    planned = setup(recipe, model=PRESETS["xl"], seq_length=1024, micro_batch_size=16, **changes)
    true_sec, machine = truth * likely_sec(planned, MACHINE), MACHINE
    for _ in range(4):
        run = OwnRun(planned=1 / likely_sec(planned, machine.uncorrected or machine), measured=1 / true_sec)
        machine = corrected(MACHINE, [run] * 3)
        assert machine.fingerprint == MACHINE.fingerprint
    assert likely_sec(planned, machine) == pytest.approx(true_sec, rel=0.05)  # Python between layers is no rate


def test_the_median_of_the_runs_counts_within_bounds():
    runs = [OwnRun(planned=1000.0, measured=measured) for measured in (500.0, 800.0, 820.0)]
    slower = corrected(replace(MACHINE, basis="x"), runs)
    assert slower.rates.memory == MACHINE.rates.memory / 1.25
    assert slower.basis == "x; corrected by your last 3 runs here: planned 1,000, measured 500 to 820 tokens/s"
    assert corrected(MACHINE, [OwnRun(planned=1000.0, measured=1.0)]).rates.memory == MACHINE.rates.memory / MOST
    assert corrected(MACHINE, []) == MACHINE
