"""The pages tell the truth: every command, flag, link and path that they name exists."""

import functools
import itertools
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from small_run import REPOSITORY, SCRIPTS, random_ids, write_tokens
from training_runs import resolved

# What a page is, and what it names: commands, flags, links and paths.

PACKAGE = REPOSITORY / "src" / "dsgpt"
PAGES = sorted(
    path for places in ("*.md", "docs/*.md", "launch/*.md", "ds_configs/README.md") for path in REPOSITORY.glob(places)
)
HELP = (REPOSITORY / "tests" / "goldens" / "help.txt").read_text(encoding="utf-8")
_BLOCK = re.compile(r"```(\w*)(?: title=\w+)?\n(.*?)```", re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")
_PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:python|deepspeed|torchrun|make) ")


def name_of(page: Path) -> str:
    """The page's path from the root of the repository."""
    return page.relative_to(REPOSITORY).as_posix()


def text_of(page: Path) -> str:
    """The page without its code blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


class Command(NamedTuple):
    """One command of a page."""

    page: str
    words: list[str]
    """Without comments and without the variables set before it."""

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"

    @property
    def script(self) -> str | None:
        """The script that it starts: ``src/gpt2.py``, for example."""
        return next((word for word in self.words if word in SCRIPTS), None)

    @property
    def script_words(self) -> list[str]:
        """The words behind the script."""
        return self.words[self.words.index(self.script) + 1 :] if self.script else []


def commands_in_blocks(page: Path) -> list[Command]:
    """Every command line of the page's ``bash`` blocks."""
    blocks = [block for language, block in _BLOCK.findall(page.read_text(encoding="utf-8")) if language == "bash"]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [command_of(page, line) for line in lines if shlex.split(line, comments=True)]


def commands_in_text(page: Path) -> list[Command]:
    """Every command between backticks in the page's text."""
    inline = [" ".join(code.split()) for code in _INLINE.findall(text_of(page))]
    return [command_of(page, code) for code in inline if _PROGRAM.match(code) and "..." not in code]


def command_of(page: Path, line: str) -> Command:
    words = itertools.dropwhile(re.compile(r"[A-Z_]+=.*").fullmatch, shlex.split(line, comments=True))
    return Command(name_of(page), list(words))


def links_of(page: Path) -> list[str]:
    """The targets of the page's links into the repository, and its pictures."""
    found = re.findall(r"\]\(([^)\s]+)\)|\b(?:src|srcset)=\"([^\"]+)\"", text_of(page))
    return sorted({link for pair in found for link in pair if link and "://" not in link})


