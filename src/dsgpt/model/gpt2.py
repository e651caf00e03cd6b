"""GPT-2 as published (Radford et al. 2019): learned positions, pre-LayerNorm blocks, tanh GELU, tied embeddings.

The model knows nothing of ranks, precision or devices; strategies wrap it from outside. Letters in the shapes: B
sequences, T positions, C width (``n_embd``), nh heads, hs head size, V vocabulary.

Initial weights as a pure function of (seed, parameter name). No value depends on the order in which parameters are
made, nor on the rank that makes them. However a model is split over ranks, each part starts from the same values as in
the whole model.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsgpt.model.config import GPT2Config
from dsgpt.model.linear_cross_entropy import VocabularyPart, linear_cross_entropy

Attend = Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]
"""(queries, keys, values, dropout probability, whether causal) to the attention output; each (B, nh, T, hs)."""


def dense_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool) -> Tensor:
    """Every query against every key it may see; (B, nh, T, hs) each."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)


# Attention within documents: no token sees one of another document of its window.
#
# As an input, an end-of-text id begins the document that follows it, at position 0. The first token of a document is
# predicted from it alone, as in a generation without a prompt. As a target, it ends the document before. So every
# target of a window counts. What a window has before its first end-of-text is a document that begins with the window.


class Documents:
    """The documents of a micro batch. It is no tuple: hooks on modules would take it apart.

    Args:
        ids: (B, T).
        end_of_text: the id that begins a document.
    """

    def __init__(self, ids: Tensor, end_of_text: int) -> None:
        starts = ids == end_of_text
        starts[:, 0] = True
        places = torch.arange(ids.shape[1], device=ids.device)
        self.positions = places - torch.where(starts, places, 0).cummax(dim=1).values
        """Place of each token in its document, (B, T)."""
        firsts = starts.flatten().nonzero()[:, 0]  # a GPU's host waits for it, once per micro batch
        self._bounds = F.pad(firsts, (0, 1), value=ids.numel())
        self._lengths = None if ids.is_cuda else self._bounds.diff().tolist()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Causal attention within each document; (B, nh, T, hs) each.

        On a CPU document by document: as fast as whole windows if documents are as long, and 2.7 times as fast at a
        quarter of it. A mask over whole windows took 1.5 times as long as none. On a GPU PyTorch's kernel for sequences
        of different lengths, which takes bf16 and fp16 without dropout.
        """
        shape = q.transpose(1, 2).shape  # (B, T, nh, hs)
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))  # (B*T, nh, hs)
        if self._lengths is None:
            from torch.nn.attention import varlen  # noqa: PLC0415 - imports Dynamo, for about a second

            bounds = self._bounds.int()
            y = varlen.varlen_attn(q, k, v, bounds, bounds, shape[1], shape[1], window_size=(-1, 0))
            assert isinstance(y, Tensor)  # more only if it is asked for
        else:
            parts = zip(*(torch.split(part, self._lengths) for part in (q, k, v)), strict=True)
            y = torch.cat([_attend(q, k, v, dropout) for q, k, v in parts])
        return y.view(shape).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Causal attention in one document; (tokens, nh, hs) each."""
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))  # (1, nh, tokens, hs)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)[0].transpose(0, 1)


class Attention(nn.Module):
    """Causal multi-head self-attention. A rank has as many heads as ``qkv`` has outputs: a strategy may split them.

    ``attend`` is an attribute, so that a strategy can replace it by an attention that uses keys of other ranks.
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.head_size = config.n_embd // config.n_head
        self.attend: Attend = dense_attention
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """(B, T, C) to (B, T, C); with ``documents``, within each of them."""
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_size)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))  # (B, nh, T, hs)
        dropout = self.dropout if self.training else 0.0
        y = documents.attend(q, k, v, dropout) if documents else self.attend(q, k, v, dropout, True)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(batch, length, -1)
        out: Tensor = self.residual_dropout(self.proj(y))
        return out


class MLP(nn.Module):
    """The position-wise feed-forward network, four times as wide inside."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        out: Tensor = self.residual_dropout(self.proj(F.gelu(self.fc(x), approximate="tanh")))
        return out


