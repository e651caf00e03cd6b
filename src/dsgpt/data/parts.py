"""Encodes blocks, on several processes, into part files that a second run of the same command finds again.

A part has the ids of its block, then a row for each document, then sums with a checksum. It gets its name when it is
complete: a process that is killed leaves a part or none. What a part holds depends on its block alone.
"""

import contextlib
import hashlib
import multiprocessing
import os
import secrets
import signal
import zlib
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dsgpt.common.errors import UserError
from dsgpt.common.files import PRINTABLE, printable
from dsgpt.data.blocks import Block, Large, Reading, pieces_of
from dsgpt.data.engine import open_engine
from dsgpt.data.index import ENTRY, document_hash
from dsgpt.data.readers import Document, SourceFile
from dsgpt.data.token_file import DTYPES, dtype_of
from dsgpt.data.vocabulary import open_vocabulary

ROW = np.dtype([*ENTRY.descr, ("position", "<u8"), ("characters", "<u8"), ("more", "<u4"), ("bad", "<u4")])
"""A document in a part: its entry; what decides its split; its length; whether it goes on in the next row; whether some
of its text was replaced."""
Rows: TypeAlias = NDArray[np.void]
_SUMS = np.dtype([("rows", "<u8"), ("empty", "<u8"), ("checksum", "<u8")])
_BATCH_BYTES = 1 << 22
OnBadText = Literal["replace", "skip", "fail"]


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How a block is encoded; the same for all."""

    folder: Path
    """Receives the parts."""
    tokenizer: Path
    special: bool
    """Whether special tokens that an author wrote count as such."""
    on_bad_text: OnBadText
    split_by: Literal["documents", "files"]
    seed: int

    def path(self, block: int) -> Path:
        """The part of a block."""
        return self.folder / f"part-{block:08d}"

    def skips(self, document: Document) -> bool:
        """Whether a document is left out because it is not valid Unicode.

        Raises:
            UserError: it is not, and that is an error.
        """
        if document.bad and self.on_bad_text == "fail":
            raise UserError(document.bad)
        return bool(document.bad) and self.on_bad_text == "skip"

    def position(self, file: SourceFile, document: Document) -> int:
        """Decides the split: a number below 2^64, uniform over names, a function of the seed and the name alone."""
        name = document.key if self.split_by == "documents" else file.key
        return int.from_bytes(hashlib.sha256(f"{self.seed}\0{name}".encode(errors=PRINTABLE)).digest()[:8], "big")


class Part(NamedTuple):
    """What a part says of its block."""

    path: Path
    rows: Rows
    empty: int
    """Documents of nothing but space, which have no row."""


def read_part(path: Path, *, width: int, check: bool = False) -> Part | None:
    """The rows of a part; None if there is none, or it is damaged.

    Args:
        path: the part.
        width: bytes of an id.
        check: read all of it, and compare its checksum.
    """
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except (FileNotFoundError, ValueError):  # it is empty
        return None
    if len(data) < _SUMS.itemsize:
        return None
    sums = np.array(data[-_SUMS.itemsize :]).view(_SUMS)[0]
    ids, empty = len(data) - _SUMS.itemsize - int(sums["rows"]) * ROW.itemsize, int(sums["empty"])
    if ids < 0:
        return None
    rows: Rows = np.array(data[ids : -_SUMS.itemsize]).view(ROW)
    if int(rows["tokens"].sum(dtype=np.uint64)) * width != ids:
        return None
    if check and _checksum(zlib.crc32(data[:ids].data), rows, empty=empty) != int(sums["checksum"]):
        return None
    return Part(path, rows, empty)


def _checksum(ids: int, rows: Rows, *, empty: int) -> int:
    """That of a part, whose ids have the checksum ``ids``; not 0 for a part of zeros, as a loss of power leaves."""
    return zlib.crc32(b"%d %d" % (len(rows), empty), zlib.crc32(rows.tobytes(), ids))


class Encoder:
    """Encodes blocks in one process."""

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        self.vocabulary = open_vocabulary(encoding.tokenizer, special=encoding.special)
        self._dtype = DTYPES[dtype_of(self.vocabulary.size)]
        self.engine = open_engine(self.vocabulary)
        """Encodes its texts."""

    def encode(self, block: Block) -> None:
        """Write the part of ``block``.

        Raises:
            UserError: a document cannot be read; or its ids contain the end-of-text id, which must only mark its end.
        """
        path = self.encoding.path(block.number)
        # Not by the number of the process: those of other machines and containers have the same.
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        rows: list[tuple[int, ...]] = []
        tables: list[Rows] = []  # of the rows before those
        pieces: list[tuple[bytes, str, bool]] = []  # with the document's key, and whether it ends there
        owners: list[int] = []  # the document of each piece, those before too
        counts: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]  # of ids, of the pieces before
        empty = number = batch = checksum = 0
        # A thread encodes and writes while this one reads and hashes: an engine lets other threads run.
        with partial.open("xb") as file, ThreadPoolExecutor(1) as thread:
            written: Future[None] = thread.submit(tables.clear)

            def write(pieces: list[tuple[bytes, str, bool]]) -> None:
                nonlocal checksum
                ids, each = self._ids(pieces)
                counts.append(each)
                checksum = zlib.crc32(ids, checksum)
                file.write(ids)

            def flush() -> None:
                nonlocal batch, pieces, written
                written.result()
                if pieces:
                    written = thread.submit(write, pieces)
                tables.append(np.array(rows, dtype=ROW))
                rows.clear()
                pieces, batch = [], 0

            for reading in block.readings:
                for document, large in reading.items():
                    skipped = self.encoding.skips(document)
                    if large is None and document.blank:
                        empty += 1
                        continue
                    rows.append(self._row(reading, document, large, skipped=skipped))
                    number += 1
                    if not document.data or (skipped and large is None):
                        continue
                    cut = pieces_of(document.data) if self.engine.cuts else [document.data]
                    last = large is None or large.role == "end"
                    for index, text in enumerate(cut, start=1):
                        pieces.append((text, document.key, last and index == len(cut)))
                        owners.append(number - 1)
                        batch += len(text)
                        if batch >= _BATCH_BYTES:
                            flush()
            flush()
            written.result()
            table: Rows = np.concatenate(tables)
            table["tokens"] = np.bincount(owners, weights=np.concatenate(counts), minlength=number)
            file.write(table.tobytes())
            file.write(np.array([(number, empty, _checksum(checksum, table, empty=empty))], dtype=_SUMS).tobytes())
        partial.rename(path)

    def _row(self, reading: Reading, document: Document, large: Large | None, *, skipped: bool) -> tuple[int, ...]:
        """The values of a ``ROW``, with 0 tokens."""
        position = self.encoding.position(reading.file, document)
        if large is None:
            digest, characters = document_hash(document.data), len(document.text)
        else:
            digest, characters = large.hash, large.characters
            position = position if large.position is None else large.position
        more, bad = large is not None and large.role != "end", bool(document.bad)
        return (digest, document.place, reading.number, 0, position, 0 if skipped else characters, more, bad)

    def _ids(self, pieces: list[tuple[bytes, str, bool]]) -> tuple[bytes, NDArray[np.int64]]:
        """The ids of texts as the token file has them, with end-of-text ids; and the number of each text."""
        ids, counts = self.engine.encode([text for text, _, _ in pieces])
        eot, size, ends = self.vocabulary.eot_id, self.vocabulary.size, np.cumsum(counts)
        bad = (ids >= size) if self.encoding.special else (ids >= size) | (ids == eot)
        if bad.any():
            _, key, _ = pieces[int(np.searchsorted(ends, int(bad.argmax()), side="right"))]
            raise UserError(
                f"{printable(key)}: this tokenizer turns some of its text into the end-of-text id {eot}; use another "
                "tokenizer"
            )
        last = np.array([is_last for _, _, is_last in pieces])
        return np.insert(ids.astype(self._dtype), ends[last], eot).tobytes(), counts + last


# Several processes. One that loses its parent ends by itself; one that is lost is reported.


def _work(connection: Connection, encoding: Encoding) -> None:
    """A worker: encodes the blocks that it gets, until there are no more or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder: Encoder | None = None
    with contextlib.suppress(EOFError, BrokenPipeError):
        while block := connection.recv():
            try:
                encoder = encoder or Encoder(encoding)
                encoder.encode(block)
                connection.send(None)
            except (UserError, OSError) as error:
                connection.send(error)


