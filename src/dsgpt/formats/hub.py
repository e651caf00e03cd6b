"""Finds a published model: in a folder, or on the Hugging Face hub, from which single files are fetched.

Imports no torch and no library of Hugging Face before it knows that the hub answers.
"""

import os
import re
import ssl
import urllib.error
import urllib.request
from pathlib import Path

from dsgpt.common.errors import UserError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TIMEOUT_SECONDS = 10


def require_hub(what: str, *, cure: str) -> None:
    """Check that the hub answers.

    Args:
        what: what needs the hub; begins the message.
        cure: what the user can do without it; ends the message.

    Raises:
        UserError: it does not answer, or the environment forbids network access.
    """
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            raise UserError(f"{what}: needs the Hugging Face hub, but {name} is set; {cure}")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_TIMEOUT_SECONDS).close()
    except urllib.error.HTTPError:
        return  # the hub answers; the library reports what the code means
    except (OSError, ValueError) as error:  # ValueError: HF_ENDPOINT is not an address
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return  # the library has its own certificates, so it may still connect
        raise UserError(f"{what}: no network, {endpoint} does not answer ({reason}); {cure}") from error


def model_folder(given: str, *, weights: bool, quiet: bool = False) -> Path:
    """The folder with a published model.

    Args:
        given: a folder, or a name on the hub; then the folder is in the hub library's cache, and all its files are of
            one commit.
        weights: whether the weights are needed, or only ``config.json`` and the vocabulary.
        quiet: fetch without progress bars.

    Raises:
        UserError: there is no such model, or it is neither on this machine nor can it be fetched.
    """
    folder = Path(given)
    if folder.is_dir():
        return folder
    if folder.exists() or not _HUB_NAME.fullmatch(given):
        raise UserError(f"--init_from {given}: is not a folder: give a folder, or a name on the Hugging Face hub")
    from dsgpt.formats.hugging_face import WEIGHT_FILES, index_file, parts_of  # noqa: PLC0415 - imports torch

    model = _HubModel(given, quiet=quiet)
    config = model.file("config.json")
    if config is None:
        raise model.offline or UserError(f"--init_from {given}: has no config.json on the hub")
    model.revision = config.parent.name  # the commit
    for name in ("tokenizer.json", "vocab.json"):
        model.file(name)
    if weights:
        for name in WEIGHT_FILES:
            if model.file(name):
                break
            index = model.file(index_file(name))
            if index and all(model.file(part) for part in parts_of(index)):
                break
        else:
            raise model.offline or UserError(
                f"--init_from {given}: has neither {' nor '.join(WEIGHT_FILES)} on the hub"
            )
    return config.parent


class _HubModel:
    """A model on the hub, or in the hub library's cache if the hub does not answer."""

    def __init__(self, name: str, *, quiet: bool) -> None:
        from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415 - only a model on the hub needs it

        if quiet:
            disable_progress_bars()
        self._name = name
        self.revision: str | None = None
        self.offline: UserError | None = None
        """Why the hub does not answer."""
        try:
            require_hub(f"--init_from {name}", cure="fetch it on a machine with a network, and give its folder")
        except UserError as error:
            self.offline = error

    def file(self, name: str) -> Path | None:
        """A file of the model, fetched if it is not in the cache; None if the model has no file of that name.

        Raises:
            UserError: the hub has no such model, or does not answer any more.
        """
        from huggingface_hub import errors, hf_hub_download  # noqa: PLC0415

        local, what = self.offline is not None, f"--init_from {self._name}"
        try:
            return Path(hf_hub_download(self._name, name, revision=self.revision, local_files_only=local))
        except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
            raise UserError(f"{what}: is neither a folder here nor a readable model on the hub") from error
        except (errors.EntryNotFoundError, OSError) as error:
            stopped = isinstance(error, errors.LocalEntryNotFoundError)
            if isinstance(error, errors.EntryNotFoundError) and (local or not stopped):
                return None
            failed = "the hub stopped answering" if stopped else "could not be fetched"
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"{what}: {failed} ({reason}): try again, or give a folder") from error
