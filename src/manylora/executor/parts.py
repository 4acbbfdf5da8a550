"""Cuts a step of a small model into parts, which the threads of a CPU compute side by side.

Torch splits every operation among threads instead. That pays for large matrices. An operation of a model whose
weights fit into the cache takes some ten microseconds, and splitting each of them costs more than it gains.
Rows of a step are independent of each other: none reads what another writes. Knows nothing of models.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import torch

from manylora.executor.batch import Layout, StepInputs
from manylora.kernels.ops import AttentionRows

SMALL_MODEL_BYTES = 48 * 2**20
"""Every thread reads weights of up to this size from its cache; larger weights must be read once."""

MIN_ROWS = 4
"""The fewest rows for which it pays to wake a thread."""

MAX_SHARE = 0.7
"""The largest share of a step's tokens in one part. Above it a long prompt dominates, and torch's way is
faster."""

_Result = TypeVar("_Result")


class StepParts:
    """Threads that run torch's operations single-threaded, and the last cut of a layout among them.

    Not a pool of ``concurrent.futures``, which takes no work once the interpreter's main thread has ended:
    other threads may still wait for steps.
    """

    def __init__(self, num_threads: int) -> None:
        """Start the threads. The number of torch's threads stays what it is for all other threads."""
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        before, have_begun = torch.get_num_threads(), threading.Barrier(num_threads + 1)
        self._threads = [
            threading.Thread(target=self._serve, args=(have_begun,), name=f"manylora-part-{n}", daemon=True)
            for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        have_begun.wait()
        torch.set_num_threads(before)  # each thread has also set the default of threads that begin later
        self._layout: Layout | None = None
        self._parts: list[tuple[slice, slice, Layout]] = []

    def _serve(self, have_begun: threading.Barrier) -> None:
        torch.set_num_threads(1)
        have_begun.wait()
        while (taken := self._work.get()) is not None:
            part, future = taken
            try:
                with torch.inference_mode():
                    future.set_result(part())
            except BaseException as error:
                future.set_exception(error)
            del taken, part, future  # or the last step's tensors would live until the next step

    def cut(self, inputs: StepInputs) -> list[StepInputs]:
        """Return the parts of a step in the order of the batch, or the step alone where cutting does not pay.

        A part's layout has its own tokens, draws and segments; its other fields are the whole step's. A step
        that scores a prompt, or with an adapter of the output head, is not cut.
        """
        layout, whole = inputs.layout, inputs.attention
        if inputs.scored is not None or layout.head is not None:
            return [inputs]
        if layout is not self._layout:
            self._layout, self._parts = layout, self._cut(layout)
        return [
            StepInputs(
                layout=part,
                token_ids=inputs.token_ids[tokens],
                positions=inputs.positions[tokens],
                slots=inputs.slots[tokens],
                attention=AttentionRows(part.query_start, whole.kv_len[rows], whole.page_table[rows]),
                sampled=None,
                scored=None,
            )
            for rows, tokens, part in self._parts
        ] or [inputs]

    def _cut(self, layout: Layout) -> list[tuple[slice, slice, Layout]]:
        """Return rows, tokens and layout of parts with about equally many tokens; none where it does not
        pay."""
        starts, num_rows = layout.query_start, len(layout.counts)
        count = min(len(self._threads), num_rows // MIN_ROWS)
        if count < 2:
            return []
        wanted = starts[-1] * np.arange(1, count) / count
        bounds = np.unique([0, *np.searchsorted(starts, wanted), num_rows])
        if np.diff(starts[bounds]).max() > MAX_SHARE * starts[-1]:
            return []
        parts = []
        for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
            begin, stop = int(starts[first]), int(starts[end])
            draws = slice(*np.searchsorted(layout.sample_index, (begin, stop)).tolist())
            part = dataclasses.replace(
                layout,
                query_start=starts[first : end + 1] - begin,
                sample_index=layout.sample_index[draws] - begin,
                pending_index=layout.pending_index[draws],
                lora=None if layout.lora is None else layout.lora.of_tokens(np.arange(begin, stop)),
            )
            parts.append((slice(first, end), slice(begin, stop), part))
        return parts

    def run(self, parts: Sequence[Callable[[], _Result]]) -> list[_Result]:
        """Run all parts side by side and return the results in order. Once all have ended, raises the first
        part's exception."""
        futures: list[Future[_Result]] = [Future() for _ in parts]
        for pair in zip(parts, futures, strict=True):
            self._work.put(pair)
        concurrent.futures.wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads. May be called again."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
