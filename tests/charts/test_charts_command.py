"""The command of the charts, and comparison.md."""

import json
import subprocess
import sys
from difflib import ndiff

import pytest
from chart_records import flat_record, record, scaling, step_lines, write_run, write_sweep
from small_run import REPOSITORY, without_paths

from dsgpt.benchmarks.records import REFERENCE
from dsgpt.charts import generate
from dsgpt.charts.comparison import comparison_markdown, console_summary
from dsgpt.charts.themes import DARK
from dsgpt.common.command_line import exit_code_of
from dsgpt.common.errors import UserError
from dsgpt.dashboard.reading import recorded_of
from dsgpt.record.provenance import PARAGRAPH
from dsgpt.record.runs import read_run
from dsgpt.record.suites import read_concurrency, read_sweep
from dsgpt.training.run import _earlier_record

# The command: what it writes, which mistakes it reports, and what it does not import.


SCRIPT = REPOSITORY / "charts" / "generate_charts.py"


def main(arguments: list[str]) -> int:
    """The exit code of the command, after its error lines."""
    return exit_code_of(lambda: generate.main(arguments))


@pytest.fixture
def two_runs(tmp_path):
    a = write_run(tmp_path / "A", record(), lines=step_lines())
    b = write_run(tmp_path / "B", record(summary__train_time_sec=50.0), lines=step_lines(seconds=1.25))
    return a, b


def test_two_runs_from_any_folder_in_two_processes_are_the_same_bytes(tmp_path, two_runs, capsys, monkeypatch):
    """In both formats. An SVG of Matplotlib has a date and random ids unless it is told not to."""
    words = ["--baseline-json", str(two_runs[0]), "--optimized-json", str(two_runs[1]), "--only", "overview,memory"]
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    first = {path.name: path.read_bytes() for path in (tmp_path / "charts").iterdir()}
    assert set(first) == {"overview.png", "overview.svg", "comparison.md"}
    assert "same work: yes" in done.stdout and "2.00x" in done.stdout
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0 and capsys.readouterr().out == done.stdout
    assert {path.name: path.read_bytes() for path in (tmp_path / "charts").iterdir()} == first


def test_the_comparison_names_the_commit_of_committed_records(tmp_path, two_runs):
    committed = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores" / "demo-zero1"
    flags = ["--run", f"a={two_runs[0]}", "--format", "png", "--only", "throughput", "--output-dir", str(tmp_path)]
    for more in ([], ["--run", f"b={committed}"]):
        assert main([*flags, *more]) == 0
        parts = (tmp_path / "comparison.md").read_text().split("\n\n")
        commit = read_run(committed, name="b").segments[0].setup["code"]
        assert [commit[:12] in part for part in parts if part.startswith(PARAGRAPH)] == [True] * len(more[1:])


