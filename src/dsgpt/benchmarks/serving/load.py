"""Clients that ask a server for completions: at random instants, and again when it refuses them."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2

TIMEOUT_SEC = 300
MOST_ATTEMPTS = 200


@dataclass(frozen=True, kw_only=True)
class Served:
    """What became of one request."""

    prompt: int
    """Index of its prompt."""
    answers: int
    """Answers that it got: 1, unless something is wrong."""
    name: str
    """The server's name of the answer."""
    text: str
    refusals: int
    """How often it was refused with 429."""
    accepted_sec: float
    """From the attempt that was accepted to its answer."""
    whole_sec: float
    """From the first attempt to the answer."""


class Load:
    """Requests to one server.

    Args:
        url: of the server.
        model: its name in requests.
        prompts: request i asks for a completion of the prompt ``i % len(prompts)``.
        max_tokens: of a completion.
        seed: draws arrivals, and how much longer than asked a refused client waits.
    """

    def __init__(self, url: str, model: str, prompts: Sequence[str], *, max_tokens: int, seed: int) -> None:
        self._url, self._prompts, self._random = url, prompts, random.Random(seed)
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": 0}

    def steady(self, requests: int, *, clients: int) -> tuple[list[Served], float]:
        """``clients`` at a time, each as soon as an earlier one is answered; also returns the seconds of all."""
        return asyncio.run(self._all([0.0] * requests, clients=clients))

    def poisson(self, requests: int, *, per_sec: float) -> tuple[list[Served], float]:
        """Requests that arrive at random, ``per_sec`` in the mean; also returns the seconds until all are answered."""
        instants, now = [], 0.0
        for _ in range(requests):
            now += self._random.expovariate(per_sec)
            instants.append(now)
        return asyncio.run(self._all(instants, clients=requests))

    async def _all(self, instants: Sequence[float], *, clients: int) -> tuple[list[Served], float]:
        places, started = asyncio.Semaphore(clients), time.perf_counter()
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=100)
        async with httpx2.AsyncClient(base_url=self._url, timeout=TIMEOUT_SEC, limits=limits) as client:

            async def one(number: int, instant: float) -> Served:
                await asyncio.sleep(instant)
                async with places:
                    return await self._until_answered(client, number)

            served = await asyncio.gather(*(one(number, instant) for number, instant in enumerate(instants)))
        return list(served), time.perf_counter() - started

    async def _until_answered(self, client: httpx2.AsyncClient, number: int) -> Served:
        """Ask, and as often as the server refuses, wait as long as it says and ask again.

        Raises:
            RuntimeError: the server answered with an error, or refused very often.
        """
        prompt, begun = number % len(self._prompts), time.perf_counter()
        body = {**self._body, "prompt": self._prompts[prompt]}
        for refusals in range(MOST_ATTEMPTS):
            asked = time.perf_counter()
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code == 429:
                await asyncio.sleep(float(answer.headers["retry-after"]) * self._random.uniform(1, 2))
                continue
            if answer.status_code != 200:
                raise RuntimeError(f"the server answered {answer.status_code}: {answer.text[:300]}")
            ended, found = time.perf_counter(), answer.json()
            return Served(
                prompt=prompt,
                answers=len(found["choices"]),
                name=found["id"],
                text=found["choices"][0]["text"],
                refusals=refusals,
                accepted_sec=ended - asked,
                whole_sec=ended - begun,
            )
        raise RuntimeError(f"a request was refused {MOST_ATTEMPTS} times")
