"""What the commands of all suites share: lines, record, page, the entry for sources, exit code."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from messages import without_paths

from dsgpt.benchmarks.harness.command import EXIT_FAILED, SuiteCommand, SuiteOptions, run_suite
from dsgpt.benchmarks.harness.pages import Record, SuitePage, make_page
from dsgpt.common.errors import UserError
from dsgpt.telemetry.console import Console
from dsgpt.telemetry.sources import CHANGED_MEANWHILE, SOURCES_FILE, made_from


def page_text(record: Record, *, source: str) -> str:
    return f"# Numbers of {source}\n\n{record['numbers']}\n\n## More\n\nNothing.\n"


PAGE = SuitePage(name="parity", of="numbers", text=page_text, summary=lambda record: [f"sum {sum(record['numbers'])}"])


class Numbers(SuiteCommand[int]):
    """Counts from 1; numbers above 2 are failures."""

    page, unit = PAGE, "number"

    def __init__(self, total: int, *, edits: Path | None = None) -> None:
        self._total, self._edits = total, edits
        self.folder: Path | None = None

    def plan(self, console: Console) -> int:
        return self._total

    def begin(self, folder: Path, console: Console) -> None:
        self.folder = folder
        (folder / "work").write_text("some")

    def results(self) -> Iterator[int]:
        if self._edits:
            self._edits.write_text("edited while the suite runs")
        yield from range(1, self._total + 1)

    def line(self, result: int, *, count: str, left: str) -> str:
        return f"{count} number {result}{' of more' if left else ''}"

    def record(self, results: Sequence[int], *, seconds: float) -> Record:
        return {"git_commit": "abc", "numbers": list(results), "not finite": float("nan")}

    def failures(self, results: Sequence[int], record: Record) -> list[str]:
        return [str(number) for number in results if number > 2]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "gpt2.py").write_text("pass")
    return tmp_path


def options(folder: Path, *, keep: Path | None = None) -> SuiteOptions:
    return SuiteOptions(output=folder / "out" / "numbers.json", page=folder / "numbers.md", keep=keep)


def test_a_run_prints_each_result_and_writes_record_page_and_sources(repository, capsys, snapshot):
    chosen, suite = options(repository), Numbers(2)
    assert run_suite(suite, chosen, repository=repository) == 0
    assert without_paths(capsys.readouterr().out, repository) == snapshot
    recorded = json.loads(chosen.output.read_text())
    assert recorded.items() >= {"git_commit": "abc", "numbers": [1, 2], "not finite": None}.items()
    entry = made_from(chosen.output)
    assert (entry.git_commit, list(entry.sources)) == ("abc", ["src/gpt2.py"])
    head, _, rest = chosen.page.read_text().partition("\n\nSources: ")
    assert head == f"# Numbers of {chosen.output.as_posix()}\n\n[1, 2]"
    assert rest.endswith("This page was made from these sources.\n\n## More\n\nNothing.\n")
    assert suite.folder is not None and not suite.folder.exists()


def test_one_failure_gives_the_exit_code_for_failures(repository, tmp_path):
    kept = tmp_path / "kept"
    assert run_suite(Numbers(3), options(repository, keep=kept), repository=repository) == EXIT_FAILED
    assert (kept / "work").exists()
    with pytest.raises(UserError, match="exists already: give a new folder"):
        run_suite(Numbers(3), options(repository, keep=kept), repository=repository)


def test_a_source_that_changes_while_the_suite_runs_is_named(repository):
    chosen = options(repository)
    run_suite(Numbers(1, edits=repository / "src" / "gpt2.py"), chosen, repository=repository)
    assert made_from(chosen.output).sources == {"src/gpt2.py": CHANGED_MEANWHILE}
    assert "1 of them had changed: src: gpt2.py." in chosen.page.read_text()


def test_sources_that_cannot_be_read_are_refused_before_the_suite_starts(repository):
    chosen, suite = options(repository), Numbers(1)
    chosen.output.parent.mkdir()
    (chosen.output.parent / SOURCES_FILE).write_text("{")
    with pytest.raises(UserError, match=r"SOURCES\.json: cannot be read"):
        run_suite(suite, chosen, repository=repository)
    assert suite.folder is None


def test_a_page_of_an_old_record_says_what_has_changed(repository):
    chosen = options(repository)
    run_suite(Numbers(1), chosen, repository=repository)
    (repository / "src" / "gpt2.py").write_text("other")
    make_page(PAGE, chosen.output, repository / "again.md", repository=repository)
    assert "1 of them had changed: src: gpt2.py." in (repository / "again.md").read_text()
