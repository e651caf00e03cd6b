"""The compiled step gives the logits of the step without a compiler, and is what ``--compile`` asks for."""

import pytest
import torch
from random_models import VOCABULARY
from test_generate import script

from dsgpt.common.errors import UserError
from dsgpt.inference import decoder as decoder_module
from dsgpt.inference.commands import GenerateRequest as Request
from dsgpt.inference.decoder import Decoder, _Step
from dsgpt.inference.sample import Writer, open_model
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2, initialize


@torch.inference_mode()
def test_logits_are_those_without_a_compiler():
    """Prompts of mixed length, so that padding matters, and two steps, so that the second reads the first one's keys.

    With weights in 8 bits, whose products the compiler replaces. In bf16 it rounds at other places.
    """
    model = GPT2(config := GPT2Config(n_layer=1, n_head=2, n_embd=32, block_size=24, vocab_size=VOCABULARY))
    initialize(model, config=config, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)
    model, found = model.to(torch.bfloat16).eval(), []
    for compiled in (False, True):
        decoder = Decoder(model, batch_size=2, quantize="int8", compiled=compiled)
        sequences = decoder.begin([[5, 9, 3, 77], [8]], new_tokens=3)
        sequences.read_prompts()
        found.append(torch.stack([sequences.append(torch.tensor(ids)) for ids in ([4, 60], [99, 1])]))
    assert (found[1] - found[0]).abs().max() < 0.03 * found[0].abs().max()
    assert (found[0][0] - found[0][1]).abs().max() > 0.5 * found[0].abs().max()


@pytest.fixture
def asked(monkeypatch) -> dict[str, list[str]]:
    """The quantization of every linear layer that is arranged, and of every step that would be compiled.

    The step itself stands for what the compiler makes of it, which takes half a minute.
    """
    found: dict[str, list[str]] = {"layers": [], "steps": []}
    arranged = decoder_module.fast_linear

    def noted(weight, bias, **options):
        found["layers"].append(options["quantize"])
        return arranged(weight, bias, **options)

    def uncompiled(model, *, quantize):
        step = _Step(model, quantize=quantize).eval().requires_grad_(False)

        def call(*inputs):
            found["steps"].append(quantize)
            return step(*inputs)

        return call

    monkeypatch.setattr(decoder_module, "fast_linear", noted)
    monkeypatch.setattr(decoder_module, "compiled_step", uncompiled)
    monkeypatch.setenv("CXX", "a compiler that nobody calls")
    return found


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_the_command_compiles_and_quantizes_when_it_is_told_to(checkpoint_with_tokenizer, asked, quantize):
    """Three new tokens: the prompt's pass and two steps."""
    words = ["--checkpoint", checkpoint_with_tokenizer, "--prompt", "ab", "--max_new_tokens", 3]
    words += ["--precision", "bf16", "--quantize", quantize]
    for flags, steps in (((), 0), (("--compile",), 2)):
        code, _, err = script(*words, *flags)
        assert (code, asked["steps"]) == (0, [quantize] * steps), err
        assert set(asked["layers"]) == {quantize}


def test_a_model_that_is_kept_in_memory_is_compiled_and_quantized_too(checkpoint_with_tokenizer, asked):
    kept = open_model(
        Request(checkpoint=checkpoint_with_tokenizer, precision="bf16", quantize="int8", compile=True, device="cpu")
    )
    assert kept.decoder.step is not None
    assert set(asked["layers"]) == {"int8"}


def test_what_the_flags_need_is_said(checkpoint_with_tokenizer, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    request = Request(checkpoint=checkpoint_with_tokenizer, quantize="int8", compile=True, device="cpu")
    with pytest.raises(UserError) as caught:
        Writer(request)
    assert list(caught.value.problems) == [
        "--quantize int8 is faster only in 16 bits: add --precision bf16",
        "--compile needs a C++ compiler: install g++, or leave it out",
    ]