class Block(nn.Module):
    """One transformer block: attention, then MLP, each after a LayerNorm and added to the residual stream."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x = x + self.attn(self.ln_1(x), documents)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Head(nn.Linear):
    """The language-modelling head: logits, or the loss of targets. Rows that pad the vocabulary are never predicted.

    A strategy that splits the rows sets ``vocabulary``; then only the loss is defined.
    """

    def __init__(self, config: GPT2Config, *, pad_logits: bool = False) -> None:
        super().__init__(config.n_embd, config.padded_vocab_size, bias=False)
        self.vocab_size, self._pad_logits = config.vocab_size, pad_logits
        self.vocabulary: VocabularyPart | None = None
        self.whole_logits = False
        """Whether the loss is computed from all logits at once."""

    def forward(self, x: Tensor, targets: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """(B, T, C) to logits (B, T, V); with ``targets``, (B, T), to their loss, as ``linear_cross_entropy``."""
        if targets is None:
            assert self.vocabulary is None, "a part of the vocabulary has no logits of all ids"
            return F.linear(x, self.weight[: self.vocab_size])
        how: dict[str, Any] = {"padded": self._pad_logits, "vocabulary": self.vocabulary, "whole": self.whole_logits}
        inputs = x.flatten(0, 1), self.weight, targets.flatten()
        return linear_cross_entropy(*inputs, vocab_size=self.vocab_size, reduction=reduction, **how)


class GPT2(nn.Module):
    """GPT-2 with its language-modelling head. Parameter names are canonical for every strategy and checkpoint.

    Args:
        config: the shape.
        activation_checkpointing: recompute each block's activations in the backward pass instead of keeping them.
        pad_logits: multiply by the padded rows of the embedding as well, for the loss (``logits_of``).
    """

    end_of_text: int | None = None
    """The id that begins a document, if none may see another: ``Documents``. Set by the owner."""

    def __init__(self, config: GPT2Config, *, activation_checkpointing: bool = False, pad_logits: bool = False) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = Head(config, pad_logits=pad_logits)
        self.lm_head.weight = self.wte.weight
        self._gradient_sum: Tensor | None = None

    def take_gradient_sum(self) -> Tensor | None:
        """The sum of the gradients of the first block's input since the last call, 0-dim; None without any.

        It is not finite if a gradient of this rank's activations was not, and ranks have not exchanged it.
        """
        taken, self._gradient_sum = self._gradient_sum, None
        return taken

    def _note_gradient(self, gradient: Tensor) -> None:
        own = gradient.sum(dtype=torch.float32)
        self._gradient_sum = own if self._gradient_sum is None else self._gradient_sum + own

    def forward(
        self, ids: Tensor, targets: Tensor | None = None, *, reduction: str = "mean", first_position: int = 0
    ) -> Tensor:
        """Logits of shape (B, T, V) for ``ids`` of shape (B, T), or with ``targets`` (B, T) their loss in fp32.

        The loss is cross-entropy in nats, the mean or ``"sum"`` over the targets; a target of -100 is left out.
        ``first_position`` is the position of ``ids[:, 0]``, if ``ids`` are a later part of longer sequences.
        """
        documents = None if self.end_of_text is None else Documents(ids, self.end_of_text)
        if documents is None:
            positions = torch.arange(first_position, first_position + ids.shape[1], device=ids.device)  # (T,)
        else:
            positions = documents.positions  # (B, T)
        x = self.embedding_dropout(self.wte(ids) + self.wpe(positions))  # (B, T, C)
        if self.training and x.requires_grad and not torch.compiler.is_compiling():  # a hook would break the graph
            x.register_hook(self._note_gradient)
        for block in self.blocks:
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, documents, use_reentrant=False)
            else:
                x = block(x, documents)
        out: Tensor = self.lm_head(self.ln_f(x), targets, reduction)
        return out


def parameter_shapes(config: GPT2Config) -> dict[str, torch.Size]:
    """Every parameter's canonical name and shape, in the model's order; no memory is allocated for them."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in GPT2(config).named_parameters()}


def random_stream(seed: int, name: object) -> torch.Generator:
    """The random stream of one parameter, or of one sequence, under ``seed``: the same whatever else is drawn."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


WEIGHT_STD = 0.02
"""N(0, 0.02): Radford et al. 2018 (GPT-1), section 4.1, which GPT-2 keeps."""


def initial_value(name: str, shape: torch.Size, *, config: GPT2Config, seed: int) -> Tensor:
    """The initial value of one parameter, fp32 on CPU, of ``shape``.

    Projections back into the residual stream are scaled by 1/sqrt(2 * n_layer): Radford et al. 2019 (GPT-2), section
    2.3, "we scale the weights of residual layers at initialization by a factor of 1/sqrt(N)", N residual layers.
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if ".ln_" in f".{name}":
        return torch.ones(shape)
    generator = random_stream(seed, name)
    std = WEIGHT_STD / (2 * config.n_layer) ** 0.5 if name.endswith("proj.weight") else WEIGHT_STD
    if name != "wte.weight":
        return torch.normal(0.0, std, shape, generator=generator)
    value = torch.zeros(shape)  # the padded rows stay zero: no id selects them, and they get no gradient
    value[: config.vocab_size] = torch.normal(0.0, std, (config.vocab_size, config.n_embd), generator=generator)
    return value


@torch.no_grad()
def initialize(model: torch.nn.Module, *, config: GPT2Config, seed: int) -> None:
    """Give every parameter of a whole, unsharded ``model`` its initial value, in place."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(name, parameter.shape, config=config, seed=seed))
