"""How the global batch is split, and what of its gradients is rounded: all that a low-precision training depends on.

In fp32 no split shows in five digits. In bf16 every product is rounded to 8 binary digits, and otherwise for another
split, so that a reference with another split cannot be compared closely. One with the same split can.
"""

from dataclasses import dataclass

ACCUMULATED, EVERY = "accumulated", "every micro batch"


@dataclass(frozen=True, kw_only=True, order=True)
class Split:
    """Of one training; the reference does in one process what this says."""

    data_ranks: int = 1
    """Each takes an equal, contiguous part of the global batch."""
    accumulation: int = 1
    """Micro batches, equal and contiguous parts of a data rank's share."""
    low: str = ""
    """Where gradients are rounded to the low precision between ranks: ``accumulated`` sums once per step, those of
    ``every micro batch``, or nowhere: gradients are fp32 from the end of a micro batch's backward pass on."""

    def simplest(self) -> "Split":
        """The one among those that compute the same which needs no further reference."""
        low = self.low
        if self.accumulation == 1 and low == EVERY:
            low = ACCUMULATED  # a single micro batch is what is accumulated
        if self.data_ranks == 1 and (self.accumulation == 1 or low == EVERY):
            low = ""  # it is in the low precision already
        return Split(data_ranks=self.data_ranks, accumulation=self.accumulation, low=low)