def encode_blocks(blocks: Iterator[Block], encoder: Encoder, *, workers: int) -> Generator[Block, None, None]:
    """Encode ``blocks`` on ``workers`` processes; yield each when its part is there, not always in order.

    With one worker, this process does it. A block is taken only when a worker is free for it.

    Raises:
        UserError: a block cannot be encoded, or a worker was killed.
        OSError: a file cannot be read or written, such as on a full disk.
    """
    if workers == 1:
        for block in blocks:
            encoder.encode(block)
            yield block
        return
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    busy: dict[Connection, Block] = {}

    def next_done() -> tuple[Connection, Block]:
        ready: Any = wait(list(busy))[0]
        try:
            answer = ready.recv()
        except (EOFError, ConnectionResetError) as error:
            raise UserError(
                "a worker was killed while it encoded, perhaps because memory ran out; the same command goes on with "
                "what is done, perhaps with fewer --workers"
            ) from error
        if answer:
            raise answer
        return ready, busy.pop(ready)

    try:
        for block in blocks:
            if len(processes) < workers:
                free, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, encoder.encoding), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
            else:
                free, done = next_done()
                yield done
            with contextlib.suppress(BrokenPipeError):  # it was killed: the wait for its answer says so
                free.send(block)
            busy[free] = block
        while busy:
            yield next_done()[1]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
