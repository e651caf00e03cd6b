"""DeepSpeed's checkpoint files are pickles, and DeepSpeed 0.19.8 unpickles whatever they name. Here they may not."""

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

from torch.serialization import safe_globals

from dsgpt.errors import UserError

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


@contextlib.contextmanager
def only_known_classes(folder: Path) -> Iterator[None]:
    """Inside, ``torch.load`` gives tensors, plain values and DeepSpeed's own records, and calls nothing else.

    ``TorchCheckpointEngine.load`` and ZeRO's own readers ask for ``weights_only=False``; torch lets its environment
    variable overrule them. The four classes are all that DeepSpeed's files hold of any stage and precision; none of
    them does anything when it is made.

    Args:
        folder: the checkpoint, for messages.

    Raises:
        UserError: a file asks for something else.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler  # noqa: PLC0415 - takes seconds
    from deepspeed.runtime.zero.config import ZeroStageEnum  # noqa: PLC0415
    from deepspeed.utils.tensor_fragment import fragment_address  # noqa: PLC0415

    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{folder}: its DeepSpeed files hold more than a run here writes, and it could be code: do not go on from "
            "it; its weights can be had with src/convert.py"
        ) from error
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before
