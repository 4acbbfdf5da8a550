"""Whether two answers to one request differ by rounding alone.

What runs in the same steps changes last digits, and a draw, or two logits, may lie that close to a boundary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from manylora import LLM, SamplingParams
from manylora.executor.sampler import SampledRow, _edited, _weights, uniform
from manylora.text.tokenizer import Tokenizer
from tests.cluster.process import ADAPTERS, Answer, Json
from tests.e2e.process import BASE, MODEL
from tests.parity.reference import Reference

CLOSE_LOGITS = 2e-4
AT_BOUNDARY = 1e-5


class Rounding:
    """Asks the model itself where answers part; loads it when that is first needed."""

    def __init__(self) -> None:
        self._loaded: tuple[Tokenizer, Reference] | None = None

    def assert_same(self, bodies: Sequence[Json], before: Sequence[Answer], after: Sequence[Answer]) -> int:
        """Answers are equal, but for partings by rounding; how many of these there are."""
        num_parted = 0
        for number, (body, one, other) in enumerate(zip(bodies, before, after, strict=True)):
            if one.content == other.content:
                assert other.logprobs == pytest.approx(one.logprobs, abs=1e-3), number
                continue
            assert other.error is None, (number, other.error)
            assert other.choices.keys() == one.choices.keys(), number
            for index, choice in one.choices.items():
                texts = choice["text"], other.choices[index]["text"]
                if texts[0] != texts[1]:
                    assert self._part_by_rounding(body, index, *texts), (number, body, index, texts)
                    num_parted += 1
        assert num_parted <= max(2, len(bodies) // 50), num_parted
        return num_parted

    def _part_by_rounding(self, body: Json, index: int, one: str, other: str) -> bool:
        if self._loaded is None:
            adapters = {folder.name: folder for folder in ADAPTERS.iterdir()}
            self._loaded = Tokenizer.from_folder(MODEL), Reference(Path(MODEL), adapters)
        tokenizer, _ = self._loaded
        adapter = None if body["model"] == BASE else body["model"]
        params = SamplingParams(
            n=body.get("n", 1), max_tokens=body["max_tokens"], temperature=body["temperature"],
            seed=body["seed"], ignore_eos=body.get("ignore_eos", False),
        )  # fmt: skip
        named = {} if adapter is None else {adapter: str(ADAPTERS / adapter)}
        with LLM(MODEL, named, device="cpu", dtype="float32", device_pool="48MiB", host_pool="8MiB") as llm:
            (output,) = llm.generate([body["prompt"]], params, [adapter])
            stop_ids = () if params.ignore_eos else tuple(llm.info.eos_ids)
        tokens = list(output.outputs[index].token_ids)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))
        ends = (len(tokenizer.decode(tokens[: place + 1])) for place in range(len(tokens)))
        parting = next((place for place, end in enumerate(ends) if end > common), len(tokens) - 1)
        prompt = list(output.prompt_token_ids)
        # A character may be of several tokens.
        return any(
            self._is_close(prompt, tokens[:place], tokens[place], index, params, adapter, stop_ids)
            for place in range(max(0, parting - 3), min(parting + 2, len(tokens)))
        )

    def _is_close(
        self,
        prompt: list[int],
        known: list[int],
        token: int,
        sample: int,
        params: SamplingParams,
        adapter: str | None,
        stop_ids: tuple[int, ...],
    ) -> bool:
        assert self._loaded is not None
        logits = self._loaded[1].next_logits([*prompt, *known], adapter)[None]
        row = SampledRow(params, np.array(prompt), np.array(known), stop_ids, ((sample, len(known)),))
        edited = _edited(logits, [row], None)
        if not params.temperature:
            best = edited[0].topk(2).values
            return bool(best[0] - best[1] < CLOSE_LOGITS)
        sums = _weights(edited, [params])[0].double().cumsum(0)
        sums = sums / sums[-1]
        point = uniform(params.seed or 0, sample, len(known))
        lower = float(sums[token - 1]) if token else 0.0
        return min(abs(point - lower), abs(point - float(sums[token]))) < AT_BOUNDARY
