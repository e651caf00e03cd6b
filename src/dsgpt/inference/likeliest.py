"""Which ids are likeliest to follow a text, as the model says and as sampling draws them."""

from collections.abc import Sequence
from dataclasses import dataclass

from dsgpt.inference.decoder import Decoder
from dsgpt.inference.sampling import Chooser, Sampling


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An id that may follow."""

    id: int
    probability: float
    """The model's: softmax of its logits."""
    drawn: float
    """The probability with which it is drawn; 0 if sampling leaves it out."""


def likeliest(decoder: Decoder, ids: Sequence[int], *, count: int, sampling: Sampling) -> list[Candidate]:
    """The ``count`` ids that the model finds likeliest after ``ids``, the likeliest first.

    Raises:
        ValueError: there are no ``ids``, or they leave no position for one more.
    """
    logits = decoder.begin([ids], new_tokens=1).read_prompts()  # (1, V)
    chooser = Chooser(
        sampling, prompts=[ids], generators=(), vocab_size=decoder.config.vocab_size, device=logits.device
    )
    found, drawn = logits.softmax(dim=1)[0], chooser.distribution(logits)[0]  # (V,)
    chosen = found.topk(min(count, len(found)))
    return [
        Candidate(id=int(each), probability=float(value), drawn=float(drawn[each]))
        for each, value in zip(chosen.indices.tolist(), chosen.values.tolist(), strict=True)
    ]
