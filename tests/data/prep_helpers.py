"""The small corpus, and functions that read what the scripts write."""

import hashlib
import json
import subprocess
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

OUTPUTS = ["train.bin", "val.bin", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "preparation.json"]


LINES = "the quick brown fox jumps over the lazy dog\nand the dog sleeps on, as the dog always does\n"

CORPUS = {
    "a/windows.txt": "first line\r\nsecond line\r\n" + LINES,
    "a/special.txt": "before <|endoftext|> after\n" + LINES,
    "a/unicode.md": "naïve café — Ελληνικά 日本語 \U0001f600 \ufeff\u2028 end\n" + LINES,
    "b/spaces.txt": "  leading\t\ttabs\n\n\n   and trailing   \n\n" + LINES,
    "b/no newline": "no newline at the end " + LINES.strip(),
    "b/control.txt": "form\ffeed and \x1c separators\x85\xa0" + LINES,
    **{f"c/{number:02}.txt": f"document {number}\n" + LINES * (number % 4 + 1) for number in range(20)},
}


def errors(done: subprocess.CompletedProcess) -> list[str]:
    """The error lines of a run."""
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


def documents_of(folder: Path, split: str, suffix: str = "") -> list[str]:
    """Decode a token file as nanoGPT would open it, cut at the end-of-text id."""
    sidecar = json.loads((folder / f"{split}{suffix}.json").read_text())
    ids = np.memmap(folder / f"{split}{suffix}.bin", dtype=sidecar["dtype"], mode="r")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    ends = np.flatnonzero(ids == sidecar["eot_id"])
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(document[:-1].tolist()) for document in np.split(ids, ends + 1)[:-1]]


def texts_of(folder: Path, suffix: str = "") -> list[str]:
    return [text for split in ("train", "val") for text in documents_of(folder, split, suffix)]


def hashes(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in OUTPUTS}
