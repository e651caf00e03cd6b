"""The command of the charts, and comparison.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from chart_records import flat_record, record, scaling, step_lines, write_run, write_sweep
from messages import without_paths
from small_run import REPOSITORY

from dsgpt.charts import command
from dsgpt.charts.comparison import comparison_markdown, console_summary, improvement, shorten
from dsgpt.charts.themes import DARK
from dsgpt.common.command_line import exit_code_of
from dsgpt.dashboard.reading import recorded_of
from dsgpt.record.provenance import PARAGRAPH
from dsgpt.record.runs import read_run
from dsgpt.training.run import _earlier_record

# The command: what it writes, which mistakes it reports, and what it does not import.


HOST = "peak host memory (RSS), rank 0 (GB)"
SCRIPT = REPOSITORY / "charts" / "generate_charts.py"
CHARTS = {"training_time", "throughput", "inference_latency", "inference_throughput", "peak_memory", "overview"}
CHARTS |= {"loss_vs_step", "loss_vs_time", "loss_vs_tokens", "latency_vs_throughput"}
PICTURES = {f"{name}.{form}" for name in CHARTS for form in ("png", "svg")}


def main(arguments: list[str]) -> int:
    """The exit code of the command, after its error lines."""
    return exit_code_of(lambda: command.main(arguments))


@pytest.fixture
def two_runs(tmp_path):
    a = write_run(tmp_path / "A", record(), lines=step_lines())
    b = write_run(tmp_path / "B", record(summary__train_time_sec=50.0), lines=step_lines(seconds=1.25))
    return a, b


def test_two_runs_from_any_folder_in_two_processes_the_same_bytes(tmp_path, two_runs, capsys, monkeypatch):
    """In both formats. An SVG of Matplotlib has a date and random ids unless it is told not to."""
    words = ["--baseline-json", str(two_runs[0]), "--optimized-json", str(two_runs[1])]
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "same work: yes" in done.stdout and "2.00x" in done.stdout and "charts: charts" in done.stdout
    first = {path.name: path.read_bytes() for path in (tmp_path / "charts").iterdir()}
    assert set(first) == PICTURES | {"comparison.md"}
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    assert capsys.readouterr().out == done.stdout
    assert {path.name: path.read_bytes() for path in (tmp_path / "charts").iterdir()} == first


def test_the_comparison_says_whether_the_sources_of_committed_records_have_changed(tmp_path, two_runs):
    def paragraphs(*runs: Path) -> list[str]:
        named = [word for path in runs for word in ("--run", f"{path.parent.name}={path.parent}")]
        output = tmp_path / "charts"
        assert main([*named, "--only", "throughput", "--format", "png", "--output-dir", str(output)]) == 0
        return [part for part in (output / "comparison.md").read_text().split("\n\n") if part.startswith(PARAGRAPH)]

    assert paragraphs(*two_runs) == []
    committed = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores" / "demo-zero1" / "training_metrics.json"
    commit = json.loads(committed.read_text(encoding="utf-8"))["git_commit"]
    (paragraph,) = paragraphs(committed, *two_runs)
    assert commit[:12] in paragraph


def test_sweeps_have_charts_under_their_names(tmp_path, two_runs, capsys):
    file = write_sweep(tmp_path / "sweep", scaling({"ddp": {1: 1.0, 2: 1.8}}))
    output = tmp_path / "charts"
    wanted = ["--only", "overview,scaling_scaling,other_scaling", "--theme", "both", "--output-dir", str(output)]
    sweeps = ["--sweep", str(file.parent), "--sweep", f"other={file}"]
    assert main([*sweeps, "--run", f"a={two_runs[0]}", *wanted]) == 0
    names = ("overview", "scaling_scaling", "other_scaling")
    files = {f"{name}{theme}.{form}" for name in names for theme in ("", "-dark") for form in ("png", "svg")}
    assert {path.name for path in output.iterdir()} == files | {"comparison.md"}
    assert capsys.readouterr().out.splitlines()[-2] == f"charts: {output}"
    light, dark = ((output / f"other_scaling{theme}.svg").read_text() for theme in ("", "-dark"))
    assert (DARK.background in light, DARK.background in dark) == (False, True)


def test_a_chart_that_is_not_drawn_leaves_no_earlier_file(tmp_path, capsys):
    output = tmp_path / "charts"
    flags = ["--format", "png", "--output-dir", str(output), "--only", "scaling_scaling,scaling_money,memory"]
    for speeds in ({1: 1.0, 2: 1.8}, {2: 1.8}):
        file = write_sweep(tmp_path / "sweep", scaling({"ddp": speeds}))
        assert main(["--sweep", str(file), *flags]) == 0
    assert list(output.iterdir()) == []
    assert capsys.readouterr().out.splitlines()[-5:-1] == [
        "not drawn: scaling_scaling: no strategy trained on several numbers of devices",
        "not drawn: scaling_money: the sweep had no --price",
        "not drawn: memory: no run was given",
        f"charts: {output}",
    ]


def test_runs_by_folder_are_added_in_their_order(tmp_path, two_runs, capsys):
    a, b = two_runs
    old = write_run(tmp_path / "old", flat_record())
    flags = {
        "--optimized-json": b,
        "--baseline-json": a,
        "--run": f"old={old.parent}",
        "--output-dir": tmp_path / "x/y",
    }
    assert main([str(part) for flag in flags.items() for part in flag]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["baseline", "optimized", "old"]
    assert "same work: unknown (old did not record its work)" in lines
    assert {path.name for path in (tmp_path / "x/y").iterdir()} >= PICTURES


def test_the_name_of_a_run_is_one_line(capsys, tmp_path, monkeypatch):
    """Other mistakes are in ``tests/goldens/refusals.txt``, whose commands are lines."""
    monkeypatch.chdir(tmp_path)
    assert main(["--run", "a\nb=x"]) == 2
    assert "expected NAME=PATH" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, two_runs, snapshot, capsys):
    (tmp_path / "out" / "throughput.png").mkdir(parents=True)
    assert main(["--run", f"a={two_runs[0]}", "--output-dir", str(tmp_path / "out"), "--only", "throughput"]) == 2
    assert without_paths(capsys.readouterr().err, tmp_path) == snapshot
    assert [path.name for path in (tmp_path / "out").glob(".*")] == []


def test_an_interrupt_is_one_line_and_130(two_runs, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "write_charts", interrupt)
    assert main(["--run", f"a={two_runs[0]}"]) == 130
    assert capsys.readouterr() == ("", "error: interrupted\n")


@pytest.mark.parametrize(
    ("action", "modules"),
    [
        ("try: command.main(['--help'])\nexcept SystemExit: pass", ["torch", "matplotlib", "seaborn", "numpy"]),
        ("from dsgpt.charts import memory, runs, sweeps", ["torch", "deepspeed", "transformers"]),
    ],
)
def test_modules_that_are_not_imported(action, modules):
    code = f"import sys\nfrom dsgpt.charts import command\n{action}\n"
    code += f"loaded = [name for name in {modules} if name in sys.modules]; sys.exit(str(loaded) if loaded else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# comparison.md and the closing table: percentages with the right sign, labels, and no division by zero.


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
        recorded_of(tmp_path, "run").problem,
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
    assert text.index("## Results") < text.index("are measurement noise.") < text.index("## Work")
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


@pytest.mark.parametrize(
    ("other", "said", "cells"),
    [
        (
            record(training_config__global_batch_size=32, summary__train_time_sec=25.0),
            ["\nsame work: no (global batch 8 vs 32)\n", "other vs base, NOT EQUAL WORK"],
            {"speed-up in training time": ["1.00x", "4.00x (not equal work)", ""]},
        ),
        (
            flat_record(),
            ["\nsame work: unknown (other did not record its work)\n"],
            {"speed-up in training time": ["1.00x", "1.00x (work unknown)", ""], HOST: ["1.07", "unknown", "unknown"]},
        ),
        (
            record(inference__new_tokens=100, inference__latency_sec=3.0),
            ["NOT EQUAL INFERENCE: new tokens 16 vs 100"],
            {"inference latency, batch 1 (s)": ["0.500", "3.000", "unknown"]},
        ),
        (
            record(summary__max_cuda_mem_allocated_bytes_rank0=3 * 2**30),
            ["\nsame work: yes\n"],
            {"peak GPU memory allocated, rank 0 (GB)": ["unknown", "3.22", "unknown"], HOST: ["1.07", "1.07", "0.0 %"]},
        ),
    ],
    ids=["other work", "unknown work", "inference of another length", "a GPU"],
)
def test_what_cannot_be_compared_is_labelled(compared, other, said, cells):
    text, rows = compared(base=record(), other=other)
    assert all(part in text for part in said)
    assert {label: rows[label] for label in cells} == cells


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


def test_speed_up_of_a_run_of_no_time_is_unknown(compared):
    _, rows = compared(base=record(), instant=record(summary__train_time_sec=0))
    assert rows["speed-up in training time"][:2] == ["1.00x", "unknown"]


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


@pytest.mark.parametrize(("steps", "cell"), [(3, "fewer than 4 steps"), (4, "unknown"), (None, "unknown")])
def test_a_run_too_short_for_timing_is_labelled(compared, steps, cell):
    changes = {"summary__mean_tokens_per_sec_global": None, "train_throughput": None, "summary__optimizer_steps": None}
    epoch = record()["epochs"][0] | {"optimizer_steps": steps}
    _, rows = compared(a=record(epochs=[epoch], **changes), b=record())
    assert rows["tokens per second, all devices"] == [cell, "102", "unknown"]
