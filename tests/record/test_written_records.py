"""The files of a record: written whole, and with what happened to their sources since."""

import json
import resource
import signal
from pathlib import Path

import pytest
from git_repository import commit_all, commit_of, git, write

from dsgpt.record.provenance import SourceChanges, changes_since, git_commit, marked
from dsgpt.record.schema import RunRecord, StepLog, drop_steps_after, mean, percentile, read_steps
from dsgpt.training.journal import FileSink

# `training_metrics.json` and `metrics.jsonl` as files.


LINES = [
    {"step": 1, "loss": 4.0},
    {"step": 2, "loss": 3.0},
    {"step": 2, "val_loss": 3.5},
    {"step": 3, "loss": float("nan")},
]


@pytest.fixture
def steps_file(tmp_path: Path) -> Path:
    log = StepLog(tmp_path / "metrics.jsonl")
    log.write(LINES[:2])
    log.write(LINES[2:])
    log.close()
    return tmp_path / "metrics.jsonl"


def test_every_line_is_json_for_any_reader(steps_file):
    def refuse(word: str) -> None:
        raise AssertionError(word)

    read = [json.loads(line, parse_constant=refuse) for line in steps_file.read_text().splitlines()]
    assert read == [*LINES[:3], {"step": 3, "loss": None}]
    assert list(read_steps(steps_file)) == read


def test_a_torn_last_line_is_left_out(steps_file):
    whole = steps_file.read_bytes()
    for cut in range(len(whole) - 25, len(whole)):
        steps_file.write_bytes(whole[:cut])
        assert [line["step"] for line in read_steps(steps_file)][:3] == [1, 2, 2]
        assert len(list(read_steps(steps_file))) == 3


def test_lines_after_a_step_are_dropped_and_writing_continues(steps_file):
    steps_file.write_bytes(steps_file.read_bytes() + b'{"step": 4, "lo')
    drop_steps_after(steps_file, 2)
    log = StepLog(steps_file)
    log.write([{"step": 3, "loss": 2.0}])
    log.close()
    assert list(read_steps(steps_file)) == [*LINES[:3], {"step": 3, "loss": 2.0}]
    assert list(steps_file.parent.iterdir()) == [steps_file]


@pytest.mark.parametrize(("val_loss", "left"), [("any", 4), (None, 2), (2.5, 3), (9.0, 2)])
def test_validations_that_the_checkpoint_does_not_have_are_dropped(tmp_path, val_loss, left):
    """A kill after a repeated validation and before its save; without a line of the checkpoint's own, none is kept."""
    steps_file = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "loss": 3.0} for step in (1, 2)] + [{"step": 2, "val_loss": loss} for loss in (2.5, 2.6)]
    steps_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    drop_steps_after(steps_file, 2, val_loss=val_loss)
    assert list(read_steps(steps_file)) == lines[:left]


def test_damaged_lines_are_left_out_and_counted(steps_file):
    lines = steps_file.read_bytes().splitlines(keepends=True)
    damaged_lines = [lines[0], b"\0\0\0\n", b'{"step": \n', b"\xff\n", b"[1]\n", b'{"loss": 1}\n', *lines[1:]]
    steps_file.write_bytes(b"".join(damaged_lines))
    damaged: list[int] = []
    assert [line["step"] for line in read_steps(steps_file, damaged=damaged)] == [1, 2, 2, 3]
    assert damaged == [2, 3, 4, 5, 6]
    assert drop_steps_after(steps_file, 3) == damaged
    assert steps_file.read_bytes() == b"".join(lines)


def test_percentiles_by_nearest_rank_and_means():
    shares = {0.0: 1.0, 0.2: 1.0, 0.21: 2.0, 0.5: 3.0, 0.95: 5.0, 1.0: 5.0}
    assert {share: percentile([5.0, 1.0, 4.0, 2.0, 3.0], share) for share in shares} == shares
    assert (mean([]), percentile([], 0.5), mean([1.0, 2.0])) == (None, None, 1.5)


@pytest.mark.parametrize(("new_tokens", "latency", "speed"), [(100, 0.5, 200.0), (99, None, None), (None, None, None)])
def test_both_generations_of_keys(tmp_path, new_tokens, latency, speed):
    """A latency of another length is unknown to older tools. What is not finite is written as null."""
    inference = {"new_tokens": new_tokens, "latency_sec": 0.5} if new_tokens else None
    epoch = {"train_time_sec": 9.0, "train_loss_avg_global": 2.0, "val_loss_avg_global": None}
    summary = {"mean_tokens_per_sec_global": float("nan"), "inner": [(float("-inf"), 1.0)]}
    FileSink(tmp_path).record(
        RunRecord(description={"run_id": "x"}, status="completed", epochs=[epoch], summary=summary, inference=inference)
    )
    found = json.loads((tmp_path / "training_metrics.json").read_text())
    assert found["summary"] == {"mean_tokens_per_sec_global": None, "inner": [[None, 1.0]]}
    assert (found["schema_version"], found["run_id"], found["status"]) == ("2.1", "x", "completed")
    assert (found["train_time_per_epoch"], found["train_loss_per_epoch"]) == ([9.0], [2.0])
    assert found["val_loss_per_epoch"] == [None]
    assert found["train_throughput"] is None
    assert (found["inference_latency"], found["inference_throughput"]) == (latency, speed)


def test_lines_that_a_full_disk_refused_are_written_later_and_whole(tmp_path):
    """A limit on the size of files stands for a full disk."""
    log, path = StepLog(tmp_path / "metrics.jsonl"), tmp_path / "metrics.jsonl"
    log.write(LINES[:1])
    before = path.read_bytes()
    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, old[1]))
    try:
        for call in (lambda: log.write(LINES[1:2]), log.sync):
            with pytest.raises(OSError, match="File too large"):
                call()
            assert path.read_bytes() == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    log.write(LINES[2:3])
    log.close()
    assert list(read_steps(path)) == LINES[:3]


