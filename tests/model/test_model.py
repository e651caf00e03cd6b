"""The network: its sizes, initial weights, padding, loss, and training mode."""

import math

import pytest
import torch
import torch.nn.functional as F
from step_counts import Counts
from torch import nn

from dsgpt.config.recipe_blocks import OptimizerRecipe
from dsgpt.model import linear_cross_entropy as module
from dsgpt.model.config import PRESETS, GPT2Config, shape_problems
from dsgpt.model.gpt2 import GPT2, initial_value, initialize, parameter_shapes
from dsgpt.model.linear_cross_entropy import linear_cross_entropy
from dsgpt.strategies.base import build_optimizer, compile_blocks, parameter_groups

# The published sizes, and impossible shapes.


PUBLISHED = {
    "tiny": pytest.approx(13e6, rel=0.05),
    "small": 124_439_808,
    "medium": 354_823_168,
    "large": 774_030_080,
    "xl": 1_557_611_200,
}


@pytest.mark.parametrize(("size", "count"), PUBLISHED.items())
def test_published_parameter_counts_are_those_of_formula_and_model(size, count):
    config = PRESETS[size]
    assert config.parameter_count() == count
    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    assert sum(shape.numel() for shape in parameter_shapes(config).values()) - padding == config.parameter_count()


def test_names_are_canonical():
    """Every strategy, checkpoint and export uses these names."""
    config = GPT2Config(n_layer=1, n_head=1, n_embd=4, block_size=2, vocab_size=3)
    kinds = ("ln_1", "attn.qkv", "attn.proj", "ln_2", "mlp.fc", "mlp.proj")
    block = [f"blocks.0.{kind}.{what}" for kind in kinds for what in ("weight", "bias")]
    expected = ["wte.weight", "wpe.weight", *block, "ln_f.weight", "ln_f.bias"]
    assert [name for name, _ in GPT2(config).named_parameters()] == expected


GOOD = {"n_layer": 2, "n_head": 4, "n_embd": 48, "block_size": 8, "vocab_size": 10, "dropout": 0.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [*(("n_head", heads) for heads in (5, 17, -1)), ("n_layer", 0), ("vocab_size", 0), ("dropout", float("nan"))],
)
def test_impossible_shapes_name_the_flag(snapshot, field, value):
    changes = {field: value}
    assert shape_problems(GOOD | changes) == snapshot
    with pytest.raises(ValueError, match="--"):
        GPT2Config(**GOOD | changes)


# Initial weights depend on the seed and the parameter's name, and nothing else.


CONFIG = GPT2Config(n_layer=8, n_head=4, n_embd=64, block_size=256, vocab_size=1000)


def made(config: GPT2Config, *, seed: int = 0, **options: bool) -> GPT2:
    model = GPT2(config, **options)
    initialize(model, config=config, seed=seed)
    return model


def initialized(config: GPT2Config = CONFIG, *, seed: int = 1) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in made(config, seed=seed).named_parameters()}


def value(name: str, *, seed: int = 1) -> torch.Tensor:
    return initial_value(name, SHAPES[name], config=CONFIG, seed=seed)


SHAPES = {name: parameter.shape for name, parameter in GPT2(CONFIG).named_parameters()}
DRAWN = [name for name in SHAPES if name.endswith(".weight") and "ln_" not in name]


def test_a_parameter_initialized_alone_has_the_same_values():
    torch.manual_seed(5)
    whole = initialized()
    torch.manual_seed(6)  # the global random stream has no influence
    for name in reversed(SHAPES):
        assert torch.equal(value(name), whole[name]), name


def test_other_parameters_have_no_influence():
    deeper = initialized(GPT2Config(**(CONFIG.as_dict() | {"n_layer": 2, "dropout": 0.3})))
    whole = initialized()
    assert set(deeper) < set(whole)
    for name, part in deeper.items():
        scale = 2.0 if name.endswith("proj.weight") else 1.0  # 1/sqrt(2 * 2) against 1/sqrt(2 * 8)
        torch.testing.assert_close(part, whole[name] * scale, atol=1e-8, rtol=1e-6)


