"""The decoding engine: prompts in one pass, then one token of every sequence at a time, with a key-value cache.

Letters in the shapes: B sequences, T positions, C width, nh heads, hs head size, V vocabulary, P positions of the
cache.

Decoding reads every weight for every token: the time of a token is that of the memory. It multiplies a few rows by each
weight. PyTorch's general product arranges the weight anew in every call when there is more than one row, or when it is
in bf16, and that costs more than the product. So linear layers are arranged once, as suits the device and the rows.

The step of one token through ``torch.compile``: one graph for each batch size and each size of the cache. On GPUs it
becomes a CUDA graph. On CPUs weights are constants, so that the compiler arranges them, and it measures which of its
products and PyTorch's is faster.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsgpt.machine.device import HugePages, multiplies, packs
from dsgpt.model.gpt2 import GPT2, Block

Prompts = Sequence[Sequence[int]]
"""The ids that each sequence of a batch starts with."""

# Weights in 8 bits. Each output has its own scale, and zero stays zero; activations are not quantized.

LARGEST = 127


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values in int8, (out, in), and scales in fp32, (out,), whose product is close to ``weight``, (out, in)."""
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scales[:, None]).round().to(torch.int8), scales


@torch.no_grad()
def round_to_int8(model: GPT2) -> None:
    """Replace the weights that ``Decoder(model, quantize="int8")`` quantizes by what they become.

    The embedding of ids keeps its weights: the head, which shares them, gets its own.
    """
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    for module in (model.lm_head, *model.blocks.modules()):
        if isinstance(module, nn.Linear):
            values, scales = to_int8(module.weight)
            module.weight.copy_(values * scales.to(module.weight.dtype).float()[:, None])


# Linear layers whose weights are arranged for decoding.

_FEW_ROWS = 16
"""The most rows for which PyTorch's product with weights in 8 or 16 bits is faster than converting them first."""


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``; many rows in a precision that this CPU cannot multiply in, in fp32, rounded once."""
    if x.device.type != "cpu" or len(x) <= _FEW_ROWS or multiplies(x.dtype):
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


class Linear:
    """A weight (out, in) and a bias (out,), applied to rows x, (N, in); as it is here, it shares the model's memory."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def product(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``, (N, out)."""
        return _product(x, self._weight, self._bias)

    def gelu(self, x: Tensor) -> Tensor:
        """The tanh GELU of the product, (N, out)."""
        return F.gelu(self.product(x), approximate="tanh")

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """The product plus ``residual``, (N, out)."""
        return residual + self.product(x)


class Transposed(Linear):
    """A linear layer on a copy of the weight as (in, out), which MKL's product of one row reads faster."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, memory: HugePages) -> None:
        super().__init__(memory.copy(weight.t()), bias)

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return torch.mm(x, self._weight) if self._bias is None else torch.addmm(self._bias, x, self._weight)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See ``Linear``."""
        out = torch.addmm(residual, x, self._weight)
        return out if self._bias is None else out.add_(self._bias)


