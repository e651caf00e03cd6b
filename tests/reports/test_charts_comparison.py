"""comparison.md and the closing table: percentages with the right sign, labels, and no division by zero."""

import pytest
from chart_records import flat_record, record, step_lines, write_run

from dsgpt.charts.comparison import comparison_markdown, console_summary, improvement, shorten, speed_up
from dsgpt.dashboard.summaries import read_recorded
from dsgpt.record.runs import read_run
from dsgpt.training.run import _earlier_record


@pytest.fixture
def compared(tmp_path):
    """comparison.md of the given records by name, as its lines and as table cells by row label."""

    def compare(**records):
        runs = [
            read_run(write_run(tmp_path / name, values, lines=step_lines()), name=name)
            for name, values in records.items()
        ]
        text = comparison_markdown(runs)
        cells = [
            [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"
        ]
        return text, {row[0]: row[1:] for row in cells}

    return compare


@pytest.mark.parametrize(
    ("version", "later"), [(None, False), ("1.9", False), ("2.1", False), ("2.10", True), (9, True)]
)
def test_every_reader_says_that_a_record_is_of_a_later_schema(tmp_path, version, later):
    write_run(tmp_path / "run", record(schema_version=version, saves=[]))
    folder, line = tmp_path / "run", f"has schema {version}, and this program knows 2.1: "
    run = read_run(folder, name="a")
    for said in (
        console_summary([run]),
        comparison_markdown([run]).replace("\\_", "_"),
        read_recorded(folder, name="a").problem,
        _earlier_record(folder)[1],
    ):
        assert (line in said) == later


@pytest.mark.parametrize(
    ("base", "other", "lower_is_better", "percent"),
    [
        (100, 50, True, 50),
        (100, 150, True, -50),
        (100, 150, False, 50),
        (100, 50, False, -50),
        (100, 100, True, 0),
        (100, 0, True, 100),
        (0, 50, True, None),
        (0, 0, False, None),
        (None, 50, True, None),
        (100, None, False, None),
    ],
)
def test_improvement_is_positive_when_better(base, other, lower_is_better, percent):
    assert improvement(base, other, lower_is_better=lower_is_better) == percent


def test_the_table_holds_values_speed_up_and_signed_improvements(compared):
    text, rows = compared(
        base=record(),
        fast=record(
            summary__train_time_sec=40.0,
            summary__mean_tokens_per_sec_global=256.0,
            summary__final_val_loss=3.25,
            summary__peak_rss_bytes_rank0=1.5 * 2**30,
            inference__latency_sec=0.4,
        ),
    )
    assert "\nsame work: yes\n" in text
    assert "\nequal loss: yes (fast against base:" in text
    assert "**positive is better**" in text and "machine: Fixture CPU, 2 cores (instruction sets:" in text
    assert rows["training time (s)"] == ["100.0", "40.0", "+60.0 %"]
    assert rows["tokens per second, all devices"] == ["102", "256", "+150.0 %"]
    assert rows["speed-up in training time"][:2] == ["1.00x", "2.50x"]
    assert rows["final validation loss (nats per token)"] == ["3.2500", "3.2500", "0.0 %"]
    assert rows["inference latency, batch 1 (s)"] == ["0.500", "0.400", "+20.0 %"]
    assert rows["peak host memory (RSS), rank 0 (GB)"] == ["1.07", "1.61", "-50.0 %"]
    assert not [label for label in rows if "GPU" in label]
    assert "host memory is the resident set of rank 0's process alone" in text


@pytest.mark.parametrize(
    ("low", "high", "repetitions", "judgement"),
    [(0.45, 0.6, 15, "no difference"), (0.35, 0.44, 15, "+20.0 %"), (0.45, 0.6, 1, "+20.0 %")],
    ids=["ranges overlap", "ranges are apart", "one figure is not judged"],
)
def test_latencies_are_better_only_if_their_ranges_are_apart(compared, low, high, repetitions, judgement):
    several = {"inference__latency_min_sec": 0.45, "inference__latency_max_sec": 0.7, "inference__repetitions": 15}
    other = {"inference__latency_min_sec": low, "inference__latency_max_sec": high}
    other |= {"inference__repetitions": repetitions, "inference__latency_sec": 0.4}
    _, rows = compared(base=record(**several), other=record(**other))
    assert rows["inference latency, batch 1 (s)"] == ["0.500", "0.400", judgement]


def test_figures_of_unequal_work_are_labelled(compared):
    text, rows = compared(
        base=record(), big=record(training_config__global_batch_size=32, summary__train_time_sec=25.0)
    )
    assert "\nsame work: no (global batch 8 vs 32)\n" in text
    assert rows["speed-up in training time"][1] == "4.00x (not equal work)"
    assert "big vs base, NOT EQUAL WORK" in text


def test_unknown_work_labels_the_speed_up(compared):
    text, rows = compared(base=flat_record(), new=record())
    assert "\nsame work: unknown (base did not record its work)\n" in text
    assert rows["speed-up in training time"][1] == "1.00x (work unknown)"
    assert rows["peak host memory (RSS), rank 0 (GB)"] == ["unknown", "1.07", "unknown"]


def test_latencies_of_different_lengths_are_not_compared(compared):
    text, rows = compared(base=record(), long=record(inference__new_tokens=100, inference__latency_sec=3.0))
    assert rows["inference latency, batch 1 (s)"] == ["0.500", "3.000", "unknown"]
    assert "NOT EQUAL INFERENCE: new tokens 16 vs 100" in text


def test_gpu_and_host_memory_stay_apart(compared):
    _, rows = compared(cpu=record(), gpu=record(summary__max_cuda_mem_allocated_bytes_rank0=3 * 2**30))
    assert rows["peak GPU memory allocated, rank 0 (GB)"] == ["unknown", "3.22", "unknown"]
    assert rows["peak host memory (RSS), rank 0 (GB)"] == ["1.07", "1.07", "0.0 %"]


def test_zeros_are_shown_and_never_divided_by(compared):
    zeros = record(
        summary__train_time_sec=0,
        summary__mean_tokens_per_sec_global=0,
        summary__final_val_loss=0,
        summary__peak_rss_bytes_rank0=0,
        inference__latency_sec=0,
        inference__tokens_per_sec=0,
    )
    _, rows = compared(zero=zeros, other=record())
    assert rows["training time (s)"] == ["0.0", "100.0", "unknown"]
    assert rows["speed-up in training time"][:2] == ["unknown", "unknown"]
    assert rows["inference tokens per second"] == ["0.0", "32.0", "unknown"]


def test_speed_up_over_a_run_of_no_time_is_unknown(tmp_path):
    base = read_run(write_run(tmp_path / "a", record()), name="a")
    instant = read_run(write_run(tmp_path / "b", record(summary__train_time_sec=0)), name="b")
    assert speed_up(base, instant) is None and speed_up(instant, base) is None
    assert speed_up(base, base) == 1.0


def test_every_other_run_is_compared_with_the_first(compared):
    text, rows = compared(
        base=record(), slow=record(summary__train_time_sec=200.0), quick=record(summary__train_time_sec=50.0)
    )
    assert rows["training time (s)"] == ["100.0", "200.0", "50.0", "-100.0 %", "+50.0 %"]
    assert text.count("equal loss: yes") == 2


def test_names_cannot_break_the_table(tmp_path):
    runs = [read_run(write_run(tmp_path / str(i), record()), name=name) for i, name in enumerate(["a|b", "*x*_y_<b>"])]
    header = next(line for line in comparison_markdown(runs).splitlines() if line.startswith("|  |"))
    assert header == r"|  | a\|b | \*x\*\_y\_\<b> | \*x\*\_y\_\<b> vs a\|b |"


def test_notes_and_partial_runs_are_shown(compared):
    text, _ = compared(base=record(), cut=record(status="interrupted", resumed_from="step-00000200"))
    assert "**PARTIAL RUN: cut is interrupted**" in text
    assert "- cut: resumed from step-00000200" in text


def test_the_closing_table_has_figures_and_verdicts(tmp_path):
    values = record(summary__train_time_sec=40.0)
    runs = [
        read_run(write_run(tmp_path / name, record_, lines=step_lines()), name=name)
        for name, record_ in (("base", record()), ("zero1", values))
    ]
    lines = console_summary(runs).splitlines()
    assert all(title in lines[0] for title in ("time (s)", "tokens/s", "speed-up", "val loss", "inference (s)"))
    assert lines[2].split() == ["zero1", "40.0", "102", "2.50x", "3.5000", "3.2500", "0.500"]
    assert lines[3] == "same work: yes"
    assert lines[4].startswith("equal loss: yes")


def test_long_names_keep_both_ends():
    assert shorten("baseline-on-one-device-bs32", 15) == "baselin…ce-bs32"
    assert shorten("short", 5) == "short"


def test_the_lowest_epoch_mean_is_left_out_where_there_is_one_epoch(compared):
    label = "best train loss, lowest epoch mean"
    single = record(epochs=record()["epochs"][:1])
    assert label not in compared(a=single, b=single)[1]
    assert label in compared(a=single, b=record())[1]


def test_every_scheduler_setting_has_a_row_and_nothing_is_cut(compared):
    params = {f"a_setting_with_a_long_name_{i}": 1000 + i for i in range(9)} | {"last": None, "text": "x" * 200}
    params["link"] = "[x](https://y)"
    scheduler = {"type": "T", "params": params}
    _, rows = compared(a=record(training_config__scheduler=scheduler), b=record(), c=flat_record())
    assert rows["scheduler type"] == ["T", "WarmupCosineLR", "unknown"]
    assert rows[r"scheduler params a\_setting\_with\_a\_long\_name\_8"] == ["1008", "absent", "unknown"]
    assert rows["scheduler params last"] == ["not given", "absent", "unknown"]
    assert rows["scheduler params text"][0] == "x" * 200
    assert rows["scheduler params link"][0] == r"[x]\(https://y)"
    assert rows["optimizer settings betas"][0] == "[0.9, 0.95]"
    assert not [label for label, cells in rows.items() if "…" in "".join(cells) and "data" not in label]


def test_a_scheduler_of_another_form_is_shown_whole(compared):
    _, rows = compared(a=record(training_config__scheduler="y" * 60), b=record())
    assert rows["scheduler"][1] == "type WarmupCosineLR, params warmup\\_num\\_steps 4"


def test_inference_differences_are_described_as_noise(compared):
    text, _ = compared(a=record(), b=record())
    assert text.index("## Results") < text.index("are measurement noise.") < text.index("## Work")


@pytest.mark.parametrize(("steps", "cell"), [(3, "fewer than 4 steps"), (4, "unknown"), (None, "unknown")])
def test_a_run_too_short_for_timing_is_labelled(compared, steps, cell):
    changes = {"summary__mean_tokens_per_sec_global": None, "train_throughput": None, "summary__optimizer_steps": None}
    epoch = record()["epochs"][0] | {"optimizer_steps": steps}
    _, rows = compared(a=record(epochs=[epoch], **changes), b=record())
    assert rows["tokens per second, all devices"] == [cell, "102", "unknown"]
