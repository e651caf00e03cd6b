r"""Transcripts: command lines as users type them, and what each of them prints.

A line that begins with ``$`` is a command. The lines above it that begin with ``+`` change its folder. The lines below
are its output: standard output, standard error, ``wrote PATH`` for each new path, ``removed PATH`` for each that is
gone, and the exit code in brackets unless it is 0. A line such as ``RUN = --epochs 1`` names words that commands
repeat; lines that begin with ``#`` are headings. Changes are:

    + recipe.json: optimizer.type = "SGD"    a value in a JSON file
    + a.txt = "caf\u00e9"                    a file of these characters, in Latin-1; with a value that is no text, JSON
    + link -> run                            a link
    + val.bin is missing                     a file or folder is removed
"""

import difflib
import gc
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from forked_ranks import be_script

REPOSITORY = Path(__file__).resolve().parents[2]
VARIABLES = {"COLUMNS": "120", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "PYTHONIOENCODING": "utf-8"}
SHARED = ("dsgpt.", "transformers.", "matplotlib.")
"""Beginnings of modules that this process imports after the first command that did, so that the next ones find them."""
LIMIT_SEC = 60
"""Seconds after which the system ends a command that is stuck."""
_CHANGE = re.compile(r"\+ (?P<file>\S+?)(?:: (?P<place>\S+))? (?:= (?P<value>.*)|-> (?P<target>.*)|is missing)")
_CHOICES = re.compile(r"\(choose from [^)]*\)")


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str
    modules: list[str]
    """Everything that it and this process had imported."""


def run(words: list[str], *, cwd: Path, variables: Mapping[str, str] | None = None) -> Done:
    """Run ``dsgpt`` or a script of the repository in a fork, in which what earlier commands imported is there."""
    script = "dsgpt.__main__" if words[0] == "dsgpt" else str(REPOSITORY / words[0])
    variables = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ} | VARIABLES | (variables or {})
    with tempfile.TemporaryDirectory() as folder:
        out, err, imported = (Path(folder, name) for name in ("out", "err", "imported"))
        gc.freeze()  # else the child's collections copy all that was imported
        child = os.fork()
        if not child:
            _report_modules(imported)
            signal.alarm(LIMIT_SEC)
            be_script([script, *words[1:]], cwd=cwd, environment=variables, outputs=(out, err))
        gc.unfreeze()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        modules = imported.read_text().split() if imported.exists() else []
        done = Done(code, *(path.read_text(encoding="utf-8", errors="replace") for path in (out, err)), modules)
    if "torch" in sys.modules or "torch" not in modules:
        for name in modules:
            if name.startswith(SHARED) and name not in sys.modules:
                importlib.import_module(name)
    return done


def _report_modules(file: Path) -> None:
    """Write the names of the imported modules when this process ends."""
    end = os._exit

    def report(code: int) -> None:
        file.write_text("\n".join(sys.modules))
        end(code)

    os._exit = report


@dataclass(frozen=True)
class Row:
    """A command of a transcript; ``text`` is what the transcript has of it."""

    changes: tuple[str, ...]
    command: str
    output: str

    @property
    def text(self) -> str:
        return "\n".join((*self.changes, f"$ {self.command}", *([self.output] if self.output else [])))

    def again(self, folder: Path, names: Mapping[str, str]) -> "Row":
        """The row with what the command prints today, in a copy of ``folder``."""
        with tempfile.TemporaryDirectory() as root:
            here = Path(shutil.copytree(folder, Path(root, "here")))
            for change in self.changes:
                _change(here, change)
            before = set(here.rglob("*"))
            command = re.sub(r"[A-Z]+", lambda word: names.get(word[0], word[0]), self.command)
            words = shlex.split(command.replace("REPOSITORY", str(REPOSITORY)))
            count = sum(1 for word in words if re.match(r"[A-Z_]+=", word))
            done = run(words[count:], cwd=here, variables=dict(word.split("=", 1) for word in words[:count]))
            assert "error: " not in done.out, done.out
            after = set(here.rglob("*"))
            wrote = [f"wrote {path.relative_to(here)}" for path in sorted(after - before)]
            wrote += [f"removed {path.relative_to(here)}" for path in sorted(before - after)]
            code = [f"[{done.code}]"] if done.code else []
            text = "\n".join([(done.out + done.err).strip("\n"), *wrote, *code])
        return self.with_output(text.replace(str(here), "HERE"))

    def with_output(self, text: str) -> "Row":
        """The row with another output, without what differs between checkouts and Pythons."""
        text = text.replace(str(REPOSITORY), "REPOSITORY").strip("\n")
        return replace(self, output=_CHOICES.sub("(choose from ...)", text))


def _change(folder: Path, line: str) -> None:
    change = _CHANGE.fullmatch(line)
    assert change, line
    path = folder / change["file"]
    path.parent.mkdir(parents=True, exist_ok=True)
    if change["target"]:
        path.symlink_to(change["target"].replace("REPOSITORY", str(REPOSITORY)))
    elif change["value"] is None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:
        value = json.loads(change["value"])
        if change["place"]:
            whole = json.loads(path.read_text())
            *blocks, key = change["place"].split(".")
            block = whole
            for name in blocks:
                block = block.setdefault(name, {})
            block[key] = value
            value = whole
        path.write_bytes((value if isinstance(value, str) else json.dumps(value)).encode("latin-1"))
        path.chmod(0o644)


def read(text: str) -> Iterator[Row | str]:
    """The rows of a transcript; between them, its other lines."""
    changes: list[str] = []
    for part in re.split(r"^(?=[+$#] |[A-Z]+ = )", text, flags=re.MULTILINE):
        if part.startswith("+ "):
            changes.append(part.strip())
        elif part.startswith("$ "):
            command, _, output = part[2:].partition("\n")
            yield Row(tuple(changes), command, output.strip("\n"))
            changes.clear()
        elif part.strip():
            yield part.strip()


def remade(text: str, folder: Path) -> str:
    """The transcript with what its commands print today."""
    names = dict(line.split(" = ", 1) for line in text.splitlines() if re.match(r"[A-Z]+ = ", line))
    parts = [part if isinstance(part, str) else part.again(folder, names).text for part in read(text)]
    return "\n\n".join(parts) + "\n"


def require_golden(name: str, text: str, request: pytest.FixtureRequest) -> None:
    """Fail unless ``text`` is that of the file ``name``; with ``--snapshot-update``, write the file."""
    golden = Path(__file__).with_name(name)
    if request.config.getoption("update_snapshots"):
        golden.write_text(text, encoding="utf-8")
    committed = golden.read_text(encoding="utf-8").splitlines()
    if changed := list(difflib.unified_diff(committed, text.splitlines(), "committed", "now", lineterm="", n=4)):
        pytest.fail("\n".join(changed), pytrace=False)