def test_every_name_and_every_seed_has_different_values():
    firsts = [value(name, seed=seed).flatten()[:4] for name in DRAWN for seed in (1, 2, 12)]
    directions = F.normalize(torch.stack(firsts), dim=1)
    assert (directions @ directions.T - torch.eye(len(firsts))).abs().max() < 0.999999


@pytest.mark.parametrize("name", DRAWN)
def test_standard_deviation_and_mean(name):
    drawn = value(name)[: CONFIG.vocab_size] if name == "wte.weight" else value(name)
    residual = name.endswith(("attn.proj.weight", "mlp.proj.weight"))
    std = 0.02 / (2 * CONFIG.n_layer) ** 0.5 if residual else 0.02
    assert drawn.std().item() == pytest.approx(std, rel=0.05)
    assert abs(drawn.mean().item()) < 5 * std / drawn.numel() ** 0.5


def test_biases_layer_norms_and_padding_are_constant():
    for name, parameter in initialized().items():
        if name.endswith(".bias"):
            assert not parameter.any(), name
        elif "ln_" in name:
            assert (parameter == 1).all(), name
    padded = initialized()["wte.weight"][CONFIG.vocab_size :]
    assert padded.shape == (24, 64)
    assert not padded.any()


# The rows that pad the vocabulary to a multiple of 64 have no effect.


def small_model(vocab_size: int, **settings: bool) -> GPT2:
    return made(GPT2Config(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=vocab_size), **settings)


IDS = torch.arange(24).view(2, 12) * 4 % 97


@pytest.mark.parametrize("scale", [1e4, float("nan")])
def test_extreme_weights_in_padded_rows_change_nothing(scale):
    model = small_model(101).eval()
    logits, loss = model(IDS), model(IDS, IDS.roll(1))
    with torch.no_grad():
        model.wte.weight[101:] = scale
    assert model(IDS).shape == (2, 12, 101)
    assert torch.equal(model(IDS), logits)
    assert torch.equal(model(IDS, IDS.roll(1)), loss)


@pytest.mark.parametrize("pad_logits", [False, True], ids=["", "padded"])
def test_padded_rows_have_no_gradient_and_stay_zero(pad_logits):
    model = small_model(101, pad_logits=pad_logits)
    recipe = OptimizerRecipe(type="AdamW", lr=0.1, weight_decay=0.1)
    optimizer = build_optimizer(parameter_groups(dict(model.named_parameters()), recipe), recipe)
    for _ in range(3):
        optimizer.zero_grad()
        model(IDS, IDS.roll(1)).backward()
        assert not model.wte.weight.grad[101:].any()
        assert model.wte.weight.grad[:101].abs().sum(dim=1).min() > 0  # the softmax gives every real row a gradient
        optimizer.step()
    assert not model.wte.weight[101:].any()


# The head and its loss in chunks: equal to PyTorch's cross_entropy of all logits, without ever holding them.


