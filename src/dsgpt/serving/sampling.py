"""Draws the next token of every sequence of a batch, each by the settings of its request.

transformers' own processors have no seeds and no ``min_p`` per request, and one row of logits that is not finite makes
``torch.multinomial`` end the thread with all requests.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

BITS = 32
"""Of a random number. A double holds it times a sum of probabilities, and stays below that sum."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a sequence chooses its tokens."""

    temperature: float | None = None
    """Above 0; None for the likeliest token always."""
    top_k: int = 0
    """How many of the likeliest tokens to draw from; 0 for all."""
    top_p: float = 1.0
    """Share of the probability of those to draw from, above 0."""
    min_p: float = 0.0
    """The least probability of a token to draw, as a share of that of the likeliest."""
    seed: str | None = None
    """Sequences of one seed draw the same numbers; None for numbers that nobody can repeat."""

    @property
    def sorts(self) -> bool:
        """Whether tokens must be sorted by their probability."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def number(self, position: int) -> float:
        """The random number for the token at ``position`` of the sequence, in [0, 1)."""
        source = _RANDOM if self.seed is None else random.Random(f"{self.seed}/{position}")
        return source.getrandbits(BITS) / (1 << BITS)


_RANDOM = random.Random()


class Sampler:
    """Takes the place of a manager's ``ContinuousBatchingLogitsProcessorList``.

    The manager takes the largest score of a row as the next token; the sampler makes that the token that it drew.

    Args:
        fail: is called with the name of a sequence whose logits are not finite.
    """

    tensors_required, do_processing = 0, True

    def __init__(self, fail: Callable[[str], None]) -> None:
        self._fail = fail
        self._states: list[RequestState] = []

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Nothing to check: the engine gives each request one ``Sampling``."""

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Nothing to fill: no setting is kept in tensors."""

    def prepare_tensor_args(
        self, requests_in_batch: "list[FutureRequestState]", arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Note which sequence each row of the next scores is of."""
        self._states = [request.state for request in requests_in_batch if request.has_new_token]
        return arg_storage

    def __call__(
        self,
        input_ids: torch.Tensor,  # noqa: ARG002 - the manager gives three arguments
        scores: torch.Tensor,
        logits_processor_args: torch.Tensor,  # noqa: ARG002
    ) -> torch.Tensor:
        """Draw a token for each row of ``scores`` (sequences, vocabulary), and return scores with it as the largest."""
        rows: dict[bool, list[int]] = {False: [], True: []}
        finite = scores.amax(dim=-1).isfinite().tolist()  # NaN, too, is its row's largest
        for row, state in enumerate(self._states):
            sampling: Sampling = state.logit_processor_kwargs["sampling"]
            if not finite[row]:
                self._fail(state.request_id)
            elif sampling.temperature is not None:
                rows[sampling.sorts].append(row)
        for sorts, drawn in rows.items():  # whether one sequence is sorted does not change what another one draws
            if drawn:
                scores[drawn, self._draw(scores[drawn], drawn, sorts=sorts)] = torch.inf
        return scores

    def _draw(self, scores: torch.Tensor, rows: list[int], *, sorts: bool) -> torch.Tensor:
        """The ids of one drawn token for each row of ``scores`` (R, V)."""
        states = [self._states[row] for row in rows]
        settings: list[Sampling] = [state.logit_processor_kwargs["sampling"] for state in states]

        def column(values: list[Any]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64, device=scores.device)[:, None]  # (R, 1)

        logits = scores - scores.amax(dim=-1, keepdim=True)  # at most 0: no temperature makes one overflow
        logits = logits / column([one.temperature for one in settings])
        ids = None
        if sorts:
            logits, ids = logits.sort(dim=-1, descending=True, stable=True)
        shares = logits.softmax(dim=-1)  # (R, V)
        if sorts:
            vocabulary = scores.shape[-1]
            places = torch.arange(vocabulary, device=scores.device)
            shares = shares.where(places < column([one.top_k or vocabulary for one in settings]), 0)
            likelier = shares.cumsum(dim=-1) - shares
            shares = shares.where(likelier < column([one.top_p for one in settings]) * shares.sum(-1, keepdim=True), 0)
            shares = shares.where(shares >= column([one.min_p for one in settings]) * shares[:, :1], 0)
        sums = shares.cumsum(dim=-1)
        lengths = [len(state.initial_tokens) + len(state.generated_tokens) for state in states]
        numbers = [one.number(length) for one, length in zip(settings, lengths, strict=True)]
        chosen = torch.searchsorted(sums, column(numbers) * sums[:, -1:], right=True)  # (R, 1)
        return (chosen if ids is None else ids.gather(1, chosen))[:, 0]