def test_sweeps_have_charts_under_their_names(tmp_path, two_runs, capsys):
    file = write_sweep(tmp_path / "sweep", scaling({"ddp": {1: 1.0, 2: 1.8}}))
    output = tmp_path / "charts"
    wanted = ["--only", "throughput,scaling_scaling,other_scaling", "--theme", "both", "--output-dir", str(output)]
    sweeps = ["--sweep", str(file.parent), "--sweep", f"other={file}"]
    assert main([*sweeps, "--run", f"a={two_runs[0]}", *wanted]) == 0
    names = ("throughput", "scaling_scaling", "other_scaling")
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
    flags = ["--optimized-json", b, "--baseline-json", a, "--run", f"old={old.parent}", "--only", "throughput"]
    assert main([*map(str, flags), "--output-dir", str(tmp_path / "x/y")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["baseline", "optimized", "old"]


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


# comparison.md and the closing table: percentages with the right sign, labels, and no division by zero.


@pytest.fixture
def compared(tmp_path):
    """comparison.md of the given records by name, and below it the closing table of the console."""

    def compare(**records: dict) -> str:
        paths = {name: write_run(tmp_path / name, values, lines=step_lines()) for name, values in records.items()}
        runs = [read_run(path, name=name) for name, path in paths.items()]
        return f"{comparison_markdown(runs)}\n{console_summary(runs)}"

    return compare


@pytest.mark.parametrize(
    ("version", "later"), [(None, False), ("1.9", False), ("2.1", False), ("2.10", True), (9, True)]
)
def test_every_reader_says_that_a_record_is_of_a_later_schema(tmp_path, version, later):
    write_run(tmp_path / "run", record(schema_version=version, saves=[]))
    folder, line = tmp_path / "run", f"has schema {version}, and this program knows 2.1: "
    run = read_run(folder, name="a")
    page, problem = comparison_markdown([run]).replace("\\_", "_"), recorded_of(tmp_path, "run").problem
    for said in (console_summary([run]), page, problem, _earlier_record(folder)[1]):
        assert (line in said) == later


@pytest.mark.parametrize(("read", "name"), [(read_sweep, "sweep-scaling"), (read_concurrency, "inference")])
def test_a_suites_record_of_a_later_schema_is_refused(tmp_path, read, name):
    known, file = json.loads((REPOSITORY / REFERENCE / f"{name}.json").read_text()), tmp_path / "record.json"
    file.write_text(json.dumps(known | {"schema_version": "9.0"}))
    with pytest.raises(UserError, match=rf"^{file}: has schema 9\.0, and this program knows [^\n]*$"):
        read(file)


def test_every_other_run_is_compared_with_the_first(compared):
    slow, quick = record(summary__train_time_sec=200.0), record(summary__train_time_sec=50.0)
    text = compared(base=record(), slow=slow, quick=quick)
    assert "\n| training time (s) | 100.0 | 200.0 | 50.0 | -100.0 % | +50.0 % |\n" in text
    assert text.partition("\n\n## Results")[0].count("equal loss: yes") == 2


def test_names_cannot_break_the_table(tmp_path):
    runs = [read_run(write_run(tmp_path / str(i), record()), name=name) for i, name in enumerate(["a|b", "*x*_y_<b>"])]
    header = next(line for line in comparison_markdown(runs).splitlines() if line.startswith("|  |"))
    assert header == r"|  | a\|b | \*x\*\_y\_\<b> | \*x\*\_y\_\<b> vs a\|b |"


SEVERAL = {"inference__latency_min_sec": 0.45, "inference__latency_max_sec": 0.7, "inference__repetitions": 15}
PARAMS = {f"a_setting_with_a_long_name_{i}": 1000 + i for i in range(9)} | {"last": None, "text": "x" * 200}
PARAMS["link"] = "[x](https://y)"
ZEROS = {"train_time_sec", "mean_tokens_per_sec_global", "final_val_loss", "peak_rss_bytes_rank0"}
ZEROS = {f"summary__{key}": 0 for key in ZEROS} | {"inference__latency_sec": 0, "inference__tokens_per_sec": 0}
FASTER = {"summary__train_time_sec": 40.0, "summary__mean_tokens_per_sec_global": 256.0, "inference__latency_sec": 0.4}
ONE_EPOCH = record(epochs=record()["epochs"][:1])


def repeated(low: float, high: float, repetitions: int = 15) -> tuple[dict, dict]:
    """Two runs whose latencies were measured several times; those of the second lie from ``low`` to ``high``."""
    other = {"inference__latency_min_sec": low, "inference__latency_max_sec": high}
    other |= {"inference__repetitions": repetitions, "inference__latency_sec": 0.4}
    return record(**SEVERAL), record(**other)


def untimed(steps: int) -> tuple[dict, dict]:
    """A run of so many steps without a throughput, and one with it."""
    changes = {"summary__mean_tokens_per_sec_global": None, "train_throughput": None, "summary__optimizer_steps": None}
    return record(epochs=[record()["epochs"][0] | {"optimizer_steps": steps}], **changes), record()


PAIRS = {
    "better and worse": (record(), record(**FASTER, summary__peak_rss_bytes_rank0=1.5 * 2**30)),
    "other work": (record(), record(training_config__global_batch_size=32, summary__train_time_sec=25.0)),
    "unknown work": (record(), flat_record()),
    "unknown work of the first": (flat_record(), record()),
    "inference of another length": (record(), record(inference__new_tokens=100, inference__latency_sec=3.0)),
    "a GPU": (record(), record(summary__max_cuda_mem_allocated_bytes_rank0=3 * 2**30)),
    "zeros are shown and never divided by": (record(**ZEROS), record()),
    "a part of a run, resumed": (record(), record(status="interrupted", resumed_from="step-00000200")),
    "one epoch has no best": (ONE_EPOCH, ONE_EPOCH),
    "latencies whose ranges overlap": repeated(0.45, 0.6),
    "latencies whose ranges are apart": repeated(0.35, 0.44),
    "a latency that was measured once": repeated(0.45, 0.6, 1),
    "every setting has a row": (record(training_config__scheduler={"type": "T", "params": PARAMS}), record()),
    "too short to be timed": untimed(3),
    "long enough, and not timed": untimed(4),
}


def test_two_equal_runs_are_compared(compared, snapshot):
    assert compared(base=record(), other=record()) == snapshot


@pytest.mark.parametrize("pair", PAIRS)
def test_what_a_pair_of_runs_changes_in_the_comparison(compared, pair, snapshot):
    """The lines that the comparison of two equal runs does not have (+), and those that are gone (-).

    A wrong sign, a division by zero, a missing label or a figure of what cannot be compared stands in a line.
    """
    base, other = PAIRS[pair]
    equal = compared(base=record(), other=record()).splitlines()
    changed = ndiff(equal, compared(base=base, other=other).splitlines())
    assert "\n".join(line for line in changed if line[0] in "+-") == snapshot
