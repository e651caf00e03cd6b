"""Embedding, head and loss of which each tensor rank has some rows, against PyTorch's of the whole vocabulary.

This file is also the script of the ranks.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forked_ranks import run_script
from step_counts import Counts
from torch import Tensor, nn
from training_runs import SGD, assert_same_training, finished, roll_back, train, weights_of, write_optimizer_recipe

from dsgpt.machine.launcher import exit_rank
from dsgpt.model import linear_cross_entropy as module
from dsgpt.model.config import GPT2Config
from dsgpt.model.linear_cross_entropy import VocabularyPart, cross_entropy_of_part, linear_cross_entropy, logits_of

TOKENS, WIDTH = 30, 16
VOCABULARIES = (101, 10)
"""Of 128 and 64 rows. Three ranks have unequal parts of either, and of the second not all have more than padding."""
IGNORED = [3, 29]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_compute_what_the_whole_does(ranks):
    finished(run_script(__file__, ["nothing"], ranks=ranks))


@pytest.mark.parametrize(
    ("wrong", "found"),
    [("hidden gradient", "gradient of the hidden states"), ("mask", "embedding"), ("statistics", "loss")],
)
def test_the_comparison_finds(wrong, found):
    done = run_script(__file__, [wrong], ranks=2)
    assert done.returncode
    assert f"AssertionError: {found}" in done.stderr


@pytest.mark.parametrize(
    ("stages", "stage"),
    [(1, 1), *(pytest.param(stages, stage, marks=pytest.mark.long) for stages, stage in ((1, 0), (2, 0), (2, 1)))],
)
def test_unequal_parts_train_as_the_baseline_and_continue_each_others_runs(corpus, tmp_path, stages, stage):
    """Three tensor ranks share 320 rows, without and with a pipeline; SGD and clipping show a wrong gradient norm."""
    shape = ("--num_heads", "3", "--embedding_size", "36", "--save_every", "2", "--max_train_steps")
    more: dict[str, dict[str, int]] = {"tensor_parallel": {"autotp_size": 3}}
    if stages > 1:
        more["pipeline"] = {"stages": stages}
    recipe = write_optimizer_recipe(tmp_path / "recipe.json", optimizer=SGD, clipping=0.3, stage=stage, **more)
    alone, split, ranks = tmp_path / "alone", tmp_path / "split", 3 * stages
    finished(train(alone, corpus, recipe, *shape, "4", "--grad_accum_steps", "2"))
    finished(train(split, corpus, recipe, *shape, "4", "--grad_accum_steps", "2", ranks=ranks))
    assert_same_training(alone, split, loss=2e-6, norm=1e-6)
    forward = roll_back(alone, tmp_path / "forward", 2), roll_back(split, tmp_path / "back", 2)
    for run, count in zip(forward, (ranks, None), strict=True):
        finished(train(run, corpus, recipe, *shape, "4", "--grad_accum_steps", "2", "--resume", ranks=count))
        assert_same_training(alone, run, loss=2e-6, norm=1e-6)
        for name, weight in weights_of(run / "step-00000004").items():
            same(name, weight, weights_of(alone / "step-00000004")[name], rtol=0, atol=2e-6)


def planted(wrong: str) -> AbstractContextManager[object]:
    """A bug in the layers: a gradient that is not summed, a lookup without a mask, or figures of other parts lost."""
    from dsgpt.strategies.deepspeed import tensor_layers

    def alone(group: object, x: Tensor) -> Tensor:
        return x

    def own_alone(gathered: Tensor, own: Tensor, *, group: object) -> None:
        gathered.view(-1, *own.shape)[:] = own / len(gathered.view(-1, *own.shape))

    return {
        "nothing": nullcontext(),
        "hidden gradient": mock.patch.object(tensor_layers.ContiguousColumnParallel, "apply", alone),
        "mask": mock.patch.object(Tensor, "masked_fill", lambda ids, mask, _: ids % 5 if ids.dim() == 2 else ids),
        "statistics": mock.patch.object(dist, "all_gather_into_tensor", own_alone),
    }[wrong]


def same(what: str, found: Tensor | None, expected: Tensor | None, *, rtol: float, atol: float = 0) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def drawn(shape: GPT2Config, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the whole weight and targets, the same on every rank; two targets do not count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(shape.padded_vocab_size, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, shape.vocab_size, (TOKENS,), generator=generator)
    targets[IGNORED] = -100
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def check_loss(shape: GPT2Config, part: VocabularyPart, rows: slice) -> None:
    """Values and gradients, in chunks and of logits that exist, with and without padding."""
    exact, single, half = torch.float64, torch.float32, torch.float16
    for (dtype, tolerance), padded, reduction, factor in itertools.product(
        ((exact, 1e-12), (single, 2e-5), (half, 4e-3)), (False, True), ("mean", "sum"), (1.0, 0.3)
    ):
        x, weight, targets = drawn(shape, dtype)
        logits = x.to(exact) @ weight[: shape.vocab_size].to(exact).T
        expected = F.cross_entropy(logits, targets, reduction=reduction)
        wanted = torch.autograd.grad(expected * factor, (x, weight))
        for whole in (False, True):  # as one operation, and as a pipeline's head and loss
            hidden, own = x.detach().requires_grad_(), weight.detach()[rows].requires_grad_()
            if whole:
                size = part.own(shape.vocab_size)
                scores = logits_of(part.share(hidden), own, vocab_size=size, padded=padded)
                loss = cross_entropy_of_part(scores, targets, reduction=reduction, vocabulary=part)
            else:
                loss = linear_cross_entropy(
                    hidden,
                    own,
                    targets,
                    vocab_size=shape.vocab_size,
                    reduction=reduction,
                    padded=padded,
                    vocabulary=part,
                )
            same("loss", loss.double(), expected, rtol=tolerance)
            of_hidden, of_own = torch.autograd.grad(loss * factor, (hidden, own))
            scale = tolerance * (1 if reduction == "mean" else TOKENS)
            same("gradient of the hidden states", of_hidden, wanted[0], rtol=tolerance, atol=scale)
            assert not of_hidden[IGNORED].any()
            same("gradient of the rows", of_own, wanted[1][rows], rtol=tolerance, atol=scale)
            equal = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
            dist.all_gather(equal, loss.detach())
            assert len({float(one) for one in equal}) == 1


def check_no_target_counts(shape: GPT2Config, part: VocabularyPart, rows: slice) -> None:
    x, weight, _ = drawn(shape, torch.float32)
    none, own = torch.full((TOKENS,), -100), weight.detach()[rows].requires_grad_()
    loss = linear_cross_entropy(x, own, none, vocab_size=shape.vocab_size, reduction="sum", vocabulary=part)
    assert loss.item() == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, (x, own)))


def check_memory(shape: GPT2Config, part: VocabularyPart, rows: slice) -> None:
    """The largest new tensors are the gradients; only one chunk of this part's logits exists at a time."""
    x, weight, targets = drawn(shape, torch.float32)
    own = weight.detach()[rows].requires_grad_()
    with Counts() as counts:
        linear_cross_entropy(
            x, own, targets, vocab_size=shape.vocab_size, reduction="mean", padded=True, vocabulary=part
        ).backward()
    assert counts.flops == 3 * 2 * TOKENS * own.numel()
    assert counts.largest_new == max(own.numel(), x.numel())
    with torch.no_grad(), Counts() as counts:
        linear_cross_entropy(
            x, own, targets, vocab_size=shape.vocab_size, reduction="sum", padded=True, vocabulary=part
        )
    assert counts.flops == 2 * TOKENS * own.numel()


