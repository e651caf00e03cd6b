"""Encodes blocks, on several processes, into part files that a second run of the same command finds again.

A part has the ids of its block, then a row for each document, then sums with a checksum. It gets its name when it is
complete: a process that is killed leaves a part or none. What a part holds depends on its block alone.
"""

import contextlib
import multiprocessing
import os
import secrets
import signal
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dsgpt.common.errors import UserError
from dsgpt.common.files import printable
from dsgpt.data.blocks import SPACE_AFTER_WORD, Block, Large, Reading
from dsgpt.data.engine import Engine, open_engine
from dsgpt.data.index import ENTRY, document_hash
from dsgpt.data.sources import Document
from dsgpt.data.token_file import DTYPES, dtype_of
from dsgpt.data.vocabulary import draw, open_vocabulary

ROW = np.dtype([*ENTRY.descr, ("position", "<u8"), ("characters", "<u8"), ("more", "<u4"), ("bad", "<u4")])
"""A document in a part: its entry; what decides its split; its length; whether it goes on in the next row; whether some
of its text was replaced."""
Rows: TypeAlias = NDArray[np.void]
_SUMS = np.dtype([("rows", "<u8"), ("empty", "<u8"), ("checksum", "<u8")])
_BATCH_BYTES = 1 << 22
_PIECE_BYTES = 1 << 18
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


class Part(NamedTuple):
    """What a part says of its block."""

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
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _SUMS.itemsize))
            if size < _SUMS.itemsize:
                return None
            sums = np.frombuffer(file.read(), _SUMS)
            if (rows_bytes := int(sums["rows"][0]) * ROW.itemsize) > size - _SUMS.itemsize:
                return None
            file.seek(size - _SUMS.itemsize - rows_bytes)
            rows: Rows = np.frombuffer(file.read(rows_bytes), ROW)
            ids = size - _SUMS.itemsize - rows_bytes
            if int(rows["tokens"].sum(dtype=np.uint64)) * width != ids:
                return None
            if check:
                file.seek(0)
                checksum, left = 0, ids
                while left:
                    data = file.read(min(left, 1 << 24))
                    checksum, left = zlib.crc32(data, checksum), left - len(data)
                if _checksum(checksum, rows, empty=int(sums["empty"][0])) != int(sums["checksum"][0]):
                    return None
    except FileNotFoundError:
        return None
    return Part(rows, int(sums["empty"][0]))


def _checksum(ids: int, rows: Rows, *, empty: int) -> int:
    """That of a part, whose ids have the checksum ``ids``; not 0 for a part of zeros, as a loss of power leaves."""
    return zlib.crc32(b"%d %d" % (len(rows), empty), zlib.crc32(rows.tobytes(), ids))


