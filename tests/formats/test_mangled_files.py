"""No file that somebody else wrote causes a traceback: it is refused with one-line errors, or it is read."""

import random
import re
import shutil
import time

import pytest
from file_kinds import KINDS, RUN, write_all
from small_run import command_line, write_data, write_recipe, write_tokenizer

from dsgpt.common.errors import UserError
from dsgpt.training.command import train

SEED = 8
SOME = 20
"""Files of each kind with ``make check`` and ``make test``."""
MORE = 80
"""Files of each kind with ``make test-slow``, if the kind has as many."""
LONGEST_SEC = 20
"""A hundred times what any of them takes. Quadratic work would take minutes."""


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A folder with one good file of every kind."""
    made, folder = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("fuzz")
    write_data(made)
    write_recipe(made / "recipe.json")
    assert train(command_line(made, **RUN)) == 0
    write_tokenizer(folder / "tokenizer")
    write_all(folder, made)
    return folder


@pytest.mark.parametrize("most", [SOME, pytest.param(MORE, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", KINDS)
def test_a_mangled_file_is_refused_in_one_line_or_read(whole, tmp_path, monkeypatch, capsys, name, most):
    kind = KINDS[name]
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # it takes half the time
    kind.read(folder)  # as it is, it is good
    assert "error:" not in capsys.readouterr().err
    good = (folder / kind.file).read_bytes()
    refused = 0
    for number in range(min(kind.count, most)):
        data = kind.mangle(good, random.Random(f"{SEED} {name} {number}"))
        (folder / kind.file).write_bytes(data)
        started = time.monotonic()
        try:
            kind.read(folder)
            said = capsys.readouterr()
            lines = [line for line in said.err.splitlines() if line]
            refused += " is refused: " in said.out  # a checkpoint; an older one is used instead
        except UserError as error:
            lines = [f"error: {line}" for line in error.problems]
        except BaseException as error:
            raise AssertionError(f"file {number} of seed {SEED}: {data[:2000]!r}") from error
        assert all(re.fullmatch(r"error: .{,4000}", line) for line in lines), (number, lines)
        assert time.monotonic() - started < LONGEST_SEC, number
        refused += bool(lines)
        if kind.file.startswith("run/"):  # reading changes other files of the run
            shutil.rmtree(folder / "run")
            shutil.copytree(whole / "run", folder / "run")
    assert refused or kind.file.endswith(("metrics.jsonl", "config.json", "latest", "best", "training_metrics.json"))
