"""Token files of random ids, for suites that measure speed or memory."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dsgpt.data.token_file import TokenFileWriter


def write_random_tokens(folder: Path, *, vocab_sizes: Sequence[int], count: int) -> None:
    """Files ``V.bin`` of ``count`` ids below V, all equally likely, so that a batch uses as many rows as it can."""
    folder.mkdir(parents=True, exist_ok=True)
    for vocab_size in vocab_sizes:
        ids = np.random.default_rng(0).integers(0, vocab_size - 1, size=count)
        with TokenFileWriter(
            folder / f"{vocab_size}.bin",
            vocab_size=vocab_size,
            eot_id=vocab_size - 1,
            tokenizer=None,
            source="random ids",
        ) as writer:
            writer.append(ids)
