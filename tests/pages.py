"""The written pages of the repository, and what tests check in them: commands, flags, links and paths."""

import functools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from small_run import REPOSITORY

PACKAGE = REPOSITORY / "src" / "dsgpt"
PAGES = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").glob("*.md"),
        REPOSITORY / "ds_configs" / "README.md",
    ]
)
SCRIPTS = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for folder in ("src", "charts", "data_prep")
    for path in (REPOSITORY / folder).glob("*.py")
)
HELP = (REPOSITORY / "tests" / "goldens" / "help.txt").read_text(encoding="utf-8")
_BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")
_PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:python|deepspeed|torchrun|make) ")


def name_of(page: Path) -> str:
    """The page's path from the root of the repository."""
    return page.relative_to(REPOSITORY).as_posix()


def text_of(page: Path) -> str:
    """The page without its code blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    page: str
    line: str

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"

    @property
    def words(self) -> list[str]:
        """Its words without comments and without the variables set before it."""
        words = shlex.split(self.line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        return words

    @property
    def script(self) -> str | None:
        """The script that it starts: ``src/gpt2.py``, for example."""
        return next((word for word in self.words if word in SCRIPTS), None)

    @property
    def script_words(self) -> list[str]:
        """The words behind the script."""
        words = self.words
        return words[words.index(self.script) + 1 :] if self.script else []


def commands_in_blocks(page: Path) -> list[Command]:
    """Every command line of the page's ``bash`` blocks."""
    found = []
    for language, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "bash":
            lines = block.replace("\\\n", " ").splitlines()
            found += [Command(name_of(page), line) for line in lines if shlex.split(line, comments=True)]
    return found


def commands_in_text(page: Path) -> list[Command]:
    """Every command between backticks in the page's text."""
    inline = [" ".join(code.split()) for code in _INLINE.findall(text_of(page))]
    return [Command(name_of(page), code) for code in inline if _PROGRAM.match(code) and "..." not in code]


def flags_in_text(page: Path) -> set[str]:
    """Every ``--flag`` between backticks in the page's text."""
    return {flag for code in _INLINE.findall(text_of(page)) for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)}


def paths_in_text(page: Path) -> set[tuple[str, str]]:
    """Every path of a source, a JSON file or a page between backticks, and the name behind it (``x.py: name``)."""
    return set(re.findall(r"`([\w./-]+\.(?:py|json|md))(?:: (\w+))?`", text_of(page)))


def links_of(page: Path) -> list[str]:
    """The targets of the page's links into the repository, and its pictures."""
    found = re.findall(r"\]\(([^)\s]+)\)|\b(?:src|srcset)=\"([^\"]+)\"", text_of(page))
    return sorted({link for pair in found for link in pair if link and "://" not in link})


def anchors_of(page: Path) -> set[str]:
    """The names under which hosted pages offer their headings to links."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def files_called(path: str) -> list[Path]:
    """The files that a page may mean by ``path``: from the root, or below one of the folders that pages speak of."""
    folders = ("", "src", "src/dsgpt", "docs", "ds_configs", "tests")
    direct = [REPOSITORY / folder / path for folder in folders]
    return [file for file in direct if file.exists()] or sorted(PACKAGE.rglob(path))


@functools.cache
def help_of(script: str, *command: str) -> str:
    """What a script prints with ``--help``, as the goldens have it."""
    title = re.escape(" ".join(["$", script, *command, "--help"]))
    found = re.search(rf"^{title}\n(.*?)(?=^\$ |\Z)", HELP, flags=re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def help_for(command: Command) -> str:
    """The help that has the flags of ``command``; each suite of ``benchmark.py`` has its own."""
    suites = command.script_words[:1] if command.script == "src/benchmark.py" else []
    return help_of(command.script or "", *(word for word in suites if not word.startswith("-")))
