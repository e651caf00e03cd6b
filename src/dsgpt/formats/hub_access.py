"""Checks in seconds whether the Hugging Face hub answers. The hub's own library would retry for minutes."""

import os
import ssl
import urllib.error
import urllib.request

from dsgpt.common.errors import UserError

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
