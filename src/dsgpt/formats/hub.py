"""Finds a published model: in a folder, or on the Hugging Face hub, from which single files are fetched."""

import re
from pathlib import Path

from dsgpt.common.errors import UserError
from dsgpt.formats.hub_access import require_hub
from dsgpt.formats.hugging_face import WEIGHT_FILES, index_file, parts_of

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CONFIG = "config.json"
_VOCABULARY = ("tokenizer.json", "vocab.json")


def model_folder(given: str, *, weights: bool, quiet: bool = False) -> Path:
    """The folder with a published model.

    Args:
        given: a folder, or a name on the hub; then the folder is in the hub library's cache.
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
    return _HubModel(given, quiet=quiet).fetch(weights=weights)


class _HubModel:
    """A model on the hub, or in the hub library's cache if the hub does not answer."""

    def __init__(self, name: str, *, quiet: bool) -> None:
        from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415 - only a model on the hub needs it

        if quiet:
            disable_progress_bars()
        self._name = name
        self._revision: str | None = None
        self._offline: UserError | None = None
        try:
            require_hub(f"--init_from {name}", cure="fetch it on a machine with a network, and give its folder")
        except UserError as error:
            self._offline = error

    def fetch(self, *, weights: bool) -> Path:
        """Fetch the configuration and the vocabulary, and with ``weights`` also the weights.

        Returns:
            The folder in the hub library's cache; all files are of one commit.

        Raises:
            UserError: there is no network and no cached copy, or the hub has no such files.
        """
        config = self._file(_CONFIG)
        if config is None:
            raise self._offline or UserError(f"--init_from {self._name}: has no {_CONFIG} on the hub")
        self._revision = config.parent.name  # the commit: all other files are fetched from the same one
        for name in _VOCABULARY:
            self._file(name)
        if weights and not any(self._weights(name) for name in WEIGHT_FILES):
            raise self._offline or UserError(
                f"--init_from {self._name}: has neither {' nor '.join(WEIGHT_FILES)} on the hub"
            )
        return config.parent

    def _weights(self, name: str) -> bool:
        if self._file(name) is not None:
            return True
        index = self._file(index_file(name))
        return index is not None and all(self._file(part) is not None for part in parts_of(index))

    def _file(self, name: str) -> Path | None:
        """A file of the model, fetched if it is not in the cache; None if the model has no file of that name."""
        from huggingface_hub import errors, hf_hub_download  # noqa: PLC0415

        local = self._offline is not None
        try:
            return Path(hf_hub_download(self._name, name, revision=self._revision, local_files_only=local))
        except errors.LocalEntryNotFoundError as error:
            if local:
                return None
            raise self._failed("the hub stopped answering", error) from error
        except errors.EntryNotFoundError:
            return None
        except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
            raise UserError(
                f"--init_from {self._name}: is neither a folder here nor a readable model on the hub"
            ) from error
        except OSError as error:
            raise self._failed("could not be fetched", error) from error

    def _failed(self, what: str, error: Exception) -> UserError:
        reason = str(error).strip().partition("\n")[0]
        return UserError(f"--init_from {self._name}: {what} ({reason}): try again, or give a folder")
