"""Token files at addresses such as ``s3://bucket/train.bin``: each machine copies them once, and reads its copy."""

import contextlib
import os
from pathlib import Path

from dsgpt.common.files import Lock, remove, sha256_of
from dsgpt.common.json_files import JsonError, read_as
from dsgpt.data.token_file import Sidecar, Stamp, TokenFileError, note_stamp, sidecar_path
from dsgpt.formats.tokenizer_files import KNOWN_FILES
from dsgpt.machine.addresses import Place, open_place, store_errors
from dsgpt.machine.console import Progress

CACHE_VARIABLE = "DSGPT_CACHE"
"""Names the folder of copied data; by default ``~/.cache/dsgpt``."""


TOKENIZER = "tokenizer"
"""The folder beside the token files; a run compares it with the sidecar."""


def local_copy(address: str) -> Path:
    """The copy of the token file at ``address`` on this machine, made if it is missing.

    The sidecar is read each time, and names the copy by its sha256: a file that was replaced is copied anew. The other
    processes of the machine wait for the one that copies.

    Raises:
        TokenFileError: the address cannot be read, has no sidecar with a sha256, or has other contents than it says.
    """
    folder, _, name = address.rpartition("/")
    cache = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "dsgpt") / "data"
    with store_errors(f"{address}: cannot be read", kind=TokenFileError):
        place = open_place(folder, flag="data")
        cache.mkdir(parents=True, exist_ok=True)
        with Lock.of_file(cache / ".lock") as lock:
            lock.take(wait=True)
            sidecar = _sidecar(place, name, cache)
            copy = cache / str(sidecar.sha256) / Path(name).name
            if not copy.exists():
                partial = copy.parent.with_suffix(".partial")
                remove(partial)
                partial.mkdir()
                size = int(place.files.size(place.path(name)))
                with contextlib.closing(Progress(total=size, what=f"copying {name}", unit="B", lines=True)) as progress:
                    place.read_into(name, partial / copy.name, progress.advance)
                if (computed := sha256_of(partial / copy.name)) != sidecar.sha256:
                    remove(partial)
                    raise TokenFileError(f"{address}: its sha256 is {computed}, its sidecar says {sidecar.sha256}")
                beside = sidecar_path(partial / copy.name)
                place.read_into(sidecar_path(Path(name)).name, beside)
                for part in KNOWN_FILES if sidecar.tokenizer else ():
                    if place.exists(f"{TOKENIZER}/{part}"):
                        (partial / TOKENIZER).mkdir(exist_ok=True)
                        place.read_into(f"{TOKENIZER}/{part}", partial / TOKENIZER / part)
                note_stamp(beside, Stamp.of(partial / copy.name), sha256=str(sidecar.sha256))
                remove(copy.parent)
                partial.rename(copy.parent)
    return copy


def _sidecar(place: Place, name: str, cache: Path) -> Sidecar:
    beside, path = sidecar_path(Path(name)).name, cache / ".sidecar"
    remove(path)
    try:
        place.read_into(beside, path)
        sidecar = read_as(path, Sidecar, unknown_keys=True)
    except FileNotFoundError as error:
        raise TokenFileError(f"{place.path(beside)}: is missing; copy it there with the .bin") from error
    except JsonError as error:
        raise TokenFileError(f"{place.path(beside)}: is not the sidecar of a token file ({error})") from error
    finally:
        remove(path)
    if sidecar.sha256 is None:
        raise TokenFileError(f"{place.path(beside)}: has no sha256, by which the copy would be checked")
    return sidecar
