"""Engines on a checkpoint with a pool counted in pages, and requests with the tokens they must give."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

from manylora import LLM, SamplingParams
from manylora.outputs import RequestOutput
from tests.internal import internal_async_llm, internal_llm
from tests.parity.checkpoints import Checkpoint
from tests.parity.reference import Reference, assert_greedy

PLENTY_OF_PAGES = 2000


@dataclasses.dataclass(frozen=True)
class Bench:
    """A checkpoint and its reference."""

    checkpoint: Checkpoint
    reference: Reference

    @property
    def names(self) -> list[str | None]:
        """The base and every adapter."""
        return [None, *self.checkpoint.adapters]

    @contextlib.contextmanager
    def llm(self, adapters: Sequence[str] | None = None, **settings: Any) -> Iterator[LLM]:
        """``num_pages``: the pool; the rest as LLM takes it."""
        with internal_llm(
            str(self.checkpoint.folder), self._paths(adapters), **self._settings(**settings)
        ) as llm:
            yield llm

    @contextlib.asynccontextmanager
    async def async_llm(self, adapters: Sequence[str] | None = None, **settings: Any) -> Any:
        """The same for asyncio."""
        model, paths = str(self.checkpoint.folder), self._paths(adapters)
        async with internal_async_llm(model, paths, **self._settings(**settings)) as llm:
            yield llm

    def _paths(self, adapters: Sequence[str] | None) -> dict[str, str]:
        wanted = self.checkpoint.adapters if adapters is None else adapters
        return {name: str(self.checkpoint.adapters[name]) for name in wanted}

    def _settings(
        self, num_pages: int = PLENTY_OF_PAGES, page_tokens: int = 4, **settings: Any
    ) -> dict[str, Any]:
        pool = num_pages * page_tokens * self.checkpoint.token_bytes
        fixed = {"device": "cpu", "dtype": "float32", "page_tokens": page_tokens, "device_pool": pool}
        return fixed | settings

    def adapter_pages(self, page_tokens: int) -> dict[str, int]:
        """Pages that each adapter takes."""
        with self.llm(page_tokens=page_tokens) as llm:
            return {card.name: card.num_pages for card in llm.adapters()}

    def check(self, outputs: Sequence[RequestOutput], num_tokens: int) -> None:
        """Every sample of every output is the reference's greedy answer, as long as asked."""
        for output in outputs:
            for sample in output.outputs:
                assert len(sample.token_ids) == num_tokens
                assert sample.finish_reason == "length"
                assert_greedy(self.reference, output.prompt_token_ids, output.adapter, sample.token_ids)


def greedy(num_tokens: int, **fields: Any) -> SamplingParams:
    """Exactly so many tokens, each the most probable."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **fields)


def random_tokens(seed: int, length: int, vocab_size: int) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=length)
