"""The texts that suites train on, prepared by ``data_prep/preprocess.py``: of the standard library, a part or all."""

import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from dsgpt.common.errors import UserError
from dsgpt.data.token_file import TokenFileWriter, open_token_file

SOURCES = ("abc.py", "bisect.py", "calendar.py", "heapq.py", "textwrap.py", "shlex.py", "json/decoder.py", "this.py")
"""About 90 kB, in files that every Python since 3.11 has."""
VOCABULARY = 300


@dataclass(frozen=True)
class Corpus:
    """Prepared token files."""

    train: Path
    val: Path


def prepare_corpus(repository: Path, folder: Path) -> Corpus:
    """Token files in ``folder``, with a tokenizer of 300 ids trained on the text.

    Raises:
        UserError: this Python has no sources of its library, or the script failed; the message has its output.
    """
    library, text = Path(sysconfig.get_path("stdlib")), folder / "text"
    text.mkdir(parents=True)
    for name in SOURCES:
        if not (library / name).exists():
            raise UserError(f"{library / name}: is missing, but the suite trains on it: use a Python with its sources")
        shutil.copy(library / name, text / name.replace("/", "-").replace(".py", ".txt"))
    prepared = folder / "data"
    command = [sys.executable, str(repository / "data_prep" / "preprocess.py"), "--input", str(text)]
    command += ["--tokenizer", "train", "--vocab_size", str(VOCABULARY)]
    command += ["--val_fraction", "0.2", "--output_dir", str(prepared)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"data_prep/preprocess.py failed: {done.stderr.strip() or done.stdout.strip()}")
    return Corpus(train=prepared / "train.bin", val=prepared / "val.bin")


def prepare_demo(repository: Path, folder: Path) -> Path:
    """The text of ``make demo`` in ``folder``, prepared once.

    Raises:
        UserError: the script failed.
    """
    if not (folder / "train.bin").exists():
        command = [sys.executable, "data_prep/preprocess.py", "--output_dir", str(folder)]
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"data_prep/preprocess.py failed: {done.stderr.strip()[-500:]}")
    return folder


def cut_validation(corpus: Corpus, *, windows: int, length: int) -> Corpus:
    """The corpus with a validation file of the first ``windows`` windows of ``length`` tokens, next to the whole one.

    Args:
        corpus: as ``prepare_corpus`` made it.
        windows: how many; if this is not a multiple of the global batch, the last batch is padded.
        length: tokens that a window predicts.
    """
    whole = open_token_file(corpus.val)
    about, path = whole.sidecar, corpus.val.with_name("val-cut.bin")
    with TokenFileWriter(
        path,
        vocab_size=about.vocab_size or VOCABULARY,
        eot_id=about.eot_id or 0,
        tokenizer=about.tokenizer,
        source=f"the beginning of {corpus.val.name}",
    ) as writer:
        writer.append(whole.memmap()[: windows * length])  # an end-of-text id follows, which the last window predicts
    return Corpus(train=corpus.train, val=path)
