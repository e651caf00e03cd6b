"""The peers of ``benchmark.py tokens``, each in a process of its own: ``tokens_ways.py WAY TEXT OUT TOKENIZER``.

``bare``: gigatoken reads the files, encodes on all cores and the ids are written. ``nanogpt``: the way of nanoGPT's
``prepare.py``, written anew: ``datasets`` maps tiktoken over the documents on two processes, then the ids are joined in
a memory map.
"""

import json
import sys
from os import PathLike
from pathlib import Path

PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's."""
FILES = 50_000
"""Files that the bare engine gets at once. It maps each into memory, and Linux allows a process 65,530 maps."""


def bare(text: Path, out: Path, tokenizer: Path) -> None:
    """The engine alone, from files to ids in a file."""
    import awkward  # noqa: PLC0415
    import gigatoken  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    state = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    engine = gigatoken.Tokenizer.from_json(json.dumps(state | {"added_tokens": []}))
    paths: list[str | Path | PathLike[str]] = [str(path) for path in sorted(text.iterdir())]
    kind = gigatoken.JsonlFileSource if str(paths[0]).endswith(".jsonl") else gigatoken.TextFileSource
    with (out / "train.bin").open("wb") as file:
        for first in range(0, len(paths), FILES):
            ids = awkward.to_numpy(awkward.flatten(engine.encode_files(kind(paths[first : first + FILES]))))
            ids.astype(np.uint16).tofile(file)


def nanogpt(text: Path, out: Path, tokenizer: Path) -> None:
    """``datasets`` and tiktoken on two processes, and a memory map."""
    import datasets  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    paths = [str(path) for path in sorted(text.iterdir())]
    kind, more = ("json", {}) if paths[0].endswith(".jsonl") else ("text", {"sample_by": "document"})
    rows = datasets.load_dataset(kind, data_files=paths, split="train", cache_dir=str(out / "cache"), **more)
    for name, part in rows.train_test_split(test_size=0.0005, seed=2357, shuffle=True).items():
        mapped = part.map(_Encode(tokenizer), remove_columns=part.column_names, num_proc=min(2, len(part)))
        total = int(np.sum(mapped["len"], dtype=np.uint64))
        ids = np.memmap(out / f"{name}.bin", dtype=np.uint16, mode="w+", shape=(total,))
        place, shards = 0, min(1024, len(mapped))
        for index in range(shards):
            batch = mapped.shard(num_shards=shards, index=index, contiguous=True).with_format("numpy")
            joined = np.concatenate(batch["ids"])
            ids[place : place + len(joined)] = joined
            place += len(joined)
        ids.flush()


class _Encode:
    """Encodes a row with tiktoken; each process opens its own."""

    def __init__(self, tokenizer: Path) -> None:
        self.tokenizer = tokenizer

    def __call__(self, row: dict[str, str]) -> dict[str, object]:
        if not hasattr(_Encode, "engine"):
            _Encode.engine = open_tiktoken(self.tokenizer)  # type: ignore[attr-defined]
        ids = _Encode.engine.encode_ordinary(row["text"])  # type: ignore[attr-defined]
        ids.append(_Encode.engine.eot_token)  # type: ignore[attr-defined]
        return {"ids": ids, "len": len(ids)}


def open_tiktoken(folder: Path) -> object:
    """An encoding of tiktoken with the vocabulary in ``folder``, of GPT-2's kind."""
    import tiktoken  # noqa: PLC0415
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: PLC0415

    state = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    special = {token["content"]: token["id"] for token in state["added_tokens"]}
    ranks = {
        bytes(byte_of[character] for character in word): rank
        for word, rank in state["model"]["vocab"].items()
        if word not in special
    }
    return tiktoken.Encoding("gpt2-kind", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


if __name__ == "__main__":
    {"bare": bare, "nanogpt": nanogpt}[sys.argv[1]](*map(Path, sys.argv[2:]))
