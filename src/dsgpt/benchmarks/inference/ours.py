"""The adapter to this project's inference room: the only file of this suite that knows how it decodes."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from dsgpt.checkpointing.selection import find_checkpoint, open_model_files
from dsgpt.inference.decoder import Decoder
from dsgpt.inference.generation import generate_batch
from dsgpt.inference.trained_model import load_model


class OwnModel:
    """The model of a checkpoint in fp32, decoded greedily.

    Args:
        checkpoint: a run folder, a checkpoint or a portable folder.
        device: ``cpu`` or ``cuda``.
        batch_size: sequences that are usually decoded together.

    Raises:
        UserError: there is no usable model.
    """

    def __init__(self, checkpoint: Path, device: str, *, batch_size: int = 1) -> None:
        files = open_model_files(find_checkpoint(checkpoint, flag="--checkpoint"))
        self._device = torch.device(device)
        self._model = load_model(files, self._device)
        self._alone = Decoder(self._model)
        self._together = Decoder(self._model, batch_size=batch_size) if batch_size > 1 else self._alone
        self.positions = files.config.block_size
        """The most tokens of a sequence; of a batch, those of its longest prompt and all new ones."""

    def generate(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> Iterator[list[int]]:
        """Yield the next id of every prompt, ``new_tokens`` times; each is on the host when it is yielded."""
        decoder = self._alone if len(prompts) == 1 else self._together
        return generate_batch(decoder, prompts, new_tokens=new_tokens)

    @torch.inference_mode()
    def margins(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """By how much the likeliest id's logit exceeds the second's, at each of ``ids``, which continue ``prompt``."""
        read = torch.tensor([[*prompt, *ids[:-1]]], device=self._device)
        logits = self._model(read)[0, len(prompt) - 1 :].float()  # (new tokens, V)
        first, second = logits.topk(2, dim=1).values.T
        margins: list[float] = (first - second).tolist()
        return margins
