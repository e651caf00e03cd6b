"""The compiled step gives the logits of the step without a compiler."""

import torch
from random_models import VOCABULARY

from dsgpt.inference.decoder import Decoder
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2
from dsgpt.model.initialization import initialize


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
