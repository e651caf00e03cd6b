"""Records name their sources; ``python src/benchmark.py records`` remakes those whose sources have changed."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from git_repository import commit_all, commit_of, git, write
from small_run import REPOSITORY
from test_architecture import ROOMS

from dsgpt.benchmarks.frame import SUITES, SWEEP, TRAINED, record_sources
from dsgpt.benchmarks.records import RECORDS, REFERENCE, WORK, check_lines, remake_records
from dsgpt.common.errors import UserError

DEMO, LOADER = "src/dsgpt/demo.py", "src/dsgpt/data/loader.py"
FILES = (
    "src/gpt2.py",
    "src/demo.py",
    DEMO,
    LOADER,
    "src/dsgpt/charts/runs.py",
    "src/dsgpt/benchmarks/cells.py",
    "src/dsgpt/benchmarks/frame.py",
    *(f"src/dsgpt/benchmarks/{suite}{end}.py" for suite in (*SUITES, SWEEP) for end in ("", "_page")),
    "ds_configs/zero1.json",
    "ds_configs/README.md",
)
NAMES = ["demo", *SUITES, "sweep-strategies", "sweep-scaling"]
DEMO_FILES = [
    f"demo-{run}/{file}" for run in ("baseline", "zero1") for file in ("training_metrics.json", "metrics.jsonl")
]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A small source tree without any record, committed."""
    write(tmp_path, *FILES)
    (tmp_path / TRAINED).mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("/checkpoint/*\n!/checkpoint/reference/\n")
    commit_all(tmp_path)
    return tmp_path