TOKENS, WIDTH, VOCABULARY, ROWS = 30, 16, 101, 128


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight and targets, of which two do not count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    targets[[3, 29]] = -100
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def of_all_logits(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
    logits = x @ weight[:VOCABULARY].T
    return F.cross_entropy(logits.to(torch.promote_types(x.dtype, torch.float32)), targets, reduction=reduction)


def chunks_of(monkeypatch: pytest.MonkeyPatch, *, tokens: int, at_once: int) -> None:
    monkeypatch.setitem(module.CHUNKS, "cpu", tokens * VOCABULARY)
    monkeypatch.setattr(module, "CACHED", at_once * VOCABULARY)


@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize(("tokens", "at_once"), [(7, 3), (30, 4), (1000, 1000), (1, 1)])
def test_loss_and_gradients_are_those_of_all_logits(monkeypatch, tokens, at_once, padded, reduction, factor):
    chunks_of(monkeypatch, tokens=tokens, at_once=at_once)
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        x, weight, targets = drawn(dtype)
        found = linear_cross_entropy(x, weight, targets, vocab_size=VOCABULARY, reduction=reduction, padded=padded)
        expected = of_all_logits(x, weight, targets, reduction)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
        gradients = torch.autograd.grad(found * factor, (x, weight))
        wanted = torch.autograd.grad(expected * factor, (x, weight))
        torch.testing.assert_close(gradients, wanted, rtol=tolerance, atol=tolerance)
        assert not gradients[1][VOCABULARY:].any()


def test_fp16_has_the_same_loss_and_gradients_with_padding():
    x, weight, targets = drawn(torch.float16)
    losses = [
        linear_cross_entropy(x, weight, targets, vocab_size=VOCABULARY, reduction="mean", padded=padded)
        for padded in (False, True)
    ]
    plain, padded = (torch.autograd.grad(loss, (x, weight)) for loss in losses)
    torch.testing.assert_close([losses[1], *padded], [losses[0], *plain], rtol=2e-3, atol=1e-4)
    assert not padded[1][VOCABULARY:].any()


@pytest.mark.parametrize("tokens", [7, 1000])
def test_bf16_rounds_about_as_much_as_all_logits_do(monkeypatch, tokens):
    chunks_of(monkeypatch, tokens=tokens, at_once=3)
    x, weight, targets = drawn(torch.bfloat16)
    exact_x, exact_weight = (value.detach().double().requires_grad_() for value in (x, weight))
    exact = torch.autograd.grad(of_all_logits(exact_x, exact_weight, targets, "mean"), (exact_x, exact_weight))

    def distances(loss: torch.Tensor) -> list[float]:
        gradients = torch.autograd.grad(loss, (x, weight))
        assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
        return [float((found - true).norm() / true.norm()) for found, true in zip(gradients, exact, strict=True)]

    found = linear_cross_entropy(x, weight, targets, vocab_size=VOCABULARY, reduction="mean")
    expected = of_all_logits(x, weight, targets, "mean")
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, theirs in zip(distances(found), distances(expected), strict=True):
        assert ours <= theirs * 1.2


def test_no_counting_target_and_no_tokens_are_as_in_torch():
    x, weight, targets = drawn(torch.float32)
    none = torch.full((TOKENS,), -100)
    for tokens, ids in ((x, none), (x[:0], targets[:0])):
        loss = linear_cross_entropy(tokens, weight, ids, vocab_size=VOCABULARY, reduction="sum")
        assert loss.item() == 0
        assert not torch.autograd.grad(loss, weight)[0].any()
    assert math.isnan(linear_cross_entropy(x, weight, none, vocab_size=VOCABULARY, reduction="mean").item())


def test_a_loss_far_beyond_exp_is_finite():
    x, weight, targets = torch.full((2, 1), 1000.0), torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0])
    assert linear_cross_entropy(x, weight, targets, vocab_size=2, reduction="sum").item() == 2000.0


def test_a_second_backward_pass_is_refused():
    x, weight, targets = drawn(torch.float32)
    loss = linear_cross_entropy(x, weight, targets, vocab_size=VOCABULARY, reduction="mean")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used by an earlier backward pass"):
        loss.backward()


def test_logits_never_exist_whole_and_are_computed_once(monkeypatch):
    """Without gradients only the forward product is computed."""
    chunks_of(monkeypatch, tokens=10, at_once=2)
    x, weight, targets = drawn(torch.float32)
    with Counts() as counts:
        linear_cross_entropy(x, weight, targets, vocab_size=VOCABULARY, reduction="mean").backward()
    # Three products for each of three chunks; the largest new tensor is the gradient of the head.
    assert counts.flops == 3 * 2 * TOKENS * WIDTH * VOCABULARY
    assert counts.largest_new == ROWS * WIDTH
    assert counts.new_of(ROWS * WIDTH) == 1
    with torch.no_grad(), Counts() as counts:
        linear_cross_entropy(x, weight, targets, vocab_size=VOCABULARY, reduction="sum")
    assert counts.flops == 2 * TOKENS * WIDTH * VOCABULARY


