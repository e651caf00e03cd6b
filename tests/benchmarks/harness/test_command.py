"""What the commands of all suites share: lines, record, page, commit, exit code."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from git_repository import commit_all, commit_of, write
from messages import without_paths

from dsgpt.benchmarks.frame import EXIT_FAILED, Record, SuiteCommand, SuiteOptions, SuitePage, make_page, run_suite
from dsgpt.common.errors import UserError
from dsgpt.machine.console import Console


def page_text(record: Record, *, source: str) -> str:
    return f"# Numbers of {source}\n\n{record['numbers']}\n\n## More\n\nNothing.\n"


PAGE = SuitePage(name="parity", of="numbers", text=page_text, summary=lambda record: [f"sum {sum(record['numbers'])}"])


class Numbers(SuiteCommand[int]):
    """Counts from 1; numbers above 2 are failures."""

    page, unit = PAGE, "number"

    def __init__(self, total: int, *, during: Callable[[], object] = lambda: None) -> None:
        self._total, self._during = total, during
        self.folder: Path | None = None

    def plan(self, console: Console) -> int:
        return self._total

    def begin(self, folder: Path, console: Console) -> None:
        self.folder = folder
        (folder / "work").write_text("some")

    def results(self) -> Iterator[int]:
        self._during()
        yield from range(1, self._total + 1)

    def line(self, result: int, *, count: str, left: str) -> str:
        return f"{count} number {result}{' of more' if left else ''}"

    def record(self, results: Sequence[int], *, seconds: float) -> Record:
        return {"git_commit": "abc", "numbers": list(results), "not finite": float("nan")}

    def failures(self, results: Sequence[int], record: Record) -> list[str]:
        return [str(number) for number in results if number > 2]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write(tmp_path, "src/gpt2.py")
    commit_all(tmp_path)
    return tmp_path


def options(folder: Path, *, keep: Path | None = None) -> SuiteOptions:
    return SuiteOptions(output=folder / "out" / "numbers.json", page=folder / "numbers.md", keep=keep)


def test_a_run_prints_each_result_and_writes_record_page_and_sources(repository, capsys, snapshot):
    chosen, suite = options(repository), Numbers(2)
    assert run_suite(suite, chosen, repository=repository) == 0
    assert without_paths(capsys.readouterr().out, repository) == snapshot
    recorded = json.loads(chosen.output.read_text())
    expected = {"git_commit": commit_of(repository), "numbers": [1, 2], "not finite": None}
    assert recorded.items() >= expected.items()
    above, _, rest = chosen.page.read_text().partition("\n\nSources: ")
    assert above == f"# Numbers of {chosen.output.as_posix()}\n\n[1, 2]"
    assert rest.endswith("and was up to date when this page was made.\n\n## More\n\nNothing.\n")
    assert suite.folder is not None and not suite.folder.exists()


def test_one_failure_gives_the_exit_code_for_failures(repository, tmp_path):
    kept = tmp_path / "kept"
    assert run_suite(Numbers(3), options(repository, keep=kept), repository=repository) == EXIT_FAILED
    assert (kept / "work").exists()
    with pytest.raises(UserError, match="exists already: give a new folder"):
        run_suite(Numbers(3), options(repository, keep=kept), repository=repository)


@pytest.mark.parametrize(("before", "meanwhile"), [("", "edited"), ("edited", "")])
def test_a_record_says_that_sources_were_not_committed_before_it_or_while_it_was_made(repository, before, meanwhile):
    chosen = options(repository)
    write(repository, "src/gpt2.py", text=before)
    suite = Numbers(1, during=lambda: write(repository, "src/gpt2.py", text=meanwhile))
    run_suite(suite, chosen, repository=repository)
    assert json.loads(chosen.output.read_text())["git_commit"] == f"{commit_of(repository)}-dirty"
    assert "files that were not committed took part).\n" in chosen.page.read_text()


def test_a_page_of_an_old_record_says_what_has_changed(repository):
    chosen = options(repository)
    run_suite(Numbers(1), chosen, repository=repository)
    write(repository, "src/gpt2.py", text="other")
    make_page(PAGE, chosen.output, repository / "again.md", repository=repository)
    assert "1 of 1 sources had changed: src/gpt2.py." in (repository / "again.md").read_text()
