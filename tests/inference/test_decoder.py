"""The decoding engine gives what the model's whole forward pass gives, and the ids that transformers generates."""

from pathlib import Path

import pytest
import torch
from random_models import VOCABULARY, random_model, random_prompts, save_published

from dsgpt.common.errors import UserError
from dsgpt.inference import decoder as linear
from dsgpt.inference.commands import Sampling
from dsgpt.inference.decoder import Decoder, Packed, Plain, Transposed
from dsgpt.inference.generation import generate, generate_batch, random_stream
from dsgpt.machine.device import HugePages, packs
from dsgpt.model.gpt2 import GPT2

MODEL = random_model()
PROMPT = [5, 100, 0, 17, 42]


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("prompt_length", [1, 5, 23, 24])
def test_cached_logits_are_those_of_the_whole_pass(prompt_length, rows):
    """With the plain layers and with those that are packed for several rows."""
    ids = torch.randint(0, VOCABULARY, (rows, 24), generator=torch.Generator().manual_seed(2))
    whole = MODEL(ids)[:, prompt_length - 1 :]
    sequences = Decoder(MODEL, batch_size=rows).begin(ids[:, :prompt_length].tolist(), new_tokens=24 - prompt_length)
    found = [sequences.read_prompts(), *(sequences.append(ids[:, at]) for at in range(prompt_length, 24))]
    assert sequences.length == 24
    torch.testing.assert_close(torch.stack(found, dim=1), whole, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_padding_changes_no_logits():
    """Prompts of 1 to 9 ids together: each row is that of the whole pass over its own ids."""
    prompts = [[7] * length for length in (9, 1, 4)]
    sequences = Decoder(MODEL, batch_size=3).begin(prompts, new_tokens=3)
    rows = [sequences.read_prompts()]
    for following in (11, 12):
        rows.append(sequences.append(torch.full((3,), following)))
    for row, prompt in enumerate(prompts):
        whole = MODEL(torch.tensor([[*prompt, 11, 12]]))[0, len(prompt) - 1 :]
        torch.testing.assert_close(torch.stack([logits[row] for logits in rows]), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_nan_draw_nothing(temperature, penalty):
    model = random_model()
    torch.nn.init.constant_(model.ln_f.weight, 3e38)  # finite, but a product with it is not
    sampling = Sampling(temperature=temperature, repetition_penalty=penalty)
    with pytest.raises(UserError, match="the model's logits are NaN"):
        list(
            generate_batch(Decoder(model), [PROMPT], new_tokens=2, sampling=sampling, generators=[random_stream(1, 0)])
        )


@torch.inference_mode()
def uncached_greedy(model: GPT2, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(new_tokens):
        ids = torch.cat([ids, model(ids)[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("prompt_length", "new_tokens"), [(1, 23), (5, 19), (5, 1), (23, 1)])
def test_greedy_ids_are_those_without_a_cache(prompt_length, new_tokens):
    prompt = [place * 7 % VOCABULARY for place in range(prompt_length)]
    found = list(generate(Decoder(MODEL), prompt, new_tokens=new_tokens))
    assert found == uncached_greedy(MODEL, prompt, new_tokens)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_published(random_model(64), tmp_path_factory.mktemp("published") / "model")


def batched(decoder: Decoder, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    return [list(ids) for ids in zip(*generate_batch(decoder, prompts, new_tokens=new_tokens), strict=True)]


def test_greedy_ids_are_those_of_transformers(published):
    """20 prompts of 1 to 40 ids, fp32, alone and in one batch."""
    from transformers import GPT2LMHeadModel

    peer = GPT2LMHeadModel.from_pretrained(published).eval()
    model, prompts = random_model(64), random_prompts(20, longest=40)
    alone, together = Decoder(model), Decoder(model, batch_size=20)
    found = batched(together, prompts, 20)
    for prompt, ids in zip(prompts, found, strict=True):
        theirs = peer.generate(
            torch.tensor([prompt]), attention_mask=torch.ones((1, len(prompt)), dtype=torch.long), max_new_tokens=20,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert list(generate(alone, prompt, new_tokens=20)) == theirs
        assert ids == theirs
    assert len({tuple(ids) for ids in found}) > 10


@pytest.mark.parametrize("instructions", ["of this CPU", "none"])
def test_low_precision_is_that_of_transformers(published, monkeypatch, instructions):
    """In bf16 both round at other places: logits agree as far as they agree with fp32.

    Without instructions for bf16, the prompts are many rows, which are multiplied in fp32.
    """
    from transformers import GPT2LMHeadModel

    if instructions == "none":
        for question in ("multiplies", "packs"):
            monkeypatch.setattr(linear, question, lambda dtype: dtype == torch.float32)
    peer = GPT2LMHeadModel.from_pretrained(published, dtype=torch.bfloat16).eval()
    ids = torch.tensor([PROMPT * 2, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])
    sequences = Decoder(random_model(64).to(torch.bfloat16), batch_size=2).begin(ids.tolist(), new_tokens=1)
    with torch.inference_mode():
        ours, theirs, exact = sequences.read_prompts(), peer(ids).logits[:, -1].float(), random_model(64)(ids)[:, -1]
    rounding = (theirs - exact).abs().max()
    assert (ours - exact).abs().max() < 2 * rounding
    assert rounding < 0.02 * exact.abs().max()


def test_a_long_sequence_may_reach_the_end_before_the_others():
    """The others continue as alone: padding takes no positions of the model."""
    long, short = [7] * 22, [5, 3]
    found = batched(Decoder(MODEL, batch_size=2), [long, short], 12)
    assert found[0][:2] == uncached_greedy(MODEL, long, 2)
    assert found[1] == uncached_greedy(MODEL, short, 12)


@pytest.mark.parametrize(("prompt", "new_tokens"), [([], 1), (PROMPT, 20), ([1] * 25, 1)])
def test_more_tokens_than_positions_are_refused(prompt, new_tokens):
    with pytest.raises(ValueError, match="do not fit into 24 positions"):
        list(generate(Decoder(MODEL), prompt, new_tokens=new_tokens))


BF16 = Packed if packs(torch.bfloat16) else Plain


@pytest.mark.parametrize(
    ("mkl", "onednn", "kinds"),
    [
        (True, {torch.float32}, [Transposed, Packed, Plain, Plain]),  # x86 without AVX512
        (True, {torch.float32, torch.bfloat16}, [Transposed, Packed, Packed, Plain]),
        (False, set(), [Plain, Plain, Plain, Plain]),  # ARM
        (None, None, [Transposed, Packed, BF16, Plain]),  # this CPU, with PyTorch as it is installed
    ],
)
def test_layers_are_packed_where_that_works_and_is_faster(monkeypatch, mkl, onednn, kinds):
    """Answers of other CPUs are pretended; layers are then chosen, but not arranged."""
    if onednn is not None:
        monkeypatch.setattr(torch._C, "has_mkl", mkl)
        monkeypatch.setattr(linear, "packs", lambda dtype: dtype in onednn)
        monkeypatch.setattr(Packed, "__init__", lambda self, *_, **__: None)
    weight, memory = torch.randn(8, 4), HugePages()
    cases = [(weight, 1), (weight, 2), (weight.bfloat16(), 1), (weight.double(), 2)]
    assert [type(linear.fast_linear(each, None, rows=rows, memory=memory)) for each, rows in cases] == kinds