# Dropout is applied only in training; recomputing activations changes no value.


SHAPE = {"n_layer": 3, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 101}
MODE_IDS = torch.randint(0, 101, (4, 17), generator=torch.Generator().manual_seed(0))


def model_with(dropout: float, **options: bool) -> GPT2:
    return made(GPT2Config(**SHAPE, dropout=dropout), **options)


def loss_and_gradients(model: GPT2) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    loss = model(MODE_IDS[:, :-1], MODE_IDS[:, 1:])
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_dropout_is_applied_in_training_and_not_in_evaluation():
    model = model_with(0.5)
    assert not torch.equal(model.train()(MODE_IDS[:, :-1]), model(MODE_IDS[:, :-1]))
    assert torch.equal(model.eval()(MODE_IDS[:, :-1]), model(MODE_IDS[:, :-1]))
    assert torch.equal(model(MODE_IDS[:, :-1]), model_with(0.0).train()(MODE_IDS[:, :-1]))


def test_every_dropout_layer_drops_its_share():
    """GPT-2 drops after the embedding, after attention's and the MLP's projection, and inside attention."""
    model = model_with(0.25).train()
    dropped: dict[str, float] = {}
    for name, part in model.named_modules():
        if isinstance(part, nn.Dropout):

            def note(_module, _inputs, output, name=name):
                dropped[name] = (output == 0).float().mean().item()

            part.register_forward_hook(note)
    torch.manual_seed(0)
    model(MODE_IDS[:, :-1])
    places = [f"blocks.{layer}.{part}.residual_dropout" for layer in range(3) for part in ("attn", "mlp")]
    assert set(dropped) == {"embedding_dropout", *places}
    assert all(share == pytest.approx(0.25, abs=0.05) for share in dropped.values()), dropped
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    assert not torch.equal(model(MODE_IDS[:, :-1]), model(MODE_IDS[:, :-1]))  # attention's weights are dropped too


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_changes_no_value(dropout):
    loss, gradients = loss_and_gradients(model_with(dropout).train())
    again, recomputed = loss_and_gradients(model_with(dropout, activation_checkpointing=True).train())
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], recomputed[name]) for name in gradients)


@pytest.mark.parametrize(("checkpointing", "passes"), [(False, 1), (True, 2)])
def test_activation_checkpointing_recomputes_every_block(checkpointing, passes):
    model = model_with(0.0, activation_checkpointing=checkpointing).train()
    ran = [0] * 3
    for layer, block in enumerate(model.blocks):

        def count(_module, _inputs, layer=layer):
            ran[layer] += 1

        block.register_forward_pre_hook(count)
    loss_and_gradients(model)
    assert ran == [passes] * 3


def test_blocks_are_compiled_and_nothing_around_them():
    model = model_with(0.0)
    compile_blocks(model)
    compiled = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert compiled == [f"blocks.{layer}" for layer in range(3)]


def test_the_gradient_of_the_activations_is_summed_until_it_is_taken():
    """A rank tells by it whether the first gradient that is not finite was its own."""
    model, sums = model_with(0.0), []
    for passes in (1, 2):
        for _ in range(passes):
            loss_and_gradients(model)
        sums.append(model.take_gradient_sum())
    assert sums[1] == pytest.approx(2 * sums[0].item())
    assert sums[0] != 0
    assert model.take_gradient_sum() is None


def test_later_tokens_do_not_influence_earlier_ones():
    model = model_with(0.0).eval()
    changed = MODE_IDS[:, :-1].clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 101
    before, after = model(MODE_IDS[:, :-1]), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])
