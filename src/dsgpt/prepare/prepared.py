"""What an earlier preparation left in its folder, and whether it still stands as it was written."""

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
"""Of a sidecar, which notes another time when its file is copied."""


@dataclass(frozen=True, kw_only=True)
class PreparedSplit:
    """What a record says of one token file; the rest is in its sidecar."""

    sha256: Sha256


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The record of a preparation, as ``preparation.json`` holds it."""

    identity: dict[str, Any]
    """Options and input: a run with the same would write the same."""
    tokenizer_sha256: Sha256
    """Of ``tokenizer/tokenizer.json``."""
    splits: dict[str, PreparedSplit]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The names of one preparation inside its output folder."""

    folder: Path
    suffix: str

    def tokens(self, split: str) -> Path:
        """``train.bin`` and the like."""
        return self.folder / f"{split}{self.suffix}.bin"

    @property
    def record(self) -> Path:
        """Written last: its presence says that the preparation is complete, and what made it."""
        return self.folder / f"preparation{self.suffix}.json"

    @property
    def other(self) -> "Place":
        """The small preparation beside the full one, and the other way round: they share the tokenizer."""
        return Place(folder=self.folder, suffix="" if self.suffix else "_small")

    @property
    def tokenizer(self) -> Path:
        """The published tokenizer folder."""
        return self.folder / TOKENIZER_FOLDER

    @property
    def vocabulary(self) -> Path:
        """The file of the published tokenizer whose hash stands for it."""
        return self.tokenizer / "tokenizer.json"

    @property
    def staged_tokenizer(self) -> Path:
        """The tokenizer folder until everything else is ready."""
        return self.folder / f".{TOKENIZER_FOLDER}.partial"

    def complete(self) -> Preparation | None:
        """The record, if everything that it speaks of is there.

        Raises:
            UserError: the file in its place is something else.
        """
        if not all(path.exists() for path in (self.record, self.vocabulary, *map(self.tokens, SPLITS))):
            return None
        try:
            return read_as(self.record, Preparation, unknown_keys=True)
        except JsonError as error:
            raise UserError(
                f"{self.record}: is no record of a preparation ({error}); remove it and prepare again with --overwrite"
            ) from error

    def write_record(self, *, identity: Identity, tokenizer_sha256: str, sidecars: dict[str, Sidecar]) -> None:
        """Say that the preparation is complete; ``sidecars`` are by split."""
        splits = {
            split: {name: value for name, value in dataclasses.asdict(sidecar).items() if name not in _STAMP}
            for split, sidecar in sidecars.items()
        }
        write_json_atomic(self.record, {"identity": identity, "tokenizer_sha256": tokenizer_sha256, "splits": splits})


def already_prepared(place: Place, identity: Identity) -> bool:
    """Whether ``place`` holds what ``identity`` would make; files that changed on disk are hashed.

    Raises:
        UserError: it holds something else, which is not replaced unasked.
        TokenFileError: a token file is not what its sidecar says.
    """
    record = place.complete()
    if record is None:
        unknown = [path for path in map(place.tokens, SPLITS) if path.exists()]
        if unknown:
            raise UserError(f"{unknown[0]}: exists, but not from a finished preparation; replace it with --overwrite")
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
        raise UserError(f"{others[0]}: is not what {place.record.name} speaks of; replace it with --overwrite")
    for file in files.values():
        if doubt := file.doubt():
            with progress(total=file.size_bytes, description=f"hashing {file.path.name}", unit="B") as bar:
                file.verified_sha256(bar.update)
            print(f"{doubt}: hashed again, its contents are the sidecar's")
