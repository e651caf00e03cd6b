"""GPT-2 as the sequence of layers that DeepSpeed's ``PipelineModule`` assigns to stages.

A rank builds the layers of its own stage and no others. This module imports DeepSpeed: import it after
``setup.import_deepspeed`` has chosen the device.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsgpt.config.run_config import RunConfig
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2, Block
from dsgpt.runtime.topology import Topology
from dsgpt.strategies.deepspeed.tensor_layers import split_block
from dsgpt.strategies.deepspeed.tensor_layout import take_part
from dsgpt.strategies.initial_weights import initial_values

_TIED = "wte"
"""Key of the embedding that the first and the last layer share, and its canonical name."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""From logits (B, T, V) and targets (B, T) to a 0-dim loss."""


class PositionEmbedding(nn.Embedding):
    """Adds the learned positions to the embedded tokens."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        positions = torch.arange(x.shape[1], device=x.device)  # (T,)
        embedded: Tensor = self.dropout(x + super().forward(positions))
        return embedded


class StageBlock(Block):
    """A transformer block of one stage, split over tensor peers if there are any.

    Args:
        config: the model's shape.
        recompute: whether its activations are computed again in the backward pass instead of kept.
        tensor_group: returns the tensor peers, or None if there are none; called when the block is built.
    """

    def __init__(
        self, config: GPT2Config, *, recompute: bool, tensor_group: Callable[[], dist.ProcessGroup | None]
    ) -> None:
        super().__init__(config)
        self._recompute = recompute
        if (group := tensor_group()) is not None:
            split_block(self, group)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        if self._recompute and self.training:
            recomputed: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return recomputed
        return super().forward(x)


def _logits(vocab_size: int, embedding: nn.Embedding, x: Tensor) -> Tensor:
    """The language-modelling head, whose weight is the embedding's: (B, T, C) to (B, T, V).

    All logits exist here: DeepSpeed calls the loss outside of its module, and looks at gradients of weights that are
    used there before they are complete, so ``linear_cross_entropy`` cannot be used.
    """
    return F.linear(x, embedding.weight[:vocab_size])


class StageModule(PipelineModule):  # type: ignore[misc]  # DeepSpeed ships no types
    """This rank's stage of the model, at its initial values.

    Args:
        config: the run.
        loss: of a micro batch, called on the last stage.
    """

    def __init__(self, config: RunConfig, loss: Loss) -> None:
        super().__init__(
            layers=self._layers(config),
            topology=_process_topology(config.topology),
            loss_fn=loss,
            partition_method=config.recipe.pipeline.partition,
        )
        blocks = [f"blocks.{layer}" for layer in range(config.model.n_layer)]
        self._names = [_TIED, "wpe", *blocks, "ln_f", _TIED]
        self._initialize(config)

    def _layers(self, config: RunConfig) -> list[LayerSpec]:
        model = config.model
        embedding = (_TIED, nn.Embedding, model.padded_vocab_size, model.n_embd)
        block = partial(
            LayerSpec, StageBlock, model, recompute=config.activation_checkpointing, tensor_group=self._tensor_group
        )
        return [
            TiedLayerSpec(*embedding),
            LayerSpec(PositionEmbedding, model),
            *(block() for _ in range(model.n_layer)),
            LayerSpec(nn.LayerNorm, model.n_embd),
            TiedLayerSpec(*embedding, forward_fn=partial(_logits, model.vocab_size)),
        ]

    def _tensor_group(self) -> dist.ProcessGroup | None:
        return self._grid.get_slice_parallel_group() if self._grid.get_slice_parallel_world_size() > 1 else None

    def _count_layer_params(self) -> list[int]:
        """Number of parameters of every layer, for the partition. DeepSpeed would allocate each layer to count them."""
        with torch.device("meta"):
            counts: list[int] = super()._count_layer_params()
        return counts

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        """As in DeepSpeed, but without autograd, which would warn about the broadcast in every backward pass."""
        super()._synchronize_tied_weights()

    @torch.no_grad()
    def _initialize(self, config: RunConfig) -> None:
        """Give every parameter of this stage its part of the value that it has in the whole model."""
        with torch.device("meta"):
            self.shapes = {name: value.shape for name, value in GPT2(config.model).named_parameters()}
            """Canonical name to shape of every parameter of the whole model."""
        rank, size = self._grid.get_slice_parallel_rank(), self._grid.get_slice_parallel_world_size()
        values = initial_values(config)
        for name, parameter in self.canonical_parameters().items():
            value = values(name, self.shapes[name])
            parameter.copy_(take_part(name, value, rank=rank, size=size))

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, or its parts of them, under their canonical names."""
        return {self._canonical(name): parameter for name, parameter in self.named_parameters()}

    def _canonical(self, name: str) -> str:
        """DeepSpeed's names begin with ``tied_modules.KEY`` or with the number of the layer in the whole model."""
        first, rest = name.split(".", 1)
        return rest if first == "tied_modules" else f"{self._names[int(first)]}.{rest}"

    def owner(self, name: str) -> int:
        """The first stage that holds the parameter of this canonical name."""
        layer = next(i for i, prefix in enumerate(self._names) if name.startswith(f"{prefix}."))
        stage: int = self.stage_owner(layer)
        return stage


def _process_topology(topology: Topology) -> ProcessTopology:
    """DeepSpeed's view of the ranks, laid out as ``Topology`` says: by stage, then data, then tensor."""
    sizes, data = topology.sizes, topology.data_parallel_size
    if sizes.tensor == 1:
        return PipeDataParallelTopology(num_pp=sizes.pipeline, num_dp=data)
    return PipeModelDataParallelTopology(num_pp=sizes.pipeline, num_mp=sizes.tensor, num_dp=data)
