"""ZeRO-3 with weights or optimizer state swapped to files on a local drive (ZeRO-Infinity)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dsgpt.checkpointing.writing import save_object
from dsgpt.config import RunConfig
from dsgpt.strategies.base import ParamState
from dsgpt.strategies.compiled_ops import load_ops
from dsgpt.strategies.deepspeed_setup import repeat_counting
from dsgpt.strategies.swap_space import SwapSpace
from dsgpt.strategies.swapped_state import iter_swapped_state, load_swapped, save_swapped
from dsgpt.strategies.zero import Zero


class ZeroNvme(Zero):
    """One DeepSpeed engine per rank, which reads and writes its state through files of this run alone."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self._rank = config.topology.rank
        self._swap_space: SwapSpace | None = None
        try:
            super().__init__(config, device)
        except BaseException:
            self.close()
            raise

    def _engine_config(self, config: RunConfig) -> dict[str, Any]:
        ours = super()._engine_config(config)
        load_ops("PinMemoryBuilder", "AsyncIOBuilder")
        self._swap_space = SwapSpace(ours, config.recipe, config.topology)
        return ours

    def iter_state(self) -> Iterator[tuple[str, ParamState]]:
        """See ``Strategy``; in the order in which the state lies on the drive."""
        return iter_swapped_state(self._optimizer, self._parameters)

    def save(self, folder: Path) -> None:
        """See ``Strategy``; not in DeepSpeed's format, from which it could not be loaded again."""
        save_swapped(self._optimizer, folder, rank=self._rank)
        save_object(self._scale.state(), folder / self._scale_file)

    def load(self, folder: Path) -> None:
        """See ``Strategy``.

        Raises:
            FileNotFoundError: ``folder`` holds no state of this rank.
        """
        load_swapped(self._optimizer, folder, rank=self._rank)
        repeat_counting(self._optimizer)
        self._scale.take_up(torch.load(folder / self._scale_file, weights_only=True))

    @property
    def _scale_file(self) -> str:
        return f"loss-scale-rank-{self._rank:05}.pt"

    def close(self) -> None:
        """See ``Strategy``."""
        if self._swap_space is not None:
            self._swap_space.close()
