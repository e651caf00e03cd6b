"""The data of a run: a token file, several that are read as one, or a mixture of them with weights.

``open_data`` reads what ``--train_data_path`` or ``--val_data_path`` names: a .bin, a folder or a pattern of them, or a
JSON list. Everything that asks for the data's length, hash, tokenizer or tokens asks a ``DataSet``. Imports no torch.
"""

import bisect
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from dsgpt.common.errors import Problems
from dsgpt.common.json_files import JsonError, parse_as, parse_json, read_bytes
from dsgpt.data.order import MixtureOrder, SampleOrder, window_count
from dsgpt.data.token_file import TokenFile, TokenFileError, open_token_file

MOST_PARTS = 100_000
"""Largest sum of the weights, as whole numbers without a common divisor: a table has an entry for each part."""
_IS_PATTERN = re.compile(r"[*?[]")
FORM = 'a list of paths, or of {"path": ..., "weight": ..., "epochs": ...}'


class Span(NamedTuple):
    """Tokens that follow each other in one file."""

    file: TokenFile
    first: int
    """Index of the first in the file."""
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Source:
    """Token files that are read as one, end to end."""

    name: str
    """Its path, as it was given."""
    files: tuple[TokenFile, ...]
    weight: Fraction = Fraction(1)
    most_epochs: float | None = None
    """A run that would read it more often is refused."""

    @property
    def tokens(self) -> int:
        """Ids in all files."""
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(file.tokens for file in self.files))

    def spans(self, first: int, tokens: int) -> list[Span]:
        """Where the tokens from index ``first`` of the source are: in one file, or over the ends of some."""
        found, ends = [], self._ends
        number = bisect.bisect_right(ends, first)
        while tokens:
            here = min(tokens, ends[number] - first)
            file = self.files[number]
            found.append(Span(file, first - ends[number] + file.tokens, here))
            first, tokens, number = first + here, tokens - here, number + 1
        return found


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """What a run trains or validates on, ready to be read. Usually one source of one file."""

    path: Path
    """What the user named."""
    sources: tuple[Source, ...]

    @cached_property
    def files(self) -> tuple[TokenFile, ...]:
        """The files of all sources, in order."""
        return tuple(file for source in self.sources for file in source.files)

    @property
    def tokens(self) -> int:
        """Ids in all files."""
        return sum(file.tokens for file in self.files)

    @property
    def vocab_size(self) -> int | None:
        """Every id is below it; None if a file does not say."""
        sizes = [file.sidecar.vocab_size for file in self.files]
        return None if None in sizes else max(size for size in sizes if size is not None)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """The weights of the sources as whole numbers without a common divisor."""
        weights = [source.weight for source in self.sources]
        common = math.lcm(*(weight.denominator for weight in weights))
        whole = [int(weight * common) for weight in weights]
        return tuple(part // math.gcd(*whole) for part in whole)

    def shares(self) -> dict[str, float]:
        """The share of each source in the samples, by its name."""
        return {source.name: part / sum(self.parts) for source, part in zip(self.sources, self.parts, strict=True)}

    def windows(self, seq_length: int) -> tuple[int, ...]:
        """Windows of each source. None crosses the end of a source; in a source they cross the ends of files."""
        return tuple(window_count(source.tokens, seq_length) for source in self.sources)

    def order(self, seq_length: int, *, global_batch_size: int, seed: int) -> SampleOrder:
        """The order in which a run trains on it."""
        sizes = self.windows(seq_length)
        if len(sizes) == 1:
            return SampleOrder(windows=sizes[0], global_batch_size=global_batch_size, seed=seed)
        return MixtureOrder(
            windows=sum(sizes), global_batch_size=global_batch_size, seed=seed, sizes=sizes, parts=self.parts
        )

    def sha256(self, of_file: Callable[[TokenFile], str | None], *, mixed: bool) -> str | None:
        """The hash that identifies the data in records; None if that of a file is None.

        That of a single file is its own. Otherwise it is that of a JSON text with the hashes of all files by source,
        and the parts of the sources.

        Args:
            of_file: gives the hash of a file.
            mixed: whether the weights decide what is read. A validation reads every source whole.
        """
        hashes = [[of_file(file) for file in source.files] for source in self.sources]
        if any(None in of_source for of_source in hashes):
            return None
        if len(self.files) == 1:
            return hashes[0][0]
        parts = self.parts if mixed else (1,) * len(hashes)
        return hashlib.sha256(json.dumps(list(zip(parts, hashes, strict=True))).encode()).hexdigest()


class Windows:
    """The windows of a data set, numbered over all sources: window i of a source is its tokens i*T to i*T + T."""

    def __init__(self, data: DataSet, seq_length: int) -> None:
        self.data, self.seq_length = data, seq_length
        self.ends = list(accumulate(data.windows(seq_length)))
        """The number after the last window of each source."""

    def spans(self, window: int) -> list[Span]:
        """Where the T + 1 tokens of a window are."""
        number, length = bisect.bisect_right(self.ends, window), self.seq_length
        own = window - (self.ends[number - 1] if number else 0)
        return self.data.sources[number].spans(own * length, length + 1)


def attended_length(
    data: DataSet, order: SampleOrder, *, seq_length: int, end_of_text: int, samples: int = 64
) -> float:
    """Tokens of a token's document in its window, the mean over all tokens of the first ``samples`` of a run."""
    import numpy as np  # noqa: PLC0415 - as above

    windows, squares = Windows(data, seq_length), 0
    for window in order.at(np.arange(samples)).tolist():
        spans = windows.spans(window)
        ids = np.concatenate([file.memmap()[first : first + tokens] for file, first, tokens in spans])[:seq_length]
        squares += int((np.diff([0, *np.flatnonzero(ids == end_of_text), seq_length]) ** 2).sum())
    return squares / (samples * seq_length)


# From what a flag names to a data set.


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A member of a mixture's JSON list."""

    path: str
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


def open_data(named: Path | str, *, flag: str, apart: bool = False) -> DataSet:
    """The data set that ``named`` stands for, after every check that does not read the contents of token files.

    Args:
        named: a .bin, a folder of .bin files, a pattern such as ``web/*.bin``, an address such as
            ``s3://bucket/train.bin``, or a .json with a list of these: of paths, which are read as one, or of objects
            with path, weight and perhaps epochs, which are mixed. Files of a folder or pattern are sorted by name.
            Paths in a list are relative to its folder.
        flag: the flag, for messages.
        apart: make a source of every file, unless a list mixes them, so that the loss of each is measured.

    Raises:
        UserError: with a line for each mistake.
    """
    path, problems, sources, plain = Path(named), Problems(), list[Source](), list[TokenFile]()
    is_list = isinstance(named, Path) and path.suffix == ".json"
    for entry in _entries(path, flag) if is_list else [str(named)]:
        name = entry if isinstance(entry, str) else entry.path
        place = path.parent / name if is_list and "://" not in name else Path(name)
        try:
            files = [open_token_file(file) for file in _files(name if "://" in name else place, flag)]
        except TokenFileError as error:
            problems.add(*error.problems)
            continue
        if isinstance(entry, str):
            plain += files
        else:
            weight = Fraction(repr(entry.weight))
            sources.append(Source(name=name, files=tuple(files), weight=weight, most_epochs=entry.epochs))
    if plain and not apart:
        sources = [Source(name=str(named), files=tuple(plain))]
    elif plain:
        sources = [Source(name=str(file.path), files=(file,)) for file in plain]
    names = [str(file.path) for file in plain] or [source.name for source in sources]
    if twice := {name for name in names if names.count(name) > 1}:
        cure = "name it once, or give it a weight" if plain else "add up the weights"
        problems.add(f"{flag} {path}: names {', '.join(sorted(twice))} more than once: {cure}")
    data = DataSet(path=path, sources=tuple(sources))
    if sources and not apart and sum(data.parts) > MOST_PARTS:
        rounded = ", ".join(f"{share:.4f}" for share in data.shares().values())
        problems.add(
            f"{flag} {path}: its weights have {sum(data.parts):,} parts, and at most {MOST_PARTS:,} are counted "
            f"exactly: round them, for example to {rounded}"
        )
    problems.raise_if_any()
    return data if len(data.files) > 1 else replace(data, path=data.files[0].path)


def _entries(path: Path, flag: str) -> Sequence[str | _Entry]:
    try:
        contents = read_bytes(path)
        value = parse_json(contents)
        if not isinstance(value, list) or not value:
            raise JsonError("it must hold a list that is not empty")
        return parse_as(contents, list[str]) if isinstance(value[0], str) else parse_as(contents, list[_Entry])
    except JsonError as error:
        raise TokenFileError(f"{flag} {path}: is not a data set ({error}): write {FORM}, or name a .bin") from error


def _files(place: Path | str, flag: str) -> list[Path]:
    """The token files that a path, a pattern or an address stands for."""
    if isinstance(place, str):
        from dsgpt.data.remote import local_copy  # noqa: PLC0415 - most runs name a file

        return [local_copy(place)]
    if not place.is_dir() and (place.exists() or not _IS_PATTERN.search(str(place))):
        return [place]
    base, pattern = (place, "*.bin") if place.is_dir() else (Path(place.anchor), str(place.relative_to(place.anchor)))
    if not (found := sorted(base.glob(pattern))):
        raise TokenFileError(f"{flag} {place}: {'holds' if place.is_dir() else 'stands for'} no .bin file")
    return found
