"""Builds step batches by hand and runs a decoder over them, for tests that compare whole models.

Knows pages and slots as the executor would, but decides nothing: each sequence gets scattered pages at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from manylora.kernels.ops import AttentionRows, StepBatch
from manylora.models.decoder import Decoder


class Stepper:
    """A decoder with a pool of its own; sequences are named and grow step by step."""

    def __init__(
        self, decoder: Decoder, page_tokens: int = 4, pages_each: int = 8, sequences: int = 3
    ) -> None:
        self.decoder = decoder
        self.page = decoder.config.page_shape(page_tokens, itemsize=4)
        num_pages = 1 + pages_each * sequences
        shape = (num_pages, self.page.layers, 2, page_tokens, self.page.kv_heads, self.page.head_dim)
        # Stale values that are finite and large: whatever reads them by mistake is seen in the logits.
        self.pool = torch.full(shape, 1e4)
        order = np.random.default_rng(0).permutation(np.arange(1, num_pages))
        self._free = [list(part) for part in order.reshape(sequences, pages_each)]
        self._pages: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(self, work: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """Run the given next tokens of each sequence; float32 logits ``[tokens, vocab]`` of each."""
        batch = self.batch(work)
        with torch.inference_mode():
            logits = self.decoder.forward(batch, self.pool)
        assert logits.dtype == torch.float32
        return dict(zip(work, torch.split(logits, [len(tokens) for tokens in work.values()]), strict=True))

    def batch(self, work: Mapping[str, Sequence[int]]) -> StepBatch:
        """The batch of those tokens, logits wanted for all; the sequences count as advanced."""
        positions: list[int] = []
        slots: list[int] = []
        kv_len = []
        page_tokens = self.page.page_tokens
        for name, tokens in work.items():
            pages = self._pages.setdefault(name, []) or self._free.pop()
            self._pages[name] = pages
            start = self._lengths.get(name, 0)
            end = self._lengths[name] = start + len(tokens)
            positions += range(start, end)
            slots += [pages[p // page_tokens] * page_tokens + p % page_tokens for p in range(start, end)]
            kv_len.append(end)
        table = [self._pages[name][: -(-n // page_tokens)] for name, n in zip(work, kv_len, strict=True)]
        width = max(len(row) for row in table)
        rows = AttentionRows(
            query_start=np.cumsum([0] + [len(tokens) for tokens in work.values()]).astype(np.int32),
            kv_len=np.array(kv_len, np.int32),
            page_table=np.array([row + [0] * (width - len(row)) for row in table], np.int32),
        )
        flat = [token for tokens in work.values() for token in tokens]
        return StepBatch(
            token_ids=torch.tensor(flat),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            sample_index=torch.arange(len(flat)),
            attention=self.decoder.ops.plan_attention(rows, self.page, torch.device("cpu")),
            lora=None,
        )