# Whether the sources of a record have changed since its commit, in real git repositories.


FILES = [f"src/{letter}.py" for letter in "abcdefgh"]
SOURCES = ["src/*.py", ":(exclude)src/outside"]
ABSENT = "this clone does not have that commit"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    write(folder, *FILES, "src/outside/a.py", "docs/page.md")
    (folder / ".gitignore").write_text("ignored.py\n")
    commit_all(folder)
    return folder


def changes(repository: Path, commit: object) -> SourceChanges:
    return changes_since(commit, SOURCES, repository=repository)


def test_a_record_of_the_present_sources_is_up_to_date(repository):
    """Whatever happens to other files."""
    commit = commit_of(repository)
    write(repository, "docs/page.md", "src/outside/a.py", text="other")
    commit_all(repository)
    write(repository, "src/outside/new.py", "src/ignored.py", "docs/page.md")
    found = changes(repository, commit)
    assert (found.line(), found.total) == ("", len(FILES))
    said = f"the record was made at commit `{commit[:12]}`, and was up to date when this page was made."
    assert found.paragraph() == f"Sources: {said}"


@pytest.mark.parametrize("committed", [True, False])
def test_changed_removed_renamed_and_new_files_are_counted_and_up_to_five_are_named(repository, committed):
    commit = commit_of(repository)
    write(repository, *FILES[:2], "src/deeper/new.py", text="other")
    (repository / FILES[2]).unlink()
    (repository / FILES[3]).rename(repository / "src" / "z.py")
    if committed:
        commit_all(repository)
    found = changes(repository, commit)
    assert found.changed == [*FILES[:4], "src/deeper/new.py", "src/z.py"]
    assert found.line() == f"6 of 10 sources changed since {commit[:12]}"
    assert found.paragraph() == (
        f"Sources: the record was made at commit `{commit[:12]}`. When this page was made,\n"
        "6 of 10 sources had changed: src/a.py, src/b.py, src/c.py, src/d.py, src/deeper/new.py and 1 more."
    )


@pytest.mark.parametrize(("gone", "moved"), [(4, False), (5, True)])
def test_a_record_is_from_before_the_move_if_most_of_its_files_are_gone(repository, gone, moved):
    """New files are no sources of the record, however many there are."""
    commit = commit_of(repository)
    for name in FILES[:gone]:
        (repository / name).rename(repository / "src" / f"moved_{Path(name).name}")
    commit_all(repository)
    write(repository, *(f"src/untracked_{number}.py" for number in range(20)))
    found, line = changes(repository, commit), f"made before the code moved, at {commit[:12]}"
    assert (found.line() == line, found.paragraph() == f"Sources: {line}.") == (moved, moved)


def test_a_commit_that_git_does_not_have_is_not_known(repository, tmp_path):
    commit = commit_of(repository)
    write(repository, FILES[0], text="other")
    newest = commit_all(repository)
    git(tmp_path, "clone", "--quiet", "--depth", "1", repository.as_uri(), "shallow")
    assert changes(tmp_path / "shallow", newest).line() == ""
    found = changes(tmp_path / "shallow", commit)
    assert found.line() == f"not known ({commit[:12]}: {ABSENT})"
    assert found.paragraph() == f"Sources: not known ({commit[:12]}: {ABSENT})."
    assert changes(repository, "f" * 40).line() == f"not known (ffffffffffff: {ABSENT})"


def test_without_git_nothing_is_known(repository, tmp_path, monkeypatch):
    commit = commit_of(repository)
    write(tmp_path / "plain", *FILES)
    assert changes(tmp_path / "plain", commit).line().startswith(f"not known ({commit[:12]}: git says: not a git repo")
    assert git_commit(tmp_path / "plain") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert changes(repository, commit).line() == f"not known ({commit[:12]}: git cannot be started)"
    assert git_commit(repository) is None


def test_a_repository_may_be_a_folder_of_a_checkout_but_an_installed_package_is_none(repository):
    """Of the latter git has no files, though it knows the commit."""
    write(repository / "inner", *FILES)
    commit = commit_all(repository)
    write(repository / "inner", FILES[0], "src/new.py", text="other")
    assert changes(repository / "inner", commit).changed == [FILES[0], "src/new.py"]
    (repository / "ignored.py").mkdir()
    write(repository / "ignored.py", *FILES)
    assert changes(repository / "ignored.py", commit).unknown == f"{commit[:12]}: git does not have these files"


@pytest.mark.parametrize("commit", [None, "abc", "HEAD", "--output=stolen", 3, ["a"]])
def test_a_record_that_names_no_commit_is_not_known(repository, commit):
    found, said = changes(repository, commit), "not known (no commit is named)"
    assert (found.line(), found.paragraph()) == (said, f"Sources: {said}.")
    assert not (repository / "stolen").exists()


def test_a_record_from_files_that_were_not_committed_is_never_up_to_date(repository):
    commit = commit_of(repository)
    write(repository, "docs/page.md", text="other")
    assert git_commit(repository) == f"{commit}-dirty"
    assert git_commit(repository, mark="") == commit == marked(commit, SOURCES, repository=repository)
    write(repository, "src/new.py")
    dirty = marked(commit, SOURCES, repository=repository)
    assert dirty == f"{commit}-dirty" == marked(dirty, SOURCES, repository=repository)
    (repository / "src" / "new.py").unlink()
    assert changes(repository, dirty).line() == f"not known ({commit[:12]}: files that were not committed took part)"
    assert marked(None, SOURCES, repository=repository) is None
