"""The scripts as commands without a network, and a small corpus of difficult texts."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_ranks import run_script
from prep_helpers import CORPUS
from small_run import REPOSITORY, write_tokenizer

from dsgpt.data import preparation as command

Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def script_command(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[list[str], dict]]:
    """The arguments and environment of a script without a network: the hub is a closed port, its cache empty."""
    home = tmp_path_factory.mktemp("hub-cache")

    def build(script: str, *flags: object) -> tuple[list[str], dict]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(home), "no_proxy": "127.0.0.1"}
        return [sys.executable, str(REPOSITORY / "data_prep" / script), *map(str, flags)], environment

    return build


@pytest.fixture(scope="session")
def run(script_command) -> Run:
    """Run a script in a folder; returns its output and exit code."""

    def execute(script: str, *flags: object, cwd: Path, code: int = 0) -> subprocess.CompletedProcess:
        (_, path, *words), environment = script_command(script, *flags)
        done = run_script(path, words, cwd=cwd, environment=environment)
        assert done.returncode == code, f"{flags} -> {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    return execute


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of ``CORPUS``, and four that are not documents: empty, blank, binary and hidden."""
    root = tmp_path_factory.mktemp("text") / "corpus"
    others = {"a/empty.txt": b"", "b/blank.txt": b" \n\n", "c/picture.png": b"\x89PNG\0\0", ".git/config": b"hidden"}
    for name, data in ({name: text.encode() for name, text in CORPUS.items()} | others).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


@pytest.fixture(scope="session")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local tokenizer of 257 ids."""
    folder = tmp_path_factory.mktemp("tokenizers") / "bytes"
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def prepared(run: Run, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small corpus with a trained tokenizer of 400 ids; tests only read it."""
    cwd = tmp_path_factory.mktemp("prepared")
    run("preprocess.py", "--input", corpus, "--tokenizer", "train", "--vocab_size", 400, cwd=cwd)
    return cwd / "data" / "corpus"


@pytest.fixture
def prepare_here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """preprocess.py in this process, for tests of what it writes: this saves the libraries' start-up."""

    def execute(*flags: object, cwd: Path, small: bool = False) -> None:
        monkeypatch.chdir(cwd)
        command.main([str(flag) for flag in flags], small=small)

    return execute


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder with nine documents."""
    (folder := tmp_path / "text").mkdir()
    for number in range(9):
        (folder / f"{number}.txt").write_text(f"document {number}\nsome words\n" * 3)
    return folder


@pytest.fixture
def again(prepare_here, text: Path, bytes_tokenizer: Path, tmp_path: Path) -> Callable[..., None]:
    """Prepare ``text`` to ``out`` in the test's folder; returns a function that prepares it again."""

    def prepare(*flags: object) -> None:
        prepare_here("--input", text, "--tokenizer", bytes_tokenizer, "--output_dir", "out", *flags, cwd=tmp_path)

    prepare()
    return prepare
