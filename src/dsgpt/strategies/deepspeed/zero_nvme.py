"""ZeRO-3 with weights or optimizer state swapped to files on a local drive (ZeRO-Infinity)."""

from typing import Any

import torch

from dsgpt.config.run_config import RunConfig
from dsgpt.strategies.deepspeed.compiled_ops import load_ops
from dsgpt.strategies.deepspeed.swap_space import SwapSpace
from dsgpt.strategies.deepspeed.zero import Zero


class ZeroNvme(Zero):
    """One DeepSpeed engine per rank, which reads and writes its state through files of this run alone."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
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

    def close(self) -> None:
        """See ``Strategy``."""
        if self._swap_space is not None:
            self._swap_space.close()
