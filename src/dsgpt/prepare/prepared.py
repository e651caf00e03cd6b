"""What an earlier preparation wrote, and whether it is unchanged."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.common.errors import UserError
from dsgpt.common.files import sha256_of, write_json_atomic
from dsgpt.common.json_files import JsonError, Sha256, read_as
from dsgpt.data.sidecar import Sidecar
from dsgpt.data.token_file import TokenFile, open_token_file
from dsgpt.prepare.console import progress
from dsgpt.prepare.options import Identity
from dsgpt.prepare.splitting import SPLITS

TOKENIZER_FOLDER = "tokenizer"
_STAMP = {"size", "mtime_ns"}
"""Keys of a sidecar that change when its file is copied."""


@dataclass(frozen=True, kw_only=True)
class PreparedSplit:
    """One token file in a record; the rest is in its sidecar."""

    sha256: Sha256


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The contents of ``preparation.json``, the record of a preparation."""

    identity: dict[str, Any]
    """Options and hashes of the input: the same identity gives the same output."""
    tokenizer_sha256: Sha256
    """Of ``tokenizer/tokenizer.json``."""
    splits: dict[str, PreparedSplit]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The paths of one preparation in its output folder."""

    folder: Path
    suffix: str

    def tokens(self, split: str) -> Path:
        """The token file of a split, for example ``train.bin``."""
        return self.folder / f"{split}{self.suffix}.bin"

    @property
    def record(self) -> Path:
        """The record. It is written last: if it is there, the preparation is complete."""
        return self.folder / f"preparation{self.suffix}.json"

    @property
    def other(self) -> "Place":
        """The place of the small files if this is that of the full ones, and vice versa. Both share the tokenizer."""
        return Place(folder=self.folder, suffix="" if self.suffix else "_small")

    @property
    def tokenizer(self) -> Path:
        """The tokenizer folder."""
        return self.folder / TOKENIZER_FOLDER

    @property
    def vocabulary(self) -> Path:
        """The tokenizer's file, whose hash identifies it."""
        return self.tokenizer / "tokenizer.json"

    @property
    def staged_tokenizer(self) -> Path:
        """Temporary name of the tokenizer folder, until all files are complete."""
        return self.folder / f".{TOKENIZER_FOLDER}.partial"

    def complete(self) -> Preparation | None:
        """The record, if all files that it describes are there; otherwise None.

        Raises:
            UserError: the file is not a record.
        """
        if not all(path.exists() for path in (self.record, self.vocabulary, *map(self.tokens, SPLITS))):
            return None
        try:
            return read_as(self.record, Preparation, unknown_keys=True)
        except JsonError as error:
            raise UserError(
                f"{self.record}: is not the record of a preparation ({error}); remove it and prepare again with "
                "--overwrite"
            ) from error

    def write_record(self, *, identity: Identity, tokenizer_sha256: str, sidecars: dict[str, Sidecar]) -> None:
        """Write the record, which marks the preparation as complete; ``sidecars`` are by split."""
        splits = {
            split: {name: value for name, value in dataclasses.asdict(sidecar).items() if name not in _STAMP}
            for split, sidecar in sidecars.items()
        }
        write_json_atomic(self.record, {"identity": identity, "tokenizer_sha256": tokenizer_sha256, "splits": splits})


def already_prepared(place: Place, identity: Identity) -> bool:
    """Whether ``place`` already contains the output of ``identity``; files that changed on disk are hashed.

    Raises:
        UserError: it contains something else, which is replaced only with ``--overwrite``.
        TokenFileError: a token file differs from its sidecar.
    """
    record = place.complete()
    if record is None:
        unknown = [path for path in map(place.tokens, SPLITS) if path.exists()]
        if unknown:
            raise UserError(f"{unknown[0]}: exists, but no finished preparation made it; replace it with --overwrite")
        return False
    files = {split: open_token_file(place.tokens(split)) for split in SPLITS}
    old = record.identity
    changes = [
        f"{name} was {old.get(name)}, is {identity.get(name)}" if name.startswith("--") else f"the {name} has changed"
        for name in {**old, **identity}
        if old.get(name) != identity.get(name)
    ]
    if changes:
        raise UserError(
            f"{place.folder}: was prepared differently ({'; '.join(changes)}); replace it with --overwrite or choose "
            "another --output_dir"
        )
    _check_contents(place, record, files)
    return True


def _check_contents(place: Place, record: Preparation, files: dict[str, TokenFile]) -> None:
    others = [] if sha256_of(place.vocabulary) == record.tokenizer_sha256 else [place.vocabulary]
    for split, file in files.items():
        prepared = record.splits.get(split)
        if prepared is None or prepared.sha256 != file.sidecar.sha256:
            others.append(file.path)
    if others:
        raise UserError(f"{others[0]}: is not the file that {place.record.name} describes; replace it with --overwrite")
    for file in files.values():
        if doubt := file.doubt():
            with progress(total=file.size_bytes, description=f"hashing {file.path.name}", unit="B") as bar:
                file.verified_sha256(bar.update)
            print(f"{doubt}: hashed again, its contents match the sidecar")
