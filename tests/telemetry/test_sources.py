"""Whether the sources of a record have changed since its commit, in real git repositories."""

from pathlib import Path

import pytest
from git_repository import commit_all, commit_of, git, write

from dsgpt.record.provenance import SourceChanges, changes_since, git_commit, marked, without_sources

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
    assert found.paragraph() == (
        f"Sources: the record was made at commit `{commit[:12]}`, and was up to date when this page was made."
    )


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
    found = changes(repository, commit)
    assert (found.line(), found.paragraph()) == (
        "not known (no commit is named)",
        "Sources: not known (no commit is named).",
    )
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


def test_the_paragraph_about_sources_can_be_removed_from_a_page():
    page = "# Title\n\nHead.\n\nSources: some,\nand more.\n\n## Table\n"
    assert without_sources(page) == "# Title\n\nHead.\n\n## Table\n"
