"""Whether the Hugging Face hub can be reached: asked once, in seconds, before a library retries for minutes."""

import os
import ssl
import urllib.error
import urllib.request

from dsgpt.common.errors import UserError

_PATIENCE_SECONDS = 10


def explain_offline(what: str, *, cure: str) -> None:
    """Return where the hub answers.

    Raises:
        UserError: it does not, or the environment forbids asking; one line that says so, for whom and the cure.
    """
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            raise UserError(f"{what}: needs the Hugging Face hub, but {name} is set; {cure}")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_PATIENCE_SECONDS).close()
    except urllib.error.HTTPError:
        return  # an answer, though not a friendly one; the library will say what it makes of it
    except (OSError, ValueError) as error:  # ValueError: HF_ENDPOINT is no address
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return  # the library brings its own certificates
        raise UserError(f"{what}: no network, {endpoint} does not answer ({reason}); {cure}") from error
