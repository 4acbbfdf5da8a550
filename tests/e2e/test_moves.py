"""Requests that move between two engines at random moments get what undisturbed ones get."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manylora_lab.bench.race import behind

from manylora import AsyncLLM, SamplingParams
from manylora.engine.client import EngineClient, GenerationRequest
from manylora.executor.sampling import SampledRow, _edited, _weights
from manylora.text.generate import TextOutput, TextStream, collect
from manylora.text.tokenizer import Tokenizer
from tests.e2e.process import MODEL
from tests.engine.moving import MovingEngines
from tests.parity.reference import Reference

ADAPTERS = {path.name: str(path) for path in sorted((Path(MODEL).parent / "adapters").iterdir())[:4]}
CLOSE = 2e-4
"""Logits so close may change places by rounding, and so may the first two of a draw's race."""
CLOSE_LOGPROBS = 1e-4
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "device_pool": "12MiB", "host_pool": "8MiB", "max_num_seqs": 6,
    "max_batch_tokens": 24,
}  # fmt: skip


def asked(rng: random.Random, number: int) -> GenerationRequest:
    params = SamplingParams(
        n=rng.choice((1, 1, 1, 2, 3)),
        max_tokens=rng.randint(2, 20),
        min_tokens=rng.choice((0, 0, 2)),
        temperature=rng.choice((0.0, 0.0, 0.9)),
        top_p=rng.choice((1.0, 0.9)),
        seed=rng.randrange(2**40),
        logprobs=rng.choice((None, 0, 2)),
        prompt_logprobs=rng.choice((None, None, 0, 2)),
        ignore_eos=rng.random() < 0.7,
        presence_penalty=rng.choice((0.0, 0.0, 0.7)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.4)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
    )
    prompt = tuple(rng.randrange(10, 250) for _ in range(rng.randint(1, 60)))
    adapter = rng.choice((None, *ADAPTERS))
    return GenerationRequest(f"r{number}", prompt, params, adapter, stream=rng.random() < 0.7)


def with_stop(rng: random.Random, request: GenerationRequest, outputs: list[TextOutput]) -> GenerationRequest:
    """Some requests stop at what they would have said, across tokens."""
    text = outputs[0].text
    if len(text) < 4 or rng.random() < 0.5:
        return request
    first = rng.randrange(len(text) - 3)
    params = dataclasses.replace(request.params, stop=(text[first : first + 3],))
    return dataclasses.replace(request, params=params)


async def answers(
    client: EngineClient, tokenizer: Tokenizer | None, requests: list[GenerationRequest]
) -> list[list[TextOutput]]:
    """All of them at once."""
    streams = [TextStream(client, tokenizer, request) for request in requests]
    return await asyncio.gather(
        *(collect(stream, request.params.n) for stream, request in zip(streams, requests))
    )


def parting(moved: TextOutput, alone: TextOutput) -> int | None:
    """The first position at which tokens differ."""
    pairs = zip(moved.token_ids, alone.token_ids)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), None)


class Judge:
    """Whether a parting of two answers is rounding, by the logits of transformers and PEFT."""

    def __init__(self, stop_ids: tuple[int, ...]) -> None:
        self._stop_ids = stop_ids
        self._reference: Reference | None = None

    def is_rounding(
        self, request: GenerationRequest, sample: int, known: list[int], one: int, other: int
    ) -> bool:
        """Of the tokens that follow those that are known: their logits are as good as equal, or they come first in
        the draw's race as good as together."""
        if self._reference is None:
            self._reference = Reference(Path(MODEL), {name: Path(path) for name, path in ADAPTERS.items()})
        logits = self._reference.next_logits([*request.prompt, *known], request.adapter)[None]
        stop_ids = () if request.params.ignore_eos else self._stop_ids
        row = SampledRow(
            request.params, np.array(request.prompt), np.array(known), stop_ids, ((sample, len(known)),)
        )
        edited = _edited(logits, [row], None)
        if not request.params.temperature:
            return bool(abs(edited[0, one] - edited[0, other]) < CLOSE)
        weights = _weights(edited, [request.params])[0].double().numpy()
        lost = behind(weights, request.params.seed or 0, sample, len(known))
        return bool(max(lost[one], lost[other]) < CLOSE)


def compare_prompts(request: GenerationRequest, ours: list[TextOutput], theirs: list[TextOutput]) -> None:
    """Of each prompt token the same log-probability, whatever replica computed it, where it was asked for."""
    is_asked = request.params.prompt_logprobs is not None
    found = []
    for outputs in (ours, theirs):
        told = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
        assert len(told) == is_asked, request
        found += [[entry.logprob for entry, _ in each.entries(request.prompt[1:])] for each in told]
    if is_asked:
        assert len(found[0]) == len(request.prompt) - 1
        assert found[0] == pytest.approx(found[1], abs=CLOSE_LOGPROBS)


@pytest.mark.parametrize("least_moves", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_a_request_that_moves_is_answered_as_if_it_had_not(least_moves: int) -> None:
    async def scenario() -> None:
        rng = random.Random(least_moves)
        num_requests = num_seeded = num_parted = 0
        engines = AsyncLLM(MODEL, ADAPTERS, **SETTINGS), AsyncLLM(MODEL, ADAPTERS, **SETTINGS)
        async with engines[0] as first, engines[1] as other:
            here, there = first._connected(), other._connected()
            judge = Judge(here.info.eos_ids)
            moving = MovingEngines([here, there], seed=least_moves, most_moves=3)
            while moving.moves.total() < least_moves or len(moving.moves) < 3:
                requests = [asked(rng, num_requests + number) for number in range(16)]
                num_requests += len(requests)
                found = await answers(here, first.tokenizer, requests)
                requests = [with_stop(rng, each, outputs) for each, outputs in zip(requests, found)]
                undisturbed = await answers(here, first.tokenizer, requests)
                moved = await answers(moving.as_client(), first.tokenizer, requests)
                for request, ours, theirs in zip(requests, moved, undisturbed):
                    compare_prompts(request, ours, theirs)
                    for got, alone in zip(ours, theirs):
                        num_seeded += request.params.temperature > 0
                        place = parting(got, alone)
                        if place is not None:
                            known, ends = (
                                alone.token_ids[:place],
                                (got.token_ids[place], alone.token_ids[place]),
                            )
                            assert judge.is_rounding(request, got.index, known, *ends), (request, known, ends)
                            num_parted += request.params.temperature > 0
                            continue
                        assert (got.token_ids, got.text) == (alone.token_ids, alone.text)
                        assert got.finish_reason == alone.finish_reason, request
                        assert got.stop_reason == alone.stop_reason
                        assert len(got.logprobs) == len(alone.logprobs)
                        for one, two in zip(got.logprobs, alone.logprobs):
                            assert one.logprob == pytest.approx(two.logprob, abs=CLOSE_LOGPROBS)
            assert num_parted <= max(1, num_seeded / 1000)
            assert set(moving.moves) == {"no token", "some tokens", "last token"}, moving.moves
            for engine in (here, there):
                while (stats := await engine.stats()).num_running + stats.num_waiting + stats.pages_running:
                    await asyncio.sleep(0.05)  # a step may be in flight
            print(moving.moves, num_requests, num_seeded, num_parted)

    asyncio.run(scenario())
