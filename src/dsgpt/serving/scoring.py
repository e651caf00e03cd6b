"""Log probabilities of tokens, from one forward pass over a finished sequence."""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from dsgpt.serving.errors import NOT_FINITE, ApiError
from dsgpt.serving.twins import twin_of

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

CHUNK = 64
"""Positions whose logits are held at a time."""


class Scorer:
    """Scores sequences with the model.

    Args:
        model: in evaluation mode.
    """

    def __init__(self, model: "GPT2LMHeadModel") -> None:
        self._model = twin_of(model)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scores")
        """Where ``score`` is called, so that sequences that wait for it keep no other thread."""

    def score(self, ids: list[int], *, first: int, top: int) -> list[tuple[float, list[tuple[int, float]]]]:
        """The natural log probability of each token from ``first`` on, given those before it, and the likeliest ones.

        Args:
            ids: the sequence.
            first: index of the first token to score; at least 1.
            top: how many of the likeliest tokens to name at each position.

        Returns:
            For each token, its log probability, and pairs of id and log probability, the likeliest first.

        Raises:
            ApiError: the model's logits are not finite.
        """
        scores: list[tuple[float, list[tuple[int, float]]]] = []
        if first >= len(ids):
            return scores
        with torch.inference_mode():
            tokens = torch.tensor([ids], device=self._model.device)
            hidden = self._model.transformer(tokens[:, :-1], use_cache=False).last_hidden_state[
                0, first - 1 :
            ]  # (n, C)
            for start in range(0, len(hidden), CHUNK):
                logs = self._model.lm_head(hidden[start : start + CHUNK]).float().log_softmax(dim=-1)  # (chunk, V)
                chosen = tokens[0, first + start : first + start + len(logs), None]
                if not logs.gather(1, chosen).isfinite().all():  # JSON has no such numbers
                    raise ApiError(500, f"the model failed to answer ({NOT_FINITE})", code="engine_failed")
                best = logs.topk(max(top, 1), dim=-1)
                for own, values, indices in zip(
                    logs.gather(1, chosen)[:, 0].tolist(), best.values.tolist(), best.indices.tolist(), strict=True
                ):
                    scores.append((own, list(zip(indices, values, strict=True))[:top]))
        return scores
