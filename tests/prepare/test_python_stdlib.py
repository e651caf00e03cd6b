"""The embedded corpus: real text, no tests, and the whole of it prepared in well under a minute."""

from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from dsgpt.data import download
from dsgpt.data.sources import STDLIB_NAME, downloaded_source, stdlib_source
from dsgpt.data.token_file import open_token_file


def test_contents():
    documents = [document for _, document in stdlib_source().documents()]
    keys = [document.key for document in documents]
    assert len(set(keys)) == len(keys)
    parts = {part for key in keys for part in key.split("/")[:-1]}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}
    assert {"argparse.py", "json/decoder.py", "pydoc_data/topics/assert.txt"} <= set(keys)
    assert not any(key.startswith(("_sysconfigdata", "config-")) for key in keys)
    topic = next(document.text for document in documents if document.key == "pydoc_data/topics/assert.txt")
    assert topic.startswith('The "assert" statement\n')
    assert 6e6 < sum(len(document.text.encode()) for document in documents) < 20e6


def test_the_default_command_prepares_it(run, tmp_path: Path):
    done = run("preprocess.py", cwd=tmp_path)
    assert not done.stderr, "no progress bars in a log"
    folder = tmp_path / "data" / "python-stdlib"
    train, val = (open_token_file(folder / f"{split}.bin") for split in ("train", "val"))
    assert (train.sidecar.vocab_size, train.sidecar.dtype) == (8192, "uint16")
    assert 0.02 < val.sidecar.documents / (train.sidecar.documents + val.sidecar.documents) < 0.09
    assert train.tokens > 1_500_000
    ids = np.memmap(val.path, dtype=np.uint16, mode="r")
    text = AutoTokenizer.from_pretrained(folder / "tokenizer").decode(ids.tolist())
    originals = {document.text for _, document in stdlib_source().documents()}
    decoded = text.split("<|endoftext|>")[:-1]
    assert len(decoded) == val.sidecar.documents
    assert set(decoded) <= originals


def test_downloaded_documents_are_the_same_input(tmp_path: Path):
    raw = tmp_path / "raw"
    download.keep_stdlib(raw, max_documents=None)
    direct, kept = stdlib_source(), downloaded_source(STDLIB_NAME, output_dir=tmp_path)
    assert kept.fingerprint() == direct.fingerprint()
    assert kept.description == direct.description
    filled = [(document.key, document.text) for _, document in direct.documents() if document.text.strip()]
    assert [(document.key, document.text) for _, document in kept.documents()] == filled

    download.keep_stdlib(raw, max_documents=50)
    assert downloaded_source(STDLIB_NAME, output_dir=tmp_path).fingerprint() != direct.fingerprint()


def test_another_python_is_another_input(tmp_path: Path):
    prints = set()
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / "module.py").write_text(text)
        prints.add(stdlib_source(root=tmp_path).fingerprint())
    (tmp_path / "empty.py").write_text("")
    prints.add(stdlib_source(root=tmp_path).fingerprint())
    assert len(prints) == 2