class Commands:
    """Replaces demo, suites and charts, which take an hour: each command only writes the files that it would make."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self.made: list[str] = []
        self.shown: list[str] = []
        self.words: dict[str, list[str]] = {}
        self.exit_codes: dict[str, int] = {}

    def __call__(self, words: Sequence[str]) -> int:
        script, *rest = words
        name = "demo" if script in {"src/demo.py", "charts/generate_charts.py"} else rest[0]
        if name == "run":
            name = f"sweep-{rest[2]}" if rest[1] == "--suite" else Path(rest[2]).stem
        if script == "charts/generate_charts.py" or "--table-from" in rest:
            self.shown.append(name)
            return 0
        self.made.append(name)
        self.words[name] = list(words)
        files = [f"demo/checkpoint/{file}" for file in DEMO_FILES] if name == "demo" else [f"{name}.json"]
        files = [f"{name}/sweep.json"] if name.startswith("sweep-") else files
        made = {
            "git_commit": commit_of(self._repository),
            "seconds": 60.0,
            "made": f"{name}, as number {len(self.made)}",
        }
        for file in (self._repository / WORK / file for file in files):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(made))
        return self.exit_codes.get(name, 0)


@pytest.fixture
def commands(repository: Path) -> Commands:
    return Commands(repository)


def names(repository: Path, record: str) -> list[str]:
    """The sources in ``repository``, which may be no checkout: to an empty one, all of its files are new."""
    with tempfile.TemporaryDirectory() as folder:
        git(Path(folder), "init", "--quiet")
        given = (f"--git-dir={folder}/.git", f"--work-tree={repository}")
        found = git(repository, *given, "ls-files", "--others", "--exclude-standard", "--", *record_sources(record))
    return found.splitlines()


def committed(repository: Path, name: str = "parity.json", **content: object) -> Path:
    """A committed record of the present sources."""
    record = repository / REFERENCE / name
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({"git_commit": commit_of(repository), **content}))
    return record


def change(repository: Path, *names: str) -> None:
    """Commit changes of files."""
    write(repository, *names, text=f"after {commit_of(repository)}")
    commit_all(repository)


def test_the_sources_of_a_record_are_every_room_that_it_measures(repository):
    """Not modules that only show records, other suites, or pages."""
    assert names(repository, "demo") == ["ds_configs/zero1.json", "src/demo.py", LOADER, DEMO, "src/gpt2.py"]
    found = {suite: set(names(REPOSITORY, suite)) for suite in (*SUITES, SWEEP, "demo")}
    rooms = {f"src/dsgpt/{room}" for room in ROOMS if room not in {"charts", "dashboard"}}
    for suite in (*SUITES, SWEEP):
        assert rooms <= {name.rpartition("/")[0] for name in found[suite]}
    wanted = {f"src/dsgpt/benchmarks/{name}.py" for name in ("parity", "parity_rank", "parity_reference")}
    assert {*wanted, "src/gpt2.py", "data_prep/preprocess.py", "ds_configs/3d.json"} <= found["parity"]
    shown = ("/charts/", "_page.py", "/benchmarks/resume")
    assert not [name for name in found["parity"] if any(part in name for part in shown)]
    server = {"src/serve.py", "src/dsgpt/inference/server/engine.py"}
    assert server <= found["serving"]
    assert DEMO not in found["parity"] | found["sweep"]
    assert not server & (found["parity"] | found["demo"] | found["inference"])
    assert "src/dsgpt/benchmarks/trace.json" in found["inference"]


@pytest.mark.parametrize(
    ("changed", "only", "refused"),
    [
        (LOADER, "parity", True),
        ("src/dsgpt/charts/runs.py", "parity", False),
        ("src/dsgpt/charts/runs.py", "demo", True),  # a run marks its commit for any file
        (".git", "parity", True),
    ],
)
def test_records_are_not_remade_from_sources_that_are_not_committed(repository, commands, changed, only, refused):
    if changed == ".git":
        shutil.rmtree(repository / changed)
    else:
        write(repository, changed, text="other")
    with pytest.raises(UserError, match=f"^{only}: .* commit all changed") if refused else nullcontext():
        remake_records(repository, only=[only], run=commands)
    assert commands.made == ([] if refused else [only])


def test_records_are_remade_if_a_source_has_changed_and_their_pages_always(repository, commands, capsys):
    """Pages are made when all records are replaced. A demo that was interrupted starts again: nothing is resumed."""

    def run(words):
        if words[0] == "charts/generate_charts.py":
            assert all((repository / REFERENCE / file).exists() for one in RECORDS.values() for file in one.records)
        return commands(words)

    (left := repository / WORK / "demo" / "checkpoint" / "demo-zero1" / "step-00000050").mkdir(parents=True)
    record = committed(repository, git_commit="f" * 40)
    assert list(check_lines(repository))[:2] == [
        "demo: there is no readable record",
        "parity: not known (ffffffffffff: this clone does not have that commit)",
    ]
    record.write_text("{")
    assert remake_records(repository, run=run) == 0
    assert not left.exists()
    assert commands.made == commands.shown == NAMES
    assert all((repository / REFERENCE / file).exists() for file in DEMO_FILES)
    assert {line.partition(": ")[2] for line in check_lines(repository)} == {"up to date"}
    said = capsys.readouterr().out
    assert "; nothing says how long it takes\n" in said
    assert f"[2/{len(NAMES)}] parity: remaking it, because there is no readable record" in said
    commit = commit_of(repository)
    change(repository, "src/dsgpt/benchmarks/faults.py")
    change(repository, "src/demo.py")
    assert f"faults: 1 of 6 sources changed since {commit[:12]}" in check_lines(repository)
    assert remake_records(repository, run=commands) == 0
    assert commands.made == [*NAMES, "demo", "faults", "clusters", "crashes"]  # the last two build on faults
    assert commands.shown == 2 * NAMES
    said = capsys.readouterr().out
    assert "to remake: demo, faults, clusters, crashes; about 5 min 00 s\n" in said
    assert f"[2/{len(NAMES)}] parity: made from the present sources, skipped" in said


def test_charts_are_drawn_again_with_the_records_that_they_show(repository, commands):
    for file in DEMO_FILES:
        committed(repository, file)
    for only, shown in (("parity", ["parity"]), ("exam", ["exam", "demo"])):
        commands.shown.clear()
        assert remake_records(repository, only=[only], run=commands) == 0
        assert commands.shown == shown


def test_commands_get_the_peers_and_the_model_that_they_need(repository, commands):
    (repository / TRAINED).rmdir()
    only = ["plan", "speed", "decoding", "serving"]
    remake_records(repository, only=only, peers=["nanogpt=/there"], run=commands)
    assert commands.made == ["plan", "speed", "demo", "decoding", "demo", "serving"]
    assert [name for name in only if "--peer" in commands.words[name]] == ["speed", "decoding"]
    assert commands.words["speed"][-2:] == ["--peer", "nanogpt=/there"]
    assert commands.words["demo"] == ["src/demo.py"]  # where users find it
    assert commands.words["serving"][2:4] == ["--checkpoint", "checkpoint/demo-zero1"]


@pytest.mark.parametrize(
    ("loss", "checkpoint", "added"), [(4.25, TRAINED, True), (4.2500001, TRAINED, False), (4.25, Path("other"), False)]
)
def test_the_committed_run_gets_the_figures_of_engines_that_answered_with_the_same_training(
    repository, commands, capsys, loss, checkpoint, added
):
    losses = {"final_train_loss": 3.5, "final_val_loss": 4.25}
    measured = {"summary": losses | {"final_val_loss": loss}}
    (repository / TRAINED / "training_metrics.json").write_text(json.dumps(measured))
    own, figures = {"latency_sec": 1.0}, {"1": {"one": {"tokens_per_sec": 9.0}}}
    engines = [{"name": "one", "by_concurrency": {"1": {"tokens_per_sec": 9.0}}}]
    committed(repository, DEMO_FILES[0])
    run = committed(repository, DEMO_FILES[2], summary=losses, inference=own)
    committed(repository, "inference.json", checkpoint=checkpoint.as_posix(), engines=engines)
    remake_records(repository, only=["inference"], run=commands)
    assert json.loads(run.read_text())["inference"] == (own | {"by_concurrency": figures} if added else own)
    assert json.loads(run.read_text())["git_commit"] == commit_of(repository)
    assert ("gets no figures of engines" in capsys.readouterr().out) != added


@pytest.mark.long
def test_the_committed_records_stay_as_they_are_until_all_are_remade(repository, commands, capsys):
    remake_records(repository, run=commands)
    change(repository, LOADER)
    before = {path: path.read_bytes() for path in (repository / REFERENCE).rglob("*.json")}
    commands.exit_codes["parity"] = 1
    commands.made.clear()
    assert remake_records(repository, run=commands) == 1
    assert commands.made == ["demo", "parity"]
    assert before == {path: path.read_bytes() for path in (repository / REFERENCE).rglob("*.json")}
    assert f"[2/{len(NAMES)}] parity: failed with exit code 1; the committed records stay" in capsys.readouterr().out
    commands.exit_codes.clear()
    assert remake_records(repository, run=commands) == 0
    assert commands.made == ["demo", "parity", *NAMES[1:]]  # the demo is kept, the suite that failed is not
    assert {line.partition(": ")[2] for line in check_lines(repository)} == {"up to date"}


def test_a_record_whose_sources_changed_while_it_was_made_is_not_published(repository, commands, capsys):
    def run(words):
        write(repository, LOADER, text=f"{words}")
        return commands(words)

    assert remake_records(repository, only=["saving"], run=run) == 1
    assert not (repository / REFERENCE).exists()
    assert "saving: not replaced, because 1 of 6 sources changed since" in capsys.readouterr().out
    assert [line.partition(":")[0] for line in check_lines(repository, only=["saving"])] == ["saving"]


def test_the_committed_records_and_their_scripts_exist():
    for record in RECORDS.values():
        assert all((REPOSITORY / REFERENCE / file).is_file() for file in record.files.values())
        assert set(record.records) <= set(record.files.values())
        assert all((REPOSITORY / command[0]).is_file() for command in (record.make, record.show))
