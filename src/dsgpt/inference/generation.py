"""Ids in, ids out: decodes batches, greedily or by sampling."""

from collections.abc import Iterator, Sequence

import torch

from dsgpt.common.errors import UserError
from dsgpt.inference.decoder import Decoder
from dsgpt.inference.sampling import Chooser, Sampling

GREEDY = Sampling()


def generate_batch(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    sampling: Sampling = GREEDY,
    generators: Sequence[torch.Generator] = (),
) -> Iterator[list[int]]:
    """Yield the next id of every sequence, ``new_tokens`` times.

    Args:
        decoder: the model.
        prompts: the ids that each sequence starts with, at least one each.
        new_tokens: ids to generate; with the longest prompt they must fit the model's positions.
        sampling: how ids are chosen.
        generators: a random stream for each prompt, on the CPU; only needed above temperature 0.

    Raises:
        ValueError: prompts and new ids do not fit the model's positions.
        UserError: no id can be drawn, because logits are not finite.
    """
    sequences = decoder.begin(prompts, new_tokens=new_tokens)
    chooser = Chooser(
        sampling,
        prompts=prompts,
        generators=generators,
        vocab_size=decoder.config.vocab_size,
        device=decoder.embedding.device,
    )
    logits = sequences.read_prompts()
    for left in reversed(range(new_tokens)):
        ids = chooser.choose(logits)
        found = ids.tolist()  # waits for the device
        if max(found) >= decoder.config.vocab_size:
            raise UserError("the model's logits are NaN or infinite, though its weights are finite: it is unusable")
        yield found
        if left:
            logits = sequences.append(ids)


def generate(decoder: Decoder, prompt: Sequence[int], *, new_tokens: int) -> Iterator[int]:
    """Yield the ``new_tokens`` likeliest ids after ``prompt``, one at a time.

    Raises:
        ValueError: they do not fit the model's positions.
    """
    for (following,) in generate_batch(decoder, [prompt], new_tokens=new_tokens):
        yield following