class Encoder:
    """Encodes blocks in one process."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._vocabulary = open_vocabulary(encoding.tokenizer)
        self._vocabulary.tokenizer.encode_special_tokens = not encoding.special
        self._dtype = DTYPES[dtype_of(self._vocabulary.size)]
        self.engine: Engine = open_engine(self._vocabulary)
        """Encodes its texts."""

    def encode(self, block: Block) -> None:
        """Write the part of ``block``.

        Raises:
            UserError: a document cannot be read; or its ids contain the end-of-text id, which must only mark its end.
        """
        path = self._encoding.path(block.number)
        # Not by the number of the process: those of other machines and containers have the same.
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        rows: list[tuple[int, ...]] = []
        tables: list[Rows] = []  # of the rows before those
        texts: list[bytes] = []
        keys: list[str] = []  # of the document of each text
        owners: list[int] = []  # its row
        ends: list[bool] = []  # whether the end-of-text id follows it
        empty = batch = checksum = count = 0
        strict = self._encoding.on_bad_text == "fail"
        with partial.open("xb") as file:
            tokens: list[NDArray[np.int64]] = []

            def flush() -> None:
                nonlocal checksum, batch
                ids, counts = self._ids(texts, ends, keys)
                tokens.append(np.stack([np.array(owners, dtype=np.int64), counts]))
                checksum = zlib.crc32(ids, checksum)
                file.write(ids)
                tables.append(np.array(rows, dtype=ROW))
                for each in (rows, texts, keys, owners, ends):
                    each.clear()
                batch = 0

            items = ((reading, *item) for reading in block.readings for item in reading.items(strict=strict))
            for reading, document, large in items:
                skipped = document.bad and self._encoding.on_bad_text == "skip"
                if large is None and (not document.text or document.text.isspace()):
                    empty += 1
                    continue
                data = document.text.encode() if document.utf8 is None else document.utf8
                rows.append(self._row(reading, document, data, large, skipped=skipped))
                count += 1
                if skipped and large is None:
                    continue
                cut = list(_pieces(data)) if self.engine.cuts else [data]
                for index, text in enumerate(cut if data else []):
                    texts.append(text)
                    keys.append(document.key)
                    owners.append(count - 1)
                    ends.append(index == len(cut) - 1 and (large is None or large.role == "end"))
                    batch += len(text)
                    if batch >= _BATCH_BYTES:
                        flush()
            if texts:
                flush()
            table: Rows = np.concatenate([*tables, np.array(rows, dtype=ROW)])
            owner, each = np.concatenate(tokens, axis=1) if tokens else np.zeros((2, 0), dtype=np.int64)
            table["tokens"] = np.bincount(owner, weights=each, minlength=count)
            file.write(table.tobytes())
            sums = (count, empty, _checksum(checksum, table, empty=empty))
            file.write(np.array([sums], dtype=_SUMS).tobytes())
        partial.rename(path)

    def _row(
        self, reading: Reading, document: Document, data: bytes, large: Large | None, *, skipped: bool
    ) -> tuple[int, ...]:
        """The values of a ``ROW``, with 0 tokens."""
        name = document.key if self._encoding.split_by == "documents" else reading.file.key
        position = draw(name, seed=self._encoding.seed)
        if large is None:
            digest, characters = document_hash(data), len(document.text)
        else:
            digest, characters = large.hash, large.characters
            position = position if large.position is None else large.position
        more = large is not None and large.role != "end"
        return (digest, document.place, reading.number, 0, position, 0 if skipped else characters, more, document.bad)

    def _ids(self, texts: list[bytes], ends: list[bool], keys: list[str]) -> tuple[bytes, NDArray[np.int64]]:
        """The ids of ``texts`` as the token file has them, with end-of-text ids; and the number of each text."""
        ids, counts = self.engine.encode(texts)
        eot, size = self._vocabulary.eot_id, self._vocabulary.size
        bad = (ids >= size) if self._encoding.special else (ids >= size) | (ids == eot)
        if bad.any():
            index = int(np.searchsorted(np.cumsum(counts), int(bad.argmax()), side="right"))
            raise UserError(
                f"{printable(keys[index])}: this tokenizer turns some of its text into the end-of-text id {eot}; use "
                "another tokenizer"
            )
        follows = np.array(ends, dtype=bool)
        totals = counts + follows
        if not follows.any():
            return ids.astype(self._dtype).tobytes(), totals
        out = np.empty(len(ids) + int(follows.sum()), dtype=self._dtype)
        mask = np.ones(len(out), dtype=bool)
        mask[np.cumsum(totals)[follows] - 1] = False
        out[mask] = ids
        out[~mask] = eot
        return out.tobytes(), totals


def _pieces(text: bytes) -> Iterator[bytes]:
    """``text`` in pieces of at least ``_PIECE_BYTES``, cut before a space or newline that follows a word."""
    start = 0
    while found := SPACE_AFTER_WORD.search(text, start + _PIECE_BYTES):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:] if start else text


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
            except UserError as error:
                connection.send(error.problems)
            except OSError as error:
                connection.send(error)


def encode_blocks(blocks: Iterator[Block], encoding: Encoding, *, workers: int) -> Generator[Block, None, None]:
    """Encode ``blocks`` on ``workers`` processes; yield each when its part is there, not always in order.

    With one worker, this process does it. A block is taken only when a worker is free for it.

    Raises:
        UserError: a block cannot be encoded, or a worker was killed.
        OSError: a file cannot be read or written, such as on a full disk.
    """
    if workers == 1:
        encoder = Encoder(encoding)
        for block in blocks:
            encoder.encode(block)
            yield block
        return
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    busy: dict[Connection, Block] = {}
    try:
        for block in blocks:
            if len(processes) < workers:
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, encoding), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                free = ours
            else:
                free, done = _next_done(busy)
                yield done
            with contextlib.suppress(BrokenPipeError):  # it was killed: the wait for its answer says so
                free.send(block)
            busy[free] = block
        while busy:
            yield _next_done(busy)[1]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _next_done(busy: dict[Connection, Block]) -> tuple[Connection, Block]:
    ready = wait(list(busy))[0]
    assert isinstance(ready, Connection)
    block = busy.pop(ready)
    try:
        answer = ready.recv()
    except (EOFError, ConnectionResetError) as error:
        raise UserError(
            "a worker was killed while it encoded, perhaps because memory ran out; the same command goes on with what "
            "is done, perhaps with fewer --workers"
        ) from error
    if isinstance(answer, OSError):
        raise answer
    if answer:
        raise UserError(*answer)
    return ready, block