class Packed(Linear):
    """A linear layer on a copy of the weight in the layout of oneDNN's kernels, which also add and apply the GELU.

    These are the operators that ``torch.compile`` replaces linear layers by; they work without a compiler, too.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, rows: int) -> None:
        """Copy ``weight`` into the layout for ``rows`` rows; other numbers of rows are computed, too."""
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight, rows), bias)

    def product(self, x: Tensor, activation: str = "none", algorithm: str = "") -> Tensor:
        """See ``Linear``; with an ``activation`` of oneDNN's."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, activation, (), algorithm)
        return out

    def gelu(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self.product(x, "gelu", "tanh")

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See ``Linear``."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
        return out


class Int8(Linear):
    """A linear layer on a copy of the weight in 8 bits, for bf16 or fp16: less memory, and less time for one row."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, memory: HugePages) -> None:
        rounded, scales = to_int8(weight)
        super().__init__(memory.copy(rounded), bias)
        self._scales = scales.to(weight.dtype)

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        out: Tensor
        if x.device.type == "cpu" and len(x) <= _FEW_ROWS:
            out = torch.ops.aten._weight_int8pack_mm(x, self._weight, self._scales)
        else:
            out = _product(x, self._weight.to(x.dtype)) * self._scales
        return out if self._bias is None else out.add_(self._bias)


def fast_linear(weight: Tensor, bias: Tensor | None, *, rows: int, memory: HugePages, quantize: str = "none") -> Linear:
    """The fastest for products of ``rows`` rows with ``weight``, or with its 8 bits, of those that work here.

    GPUs need no other layouts; what a CPU cannot do is left to ``Linear``.

    Args:
        weight: (out, in).
        bias: (out,).
        rows: usual rows of a product.
        memory: of the copies whose layout is PyTorch's.
        quantize: ``int8`` or ``none``.
    """
    if quantize == "int8":
        return Int8(weight, bias, memory=memory)
    on_cpu = weight.device.type == "cpu"
    if on_cpu and weight.dtype == torch.float32 and rows == 1 and torch._C.has_mkl:
        return Transposed(weight, bias, memory=memory)
    if on_cpu and packs(weight.dtype):
        return Packed(weight, bias, rows=rows)
    return Linear(weight, bias)


class _Layer(nn.Module):
    """The parts of a transformer block; ``linear`` and ``norm`` arrange its modules."""

    def __init__(self, block: Block, linear: Callable[[nn.Linear], Any], norm: Callable[[nn.LayerNorm], Any]) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norm(block.ln_1), norm(block.ln_2)
        self.qkv, self.proj = linear(block.attn.qkv), linear(block.attn.proj)
        self.fc, self.out = linear(block.mlp.fc), linear(block.mlp.proj)


# The step of one token through the compiler.

GRANULE = 128
"""Positions by which the cache grows from one graph to the next."""

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""See ``_Step.forward``."""


class _Int8(nn.Module):
    """A linear layer with weights in 8 bits."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        values, scales = to_int8(weight.detach())
        self.values, self.scales, self.bias = nn.Buffer(values), nn.Buffer(scales.to(weight.dtype)), bias

    def forward(self, x: Tensor) -> Tensor:
        """(N, in) to (N, out)."""
        if x.device.type == "cpu":
            out: Tensor = torch.ops.aten._weight_int8pack_mm(x, self.values, self.scales)
        else:
            out = F.linear(x, self.values.to(x.dtype)) * self.scales
        return out if self.bias is None else out + self.bias


class _Step(nn.Module):
    """One token of every sequence of a batch."""

    def __init__(self, model: GPT2, *, quantize: str) -> None:
        super().__init__()

        def linear(module: nn.Linear) -> nn.Module:
            return _Int8(module.weight, module.bias) if quantize == "int8" else module

        self.heads = model.config.n_head
        self.wte, self.wpe, self.ln_f = model.wte, model.wpe, model.ln_f
        head = nn.Linear(model.config.n_embd, model.config.vocab_size, bias=False, device="meta")
        head.weight = nn.Parameter(model.wte.weight.detach()[: model.config.vocab_size], requires_grad=False)
        self.head = linear(head)
        blocks = (block for block in model.blocks if isinstance(block, Block))
        self.layers = nn.ModuleList(_Layer(block, linear, lambda norm: norm) for block in blocks)

    def forward(self, ids: Tensor, places: Tensor, column: Tensor, padding: Tensor, cache: Tensor) -> Tensor:
        """The logits that follow ``ids``, (B, V) in fp32.

        Args:
            ids: (B,).
            places: their positions in the model, (B,).
            column: their place in the cache, (1,).
            padding: positions of the cache that each sequence leaves unused at its start, (B, 1).
            cache: of each layer, keys and values, (B, nh, P, hs) each; gets those of ``ids``.
        """
        batch, columns = len(ids), torch.arange(cache.shape[4], device=ids.device)
        seen = ((columns <= column) & (columns >= padding))[:, None, None]  # (B, 1, 1, P)
        x = self.wte(ids) + self.wpe(places)  # (B, C)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            qkv = layer.qkv(layer.attention_norm(x)).view(batch, 1, 3, self.heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, 1, hs) each
            cache[index, 0].index_copy_(2, column, k)
            cache[index, 1].index_copy_(2, column, v)
            y = F.scaled_dot_product_attention(q, cache[index, 0], cache[index, 1], attn_mask=seen)
            x = x + layer.proj(y.reshape(batch, -1))
            x = x + layer.out(F.gelu(layer.fc(layer.mlp_norm(x)), approximate="tanh"))
        logits: Tensor = self.head(self.ln_f(x)).float()
        return logits


def compiled_step(model: GPT2, *, quantize: str) -> Step:
    """The step of ``model``, which compiles when it is first called with a batch size and a size of the cache."""
    step = _Step(model, quantize=quantize).eval().requires_grad_(False)
    if model.wte.weight.device.type == "cuda":
        graph: Step = torch.compile(step, dynamic=False, mode="reduce-overhead")
        return graph
    compiled = torch.compile(step, dynamic=False)
    # Without AVX512 the compiler's own product with weights in 8 bits gives NaN (torch 2.13).
    wrong = quantize == "int8" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512")

    def call(*inputs: Tensor) -> Tensor:
        from torch._inductor import config, select_algorithm  # noqa: PLC0415 - takes a second

        select_algorithm.PRINT_AUTOTUNE = False
        settings: Any = config.patch(
            freezing=True,
            max_autotune=True,
            max_autotune_gemm_backends="ATEN" if wrong else "CPP,ATEN",
            max_autotune_report_choices_stats=False,
        )
        with warnings.catch_warnings(), settings:
            warnings.simplefilter("ignore", UserWarning)  # the compiler's own use of deprecated storages
            logits: Tensor = compiled(*inputs)
        return logits

    return call


# Batches of sequences that are decoded together.


def _norm(module: nn.LayerNorm) -> Callable[[Tensor], Tensor]:
    """The LayerNorm as a function from (N, C) to (N, C), without a module's overhead."""
    weight, bias = module.weight.detach(), module.bias.detach()
    return partial(torch.layer_norm, normalized_shape=weight.shape, weight=weight, bias=bias, eps=module.eps)


class Decoder:
    """The layers of a model, arranged for decoding a batch.

    Args:
        model: in evaluation mode; its weights must not change afterwards, because some are copied.
        batch_size: sequences that are usually decoded together.
        quantize: ``int8`` for weights in 8 bits, of a model in bf16 or fp16; ``none`` for those of the model.
        compiled: whether tokens after the prompt come from a compiled step.
    """

    def __init__(self, model: GPT2, *, batch_size: int = 1, quantize: str = "none", compiled: bool = False) -> None:
        self.config = model.config
        self.embedding, self.positions = model.wte.weight.detach(), model.wpe.weight.detach()
        linear = partial(fast_linear, rows=batch_size, quantize=quantize, memory=HugePages())

        def arranged(module: nn.Linear) -> Linear:
            return linear(module.weight.detach(), module.bias.detach())

        self.head = linear(self.embedding[: model.config.vocab_size], None)
        self.step = compiled_step(model, quantize=quantize) if compiled else None
        self.final_norm = _norm(model.ln_f)
        self.layers = [_Layer(block, arranged, _norm) for block in model.blocks if isinstance(block, Block)]

    def begin(self, prompts: Prompts, *, new_tokens: int) -> "Sequences":
        """Sequences that start with ``prompts``, not read yet, with a cache for ``new_tokens`` more ids each.

        A longer sequence of a batch may reach the end of the model's positions before the others do. What follows it
        from there on means nothing.

        Raises:
            ValueError: a prompt is empty or does not fit the model's positions, or not even the shortest has positions
                for its new ids.
        """
        positions, lengths = self.config.block_size, sorted(map(len, prompts))
        if lengths[0] == 0 or lengths[0] + new_tokens > positions or lengths[-1] > positions:
            needed = f"a prompt of {lengths[0]} ids and {new_tokens} new ones"
            raise ValueError(f"{needed} do not fit into {positions} positions")
        return Sequences(self, prompts, capacity=lengths[-1] + new_tokens)


class Sequences:
    """A batch of sequences that grow together. Shorter prompts are padded on the left.

    All memory that grows with the length is allocated at the start: ``capacity`` positions of keys and values.
    """

    def __init__(self, decoder: Decoder, prompts: Prompts, *, capacity: int) -> None:
        config, embedding = decoder.config, decoder.embedding
        self._decoder, self._device = decoder, embedding.device
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        padded = [[0] * count + list(prompt) for count, prompt in zip(padding, prompts, strict=True)]
        self._prompts = torch.tensor(padded, device=self._device)  # (B, T)
        self._padding = torch.tensor(padding, device=self._device)[:, None]  # (B, 1)
        self._places = torch.arange(width, device=self._device)[None].expand(len(prompts), -1)  # (B, T)
        if decoder.step:
            capacity = -(-capacity // GRANULE) * GRANULE
        heads = (len(prompts), config.n_head, capacity, config.n_embd // config.n_head)
        # Keys and values of each layer, (B, nh, P, hs) each.
        self._cache = torch.zeros((config.n_layer, 2, *heads), dtype=embedding.dtype, device=self._device)
        if decoder.step:
            torch._dynamo.mark_static_address(self._cache)  # a CUDA graph may change it
        self._mask: Tensor | None = None
        """Added to the scores of the cache's positions, (B, 1, 1, P): -inf for padding; None without padding."""
        if any(padding):
            unused = torch.arange(capacity, device=self._device) < self._padding  # (B, P)
            mask = torch.zeros(unused.shape, dtype=embedding.dtype, device=self._device)
            self._mask = mask.masked_fill_(unused, float("-inf"))[:, None, None]
            self._places = (self._places - self._padding).clamp(min=0)
        self.length = 0
        """Positions in the cache, padding included."""

    @torch.inference_mode()
    def read_prompts(self) -> Tensor:
        """Read the prompts in one pass; the logits of the id that follows each, (B, V) in fp32."""
        mask = None
        if self._mask is not None:
            width = self._prompts.shape[1]
            seen = torch.ones((width, width), dtype=torch.bool, device=self._device).tril()
            mask = self._mask[..., :width].masked_fill(~seen, float("-inf"))  # (B, 1, T, T)
            # A padded position sees itself: of no score at all, some kernels compute NaN, which would spoil the cache.
            mask.masked_fill_(torch.eye(width, dtype=torch.bool, device=self._device), 0.0)
        logits = self._pass(self._prompts, mask, causal=mask is None)
        self._places = (self._places[:, -1:] + 1).clamp_(max=self._decoder.config.block_size - 1)  # (B, 1)
        return logits

    @torch.inference_mode()
    def append(self, ids: Tensor) -> Tensor:
        """Append ``ids``, (B,), one to each sequence; the logits of the id that follows, (B, V) in fp32."""
        if self._decoder.step:
            column = torch.tensor([self.length], device=self._device)
            self.length += 1
            logits = self._decoder.step(ids, self._places[:, 0], column, self._padding, self._cache)
        else:
            mask = None if self._mask is None else self._mask[..., : self.length + 1]
            logits = self._pass(ids[:, None], mask, causal=False)
        self._places = (self._places + 1).clamp_(max=self._decoder.config.block_size - 1)
        return logits

    def _pass(self, ids: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
        decoder, (batch, length) = self._decoder, ids.shape
        start, end = self.length, self.length + length
        x = decoder.embedding[ids.flatten()] + decoder.positions[self._places.flatten()]  # (B * T, C)
        heads = (batch, length, 3, *self._cache.shape[3::2])  # (B, T, 3, nh, hs)
        new, seen = self._cache[..., start:end, :], self._cache[..., :end, :].flatten(0, 1).unbind()
        for layer, written, keys, values in zip(decoder.layers, new, seen[::2], seen[1::2], strict=True):
            qkv = layer.qkv.product(layer.attention_norm(x)).view(heads).permute(2, 0, 3, 1, 4)  # (3, B, nh, T, hs)
            written.copy_(qkv[1:])
            y = F.scaled_dot_product_attention(qkv[0], keys, values, attn_mask=mask, is_causal=causal)  # (B, nh, T, hs)
            x = layer.proj.added_to(x, y.transpose(1, 2).reshape(x.shape))
            x = layer.out.added_to(x, layer.fc.gelu(layer.mlp_norm(x)))
        self.length = end
        last = x.view(batch, length, -1)[:, -1]  # only these logits are needed
        return decoder.head.product(decoder.final_norm(last)).float()