def check_embedding(shape: GPT2Config, embedding: nn.Embedding, rows: slice) -> None:
    _, weight, _ = drawn(shape, torch.float32)
    ids = torch.arange(2 * shape.vocab_size).remainder(shape.vocab_size).view(2, -1)  # each id twice
    wanted = F.embedding(ids, weight)
    towards = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    wanted.backward(towards)
    with torch.no_grad():
        embedding.weight.copy_(weight[rows])
    found = embedding(ids)
    same("embedding", found, wanted, rtol=0)
    found.backward(towards)
    assert weight.grad is not None
    same("gradient of the embedding", embedding.weight.grad, weight.grad[rows], rtol=1e-6)


def check_watch(shape: GPT2Config, build: Callable[[Callable[..., None]], tuple[nn.Embedding, VocabularyPart]]) -> None:
    """The rank whose rows are not finite is the only one that notes it before it has received it."""
    from dsgpt.strategies.deepspeed.engine import Exchanges

    exchanges, guilty = Exchanges(torch.device("cpu")), dist.get_rank() == 1
    embedding, part = build(exchanges.give)
    x, _, targets = drawn(shape, torch.float32)
    with torch.no_grad():
        embedding.weight.fill_(1)
        embedding(targets.clamp(min=0))
        assert exchanges.first().isinf()
        value = float("nan") if guilty else 1.0
        linear_cross_entropy(
            x, embedding.weight * value, targets, vocab_size=shape.vocab_size, reduction="sum", vocabulary=part
        )
        assert exchanges.first().isfinite() == guilty
        exchanges.begin()
        embedding.weight.fill_(value)
        embedding(torch.arange(shape.vocab_size))
        assert exchanges.first().isfinite() == guilty


def shapes() -> Iterator[GPT2Config]:
    for size in VOCABULARIES:
        yield GPT2Config(n_layer=1, n_head=1, n_embd=WIDTH, block_size=8, vocab_size=size)


def main() -> None:
    """Compare; the argument is the name of the bug to plant."""
    from dsgpt.strategies.deepspeed.state import part_range
    from dsgpt.strategies.deepspeed.tensor_layers import VocabularyEmbedding, vocabulary_part

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module.CHUNKS["cpu"], module.CACHED = 7 * 43, 3 * 43
    group = dist.group.WORLD
    assert group is not None
    with planted(sys.argv[1]):
        for shape in shapes():

            def build(
                give: Callable[..., None], shape: GPT2Config = shape
            ) -> tuple[VocabularyEmbedding, VocabularyPart]:
                return VocabularyEmbedding(shape, group=lambda: group, give=give), vocabulary_part(shape, group, give)

            state = torch.get_rng_state()
            embedding, part = build(lambda *_: None)
            assert torch.get_rng_state().equal(state), "peers would draw other masks of dropout"
            rank, size = dist.get_rank(), dist.get_world_size()
            first, length = part_range(shape.padded_vocab_size, rank=rank, size=size)
            rows = slice(first, first + length)
            assert embedding.weight.tensor_model_parallel  # type: ignore[attr-defined]
            check_embedding(shape, embedding, rows)
            check_loss(shape, part, rows)
            check_no_target_counts(shape, part, rows)
            check_memory(shape, part, rows)
            if shape.vocab_size == VOCABULARIES[0]:
                check_watch(shape, build)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    exit_rank(0)
