"""The head and its loss in chunks: equal to PyTorch's cross_entropy of all logits, without ever holding them."""

import math

import pytest
import torch
import torch.nn.functional as F
from step_counts import Counts

from dsgpt.model import linear_cross_entropy as module
from dsgpt.model.linear_cross_entropy import linear_cross_entropy

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
@pytest.mark.parametrize(("tokens", "at_once"), [(7, 3), (30, 4), (1000, 1000), (1, 1)])
def test_loss_and_gradients_are_those_of_all_logits(monkeypatch, tokens, at_once, reduction, factor):
    chunks_of(monkeypatch, tokens=tokens, at_once=at_once)
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        x, weight, targets = drawn(dtype)
        found = linear_cross_entropy(x, weight, targets, vocab_size=VOCABULARY, reduction=reduction)
        expected = of_all_logits(x, weight, targets, reduction)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
        gradients = torch.autograd.grad(found * factor, (x, weight))
        wanted = torch.autograd.grad(expected * factor, (x, weight))
        torch.testing.assert_close(gradients, wanted, rtol=tolerance, atol=tolerance)
        assert not gradients[1][VOCABULARY:].any()


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


def test_a_loss_far_beyond_exp_is_finite():
    x, weight = torch.full((2, 1), 1000.0), torch.tensor([[1.0], [-1.0]])
    targets = torch.tensor([1, 0])
    assert linear_cross_entropy(x, weight, targets, vocab_size=2, reduction="sum").item() == 2000.0


def test_no_counting_target_is_as_in_torch():
    x, weight, _ = drawn(torch.float32)
    none = torch.full((TOKENS,), -100)
    assert linear_cross_entropy(x, weight, none, vocab_size=VOCABULARY, reduction="sum").item() == 0
    assert math.isnan(linear_cross_entropy(x, weight, none, vocab_size=VOCABULARY, reduction="mean").item())


def test_no_tokens_are_as_in_torch():
    x, weight, targets = (value[:0] if value.dim() == 1 else value for value in drawn(torch.float32))
    nothing = x[:0]
    loss = linear_cross_entropy(nothing, weight, targets, vocab_size=VOCABULARY, reduction="sum")
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, weight)[0].any()


def test_a_second_backward_pass_is_refused():
    x, weight, targets = drawn(torch.float32)
    loss = linear_cross_entropy(x, weight, targets, vocab_size=VOCABULARY, reduction="mean")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used by an earlier backward pass"):
        loss.backward()


def test_logits_never_exist_whole_and_are_computed_once(monkeypatch):
    chunks_of(monkeypatch, tokens=10, at_once=2)
    x, weight, targets = drawn(torch.float32)
    with Counts() as counts:
        linear_cross_entropy(x, weight, targets, vocab_size=VOCABULARY, reduction="mean").backward()
    # Three products for each of three chunks; the largest new tensor is the gradient of the head.
    assert counts.flops == 3 * 2 * TOKENS * WIDTH * VOCABULARY
    assert counts.largest_new == ROWS * WIDTH
    assert counts.new_of(ROWS * WIDTH) == 1


def test_without_gradients_only_the_forward_product_is_computed():
    x, weight, targets = drawn(torch.float32)
    with torch.no_grad(), Counts() as counts:
        linear_cross_entropy(x, weight, targets, vocab_size=VOCABULARY, reduction="sum")
    assert counts.flops == 2 * TOKENS * WIDTH * VOCABULARY


def test_it_compiles_without_a_graph_break():
    x, weight, targets = drawn(torch.float32)

    def loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, weight, targets, vocab_size=VOCABULARY, reduction="mean")

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(x, weight, targets)
    found, expected = (torch.autograd.grad(value, (x, weight)) for value in (compiled, loss(x, weight, targets)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
