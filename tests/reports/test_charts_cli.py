"""The command: what it writes, which mistakes it reports, and what it does not import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from chart_records import flat_record, record, step_lines, write_run
from chart_sweeps import scaling, write_sweep
from messages import without_paths
from small_run import REPOSITORY

from dsgpt.charts import command
from dsgpt.charts.options import DARK
from dsgpt.common.command_line import exit_code_of
from dsgpt.record.provenance import PARAGRAPH

SCRIPT = REPOSITORY / "charts" / "generate_charts.py"
CHARTS = {"training_time", "throughput", "inference_latency", "inference_throughput", "peak_memory", "overview"}
CHARTS |= {"loss_vs_step", "loss_vs_time", "loss_vs_tokens", "latency_vs_throughput"}
PICTURES = {f"{name}.{form}" for name in CHARTS for form in ("png", "svg")}


def run_script(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def main(arguments: list[str]) -> int:
    """The exit code of the command, after its error lines."""
    return exit_code_of(lambda: command.main(arguments))


@pytest.fixture
def two_runs(tmp_path):
    a = write_run(tmp_path / "A", record(), lines=step_lines())
    b = write_run(tmp_path / "B", record(summary__train_time_sec=50.0), lines=step_lines(seconds=1.25))
    return a, b


def test_two_runs_from_any_folder_twice_the_same_bytes(tmp_path, two_runs):
    """In both formats. An SVG of Matplotlib has a date and random ids unless it is told not to."""
    a, b = two_runs
    done = run_script("--baseline-json", a, "--optimized-json", b, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "same work: yes" in done.stdout and "2.00x" in done.stdout and "charts: charts" in done.stdout
    first = {path.name: path.read_bytes() for path in (tmp_path / "charts").iterdir()}
    assert set(first) == PICTURES | {"comparison.md"}
    again = run_script("--baseline-json", a, "--optimized-json", b, cwd=tmp_path)
    assert again.stdout == done.stdout
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


def test_all_mistakes_are_reported_together_one_line_each(tmp_path, two_runs, capsys):
    a, _ = two_runs
    torn = tmp_path / "torn.json"
    torn.write_text('{"summary": {')
    (tmp_path / "empty").mkdir()
    named = [f"torn={torn}", f"twice={a}", f"twice={a}", f"none={tmp_path / 'empty'}", "zero1"]
    flags = ["--baseline-json", str(tmp_path / "gone.json"), "--optimised-json=x", "--output-dir", str(torn)]
    code = main([*flags, *(part for run in named for part in ("--run", run)), "--optimized-json"])
    output = capsys.readouterr()
    assert (code, output.out) == (2, "")
    lines = output.err.splitlines()
    for part in (
        "--optimized-json needs a value",
        "--optimised-json is not a known flag (did you mean --optimized-json?)",
        "--run 'zero1': expected NAME=PATH",
        "two runs are called 'twice'",
        f"{torn} is a file, not a folder",
        f"{tmp_path / 'gone.json'}: no such file",
        f"{torn}: not JSON",
        f"{tmp_path / 'empty' / 'training_metrics.json'}: no such file",
    ):
        assert sum(part in line for line in lines) == 1, part
    assert len(lines) == 8
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no run given"),
        (["--run"], "--run needs a value"),
        (["--run", "=x"], "expected NAME=PATH"),
        (["--run", "a="], "expected NAME=PATH"),
        (["--run", "a\nb=x"], "expected NAME=PATH"),
        (["--nonsense"], "--nonsense is not a known flag; see --help"),
        (["--output-dir", "-x"], "--output-dir needs a value"),
        (["--sweep", "gone/sweep.json"], "gone/sweep.json: cannot be read as the record of a sweep"),
        (["--sweep", "a/b=c"], "--sweep 'a/b=c': expected NAME=PATH"),
        (["--plan", "gone.json"], "gone.json: cannot be read (No such file or directory)"),
        (["--only", "overveiw"], "--only overveiw: is not a chart (did you mean overview?); known are training_time"),
        (["--only", ","], "--only names no chart"),
        (["--format", "pdf"], "--format must be png or svg, or several with commas between them, not pdf"),
        (["--theme", "drak"], "--theme must be one of light, dark, both, not drak (did you mean dark?)"),
        (["--price", "-1"], "--price must be a number of at least 0, not -1"),
        (["surplus"], "'surplus' is neither a flag nor the value of one"),
        (["--baseline-json", "a", "--baseline-json", "b"], "--baseline-json is given 2 times"),
    ],
)
def test_each_mistake_of_the_command_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_named_like_a_flag_is_refused(two_runs, capsys):
    a, b = two_runs
    assert main(["--baseline-json", str(a), "--run", f"baseline={b}"]) == 2
    assert "two runs are called 'baseline'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, two_runs, snapshot):
    (tmp_path / "out" / "throughput.png").mkdir(parents=True)
    done = run_script("--run", f"a={two_runs[0]}", "--output-dir", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 2
    assert without_paths(done.stderr, tmp_path) == snapshot
    assert [path.name for path in (tmp_path / "out").glob(".*")] == []


def test_every_mistake_is_a_line_that_begins_with_error(capsys):
    assert main(["--help=x", "surplus"]) == 2
    assert main(["surplus", "more"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: ") for line in lines)


def test_an_interrupt_is_one_line_and_130(two_runs, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "write_charts", interrupt)
    assert main(["--run", f"a={two_runs[0]}"]) == 130
    assert capsys.readouterr() == ("", "error: interrupted\n")


def test_help_has_flags_and_examples(tmp_path):
    done = run_script("--help", cwd=tmp_path)
    assert done.returncode == 0
    flags = ("--baseline-json PATH", "--optimized-json PATH", "--run NAME=PATH", "--sweep [NAME=]PATH")
    for part in (*flags, "--output-dir FOLDER", "examples"):
        assert part in done.stdout


@pytest.mark.parametrize(
    ("action", "modules"),
    [
        ("try: command.main(['--help'])\nexcept SystemExit: pass", ["torch", "matplotlib", "seaborn", "numpy"]),
        ("from dsgpt.charts import plots", ["torch", "deepspeed", "transformers"]),
    ],
)
def test_modules_that_are_not_imported(action, modules):
    code = f"import sys\nfrom dsgpt.charts import command\n{action}\n"
    code += f"loaded = [name for name in {modules} if name in sys.modules]; sys.exit(str(loaded) if loaded else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
