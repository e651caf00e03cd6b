"""Real text, prepared by the real script, and small real runs over it."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from training_runs import REPOSITORY, Corpus

TEXT = ("abc.py", "bisect.py", "calendar.py", "heapq.py", "textwrap.py", "shlex.py", "json/decoder.py", "this.py")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Corpus:
    """A few of the standard library's files, with a tokenizer of 300 ids trained on them."""
    folder = tmp_path_factory.mktemp("corpus")
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = folder / "sources"
    for name in TEXT:
        copy = sources / name.replace("/", "-")
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(library / name, copy.with_suffix(".txt"))
    command = [sys.executable, str(REPOSITORY / "data_prep" / "preprocess.py"), "--input", str(sources)]
    command += [
        "--tokenizer",
        "train",
        "--vocab_size",
        "300",
        "--val_fraction",
        "0.2",
        "--output_dir",
        str(folder / "data"),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return Corpus(folder=folder / "data")