@functools.cache
def help_of(script: str, *command: str) -> str:
    """What a script prints with ``--help``, as the goldens have it."""
    title = re.escape(" ".join(["$", script, *command, "--help"]))
    found = re.search(rf"^{title}\n(.*?)(?=^\$ |\Z)", HELP, flags=re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


# What every page must hold.

MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
PRESENT = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""What they name exists now; the changelog also tells of the past."""
COMMANDS = [command for page in PRESENT for command in (*commands_in_blocks(page), *commands_in_text(page))]
TRAININGS = [
    command
    for page in PRESENT
    if page.parent.name != "ds_configs"  # tests/config/test_recipe.py reads those
    for command in commands_in_blocks(page)
    if command.script == "src/gpt2.py"
]
PROGRAMS = {"cd", "git", "make", "sh", "tmux", "python", "deepspeed", "torchrun", "ruff", "mypy", "pre-commit"}
PROGRAMS |= {"aws", "gcloud", "ssh", "rm", "torchrun.sh", "gpu_wheels.sh"}
"""What commands of the pages start."""
FLAGS_OF_OTHERS = {
    *("--quiet", "--num_gpus", "--nproc_per_node", "--shutdown-timeout", "--signals-to-handle", "--max-restarts"),
    *(
        "--signal",
        "--requeue",
        "--dependency",
        "--nodes",
        "--gpus-per-node",
        "--array",
        "--export",
        "--nv",
        "--hostfile",
    ),
    *("--ntasks-per-node", "--safe_serialization", "--inject_missing_state"),
    *("--logdir", "--backend-store-uri", "--project"),
}
"""Launchers', Slurm's, DeepSpeed's tools' and trackers'."""
FILES_OF_OTHERS = {"zero_to_fp32.py", "ds_to_universal.py"}
SIDECARS = {f"{name}.{kind}" for name in ("NAME", "train", "val") for kind in ("json", "index", "sources.json")}


def each(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=name_of)


def test_there_are_pages_and_commands():
    names = {name_of(page) for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/ARCHITECTURE.md", "ds_configs/README.md"} <= names
    assert {command.script for command in COMMANDS} - {None} == set(SCRIPTS) - {"src/demo.py"}
    assert len(TRAININGS) >= 7


def test_the_readme_and_the_index_lead_to_every_page():
    indexes = [REPOSITORY / "README.md", REPOSITORY / "docs" / "README.md"]
    linked = {(index.parent / link.partition("#")[0]).resolve() for index in indexes for link in links_of(index)}
    assert {page.resolve() for page in PAGES} - linked == {REPOSITORY / "README.md"}


def test_the_readme_is_a_landing_page():
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    assert len(re.findall(r"\]\(|\bsrc(?:set)?=", text)) <= 12


@each(PAGES)
def test_links_lead_somewhere(page):
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", text_of(target), flags=re.MULTILINE) if anchor else []
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, link


@each(PAGES)
def test_the_rows_of_a_table_have_as_many_cells_as_its_header(page):
    for table in re.findall(r"(?:^\|.*\n)+", text_of(page), flags=re.MULTILINE):
        cells = {(row[-1], len(re.findall(r"(?<!\\)\|", row))) for row in table.splitlines()}
        assert len(cells) == 1 and cells.pop()[0] == "|", table


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_commands_name_programs_scripts_files_and_flags_that_exist(command: Command):
    words = command.words
    assert Path(words[0]).name in PROGRAMS
    if words[0] == "make":
        for goal in (word for word in words[1:] if "=" not in word and not word.startswith("-")):
            assert re.search(rf"^{goal}:", MAKEFILE, flags=re.MULTILINE), f"the Makefile has no goal {goal}"
    for word in words:
        if re.fullmatch(r"(?:src|charts|data_prep|ds_configs|tests)/[\w./-]+\.\w+", word):
            assert (REPOSITORY / word).exists(), word
    if command.script:
        suites = command.script_words[:1] if command.script == "src/benchmark.py" else []
        known = help_of(command.script, *(word for word in suites if not word.startswith("-")))
        for word in command.script_words:
            if word.startswith("--"):
                flag = word.split("=")[0]
                assert re.search(rf"{flag}(?![\w-])", known), f"{command.script} knows no {flag}"


def test_no_text_names_a_program_that_works_only_in_an_activated_environment():
    """A pasted ``python src/gpt2.py`` starts the system's Python, which has none of the packages."""
    sources = [path for folder in ("src", "charts", "data_prep") for path in (REPOSITORY / folder).rglob("*.py")]
    program = r"(?<![\w./-])(?:python3?|deepspeed|torchrun)(?: --?\w+(?: \d+)?)* (?:(?:src|charts|data_prep)/|-m pip).*"
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in (*PRESENT, *sources)}
    assert not [(name, line) for name, text in texts.items() for line in re.findall(program, text)]


def test_next_lines_name_scripts_and_flags_that_exist():
    """Every place that prints one spells its words as literals; what stands between them is only known in a run."""
    texts = [path.read_text(encoding="utf-8") for path in (*PACKAGE.rglob("*.py"), *(REPOSITORY / "src").glob("*.py"))]
    calls = [call for text in texts for call in re.findall(r"\bscript_words\((\"[^\n]*)", text)]
    assert len(calls) >= 7
    for call in calls:
        script, *words = re.findall(r'"([^"]+)"', call)
        for flag in (word for word in words if word.startswith("--")):
            assert re.search(rf"{flag}(?![\w-])", help_of(script)), call


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A little more than one global batch of the recipes, in the longest sequences of the commands."""
    folder = tmp_path_factory.mktemp("data")
    for number, name in enumerate(("train.bin", "val.bin")):
        write_tokens(folder / name, random_ids(33 * 1024 + 1, seed=number), vocab_size=8192)
    return folder


@pytest.mark.parametrize("command", TRAININGS, ids=str)
def test_trainings_pass_every_check_of_a_dry_run(command: Command, data, tmp_path, monkeypatch):
    """With other data and on the CPU; everything else is as the command says."""
    monkeypatch.chdir(REPOSITORY)
    words = command.words
    launcher = Path(words[0]).name
    numbers = [int(words[words.index(flag) + 1]) for flag in ("--num_gpus", "--nproc_per_node") if flag in words]
    ranks = 1 if launcher == "python" else (numbers or [4])[0]
    files = ("--train_data_path", data / "train.bin", "--val_data_path", data / "val.bin")
    others = (*files, "--checkpoint_path", tmp_path / "run", "--device", "cpu")
    config = resolved((*command.script_words, *others), ranks=ranks, launcher=launcher)
    assert config.topology.world_size == ranks
    assert config.total_steps == config.options.max_train_steps


FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
KNOWN_FLAGS = set(FLAG.findall(HELP))
"""The flags of all scripts."""


@each(PRESENT)
def test_flags_in_sentences_exist(page):
    tested = {"--without-processes", "--snapshot-update"} if page.name == "CONTRIBUTING.md" else set()
    named = {flag for code in _INLINE.findall(text_of(page)) for flag in FLAG.findall(code)}
    assert named - KNOWN_FLAGS <= FLAGS_OF_OTHERS | tested


@each(PRESENT)
def test_paths_in_sentences_exist(page):
    missing, sources = [], "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    for path, name in sorted(set(re.findall(r"`([\w./-]+\.(?:py|json|md))(?:: (\w+))?`", text_of(page)))):
        direct = [REPOSITORY / folder / path for folder in ("", "src", "src/dsgpt", "docs", "ds_configs", "tests")]
        files = [file for file in direct if file.exists()] or sorted(PACKAGE.rglob(path))
        if files and name:
            pattern = rf"^\s*(?:(?:def|class) {name}\b|{name}\b.*=)"
            if not any(re.search(pattern, file.read_text(encoding="utf-8"), flags=re.MULTILINE) for file in files):
                missing.append(f"{path}: {name}")
        elif not (files or path in FILES_OF_OTHERS | SIDECARS or f'"{path}"' in sources):  # it writes or reads it
            missing.append(path)
    assert not missing
