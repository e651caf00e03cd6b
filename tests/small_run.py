"""Small token files, recipes and command lines, for tests that give ``src/gpt2.py`` real input."""

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dsgpt.data.index import ENTRY, SourceEntry, document_hash, index_path, relative, write_sources
from dsgpt.data.token_file import TokenFileWriter, TokenizerFacts
from dsgpt.data.vocabulary import open_vocabulary

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for folder in ("src", "charts", "data_prep")
    for path in (REPOSITORY / folder).glob("*.py")
)
"""Every script that users start, by its path from the root."""
VOCABULARY = 257
END_OF_TEXT = 256
SEQUENCE = 16
TOKENS = 40 * SEQUENCE + 1
"""40 windows: five steps of the global batch in ``RECIPE``."""

RECIPE: dict[str, Any] = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
}


def write_tokens(path: Path, ids: np.ndarray, **changes: Any) -> Path:
    """Write ``ids`` as uint16 to ``path``, with a sidecar in which ``changes`` replace the true values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = np.asarray(ids).astype("<u2").tobytes()
    path.write_bytes(data)
    sidecar = {
        "dtype": "uint16",
        "tokens": len(ids),
        "documents": 1,
        "vocab_size": VOCABULARY,
        "eot_id": END_OF_TEXT,
        "tokenizer": None,
        "source": "random ids",
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
        "mtime_ns": path.stat().st_mtime_ns,
    }
    path.with_suffix(".json").write_text(json.dumps(sidecar | changes))
    return path


def random_ids(count: int, *, seed: int = 0, below: int = END_OF_TEXT) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, below, count)


def write_data(folder: Path) -> Path:
    """Write ``train.bin`` and ``val.bin`` with their sidecars."""
    write_tokens(folder / "train.bin", random_ids(TOKENS))
    write_tokens(folder / "val.bin", random_ids(10 * SEQUENCE + 1, seed=1))
    return folder


def write_recipe(path: Path, recipe: Any = RECIPE, **changes: Any) -> Path:
    """Write a recipe with ``changes`` in its top level; a recipe that is text is written unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(recipe if isinstance(recipe, str) else json.dumps(recipe | changes if changes else recipe))
    return path


def command_line(folder: Path, **changes: Any) -> list[str]:
    """Flags of a baseline of a few steps on the data in ``folder``.

    ``changes`` replace a flag's value; None leaves the flag out, True gives it without a value.
    """
    flags = {
        "run_type": "baseline",
        "train_data_path": folder / "train.bin",
        "val_data_path": folder / "val.bin",
        "checkpoint_path": folder / "run",
        "deepspeed_config": folder / "recipe.json",
        "num_layers": 2,
        "num_heads": 2,
        "embedding_size": 16,
        "max_position_embeddings": SEQUENCE,
        "device": "cpu",
        "max_train_steps": 2,
    } | changes
    words: list[str] = []
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def write_tokenizer(folder: Path, *, size: int = VOCABULARY) -> dict[str, str | None]:
    """Write a byte-level tokenizer of ``size`` ids without merges; the last id is end-of-text.

    Returns:
        The ``tokenizer`` entry of a sidecar for data of this tokenizer.
    """
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"unused{number}" for number in range(size - VOCABULARY))]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return {"name": folder.name, "sha256": hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()}


def write_documents(folder: Path, texts: list[str]) -> Path:
    """Data of ``texts``, with a recipe: the first half from files of their own, the others from one of JSON lines."""
    (folder / "text").mkdir(parents=True)
    facts = TokenizerFacts(**write_tokenizer(folder / "tokenizer"))
    encode = open_vocabulary(folder / "tokenizer").tokenizer.encode
    half, entries, lines = len(texts) // 2, [], folder / "text" / "lines.jsonl"
    paths = [folder / "text" / f"{number:03}.txt" for number in range(half)]
    made = {"vocab_size": VOCABULARY, "eot_id": END_OF_TEXT, "tokenizer": facts, "source": "texts"}
    with TokenFileWriter(folder / "train.bin", **made) as writer, lines.open("w") as file:
        for number, text in enumerate(texts):
            ids, place = encode(text).ids, file.tell()
            entries.append((document_hash(text.encode()), place, min(number, half), len(ids) + 1))
            writer.append(ids)
            if number < half:
                paths[number].write_text(text)
            else:
                file.write(json.dumps({"id": str(number), "text": text}) + "\n")
    np.array(entries, ENTRY).tofile(index_path(folder / "train.bin"))
    stats = {relative(path, folder): path.stat() for path in [*paths, lines]}
    write_sources(
        folder / "train.bin",
        [
            SourceEntry(path=path, size=stat.st_size, mtime_ns=stat.st_mtime_ns, unit="byte")
            for path, stat in stats.items()
        ],
    )
    write_tokens(folder / "val.bin", np.arange(161) % END_OF_TEXT)
    write_recipe(folder / "recipe.json")
    return folder


def write_inputs(folder: Path) -> Path:
    """Write what ``command_line`` names: token files, with the tokenizer that made them, and a recipe."""
    write_data(folder)
    write_tokens(folder / "train.bin", random_ids(TOKENS), tokenizer=write_tokenizer(folder / "tokenizer"))
    write_recipe(folder / "recipe.json")
    return folder


def within(condition: Callable[[], Any], *, seconds: float = 60) -> Any:
    """Wait until ``condition()`` holds, and return its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


class Quiet(BaseHTTPRequestHandler):
    """Answers requests without a log of them."""

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def running(server: HTTPServer) -> Iterator[str]:
    """The address of ``server``, which answers in a thread."""
    with server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def without_paths(text: str, folder: Path) -> str:
    """``text`` with the word FOLDER in place of the path ``folder``, which differs in every run of a test."""
    return text.replace(str(folder), "FOLDER")
