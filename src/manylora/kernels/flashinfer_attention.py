"""Computes attention of long prompts by FlashInfer (Ye et al. 2025), where it is installed and faster.

Owns the decision when FlashInfer serves (``serving_prompts``), the planning of a step, and FlashInfer's
compilation, which runs on a thread of its own while requests are served. Our kernel serves rows of one query,
short prompts, windows, float32 and captured steps. Nothing else in manylora knows FlashInfer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manylora.kernels.ops import AttentionRows, Scores
from manylora.kernels.shapes import PageShape
from manylora.kernels.triton.launch import upload
from manylora.types import first_line

LEAST_MEAN_QUERIES = 128
"""The least mean length, in tokens, of a step's prompts for FlashInfer to serve them. On an H200,
FlashInfer's fa3 is faster than our kernel for prompts of 256 tokens and more, but not of 64; nothing between
was measured (not on record; ``manylora bench kernels --tune attention`` compares the two)."""

HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
RING = 3
_FA2_WORKSPACE, _FA3_WORKSPACE = 128 * 2**20, 2**20
"""Bytes of workspace for partial sums of split contexts. FlashInfer advises fa2's; fa3 has no such sums."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """The attention heads of a model whose layers differ in their windows only.

    ``full_layers``: whether some layers have no window. ``own_scale``: the scale of scores; None:
    head_dim**-0.5. ``soft_cap``: the soft cap of scores; None: no cap."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    full_layers: bool = True
    own_scale: float | None = None
    soft_cap: float | None = None

    @functools.cached_property
    def scores(self) -> Scores:
        """The scores of a layer without a window."""
        scale = float(self.head_dim**-0.5) if self.own_scale is None else self.own_scale
        return Scores(scale, None, self.soft_cap)


def serving_prompts(shape: AttentionShape, device: torch.device) -> PreparedPrompts | None:
    """Return FlashInfer for prompts of this shape; None where our kernel serves them permanently.

    One line of the log says which, perhaps later. Compiling and trying out FlashInfer takes seconds with a
    warm cache, less than a start, and otherwise a minute or more; our kernel serves until then.
    """
    why_not = _why_not(shape)
    if why_not is not None:
        _log.info("attention of prompts: our kernel, for %s", why_not)
        return None
    return PreparedPrompts(shape, device)


class PreparedPrompts:
    """FlashInfer as a thread makes it ready. Until then there are no plans, and our kernel serves."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._is_closed = False
        self._prompts: PromptAttention | None = None
        self.thread = threading.Thread(
            target=self._prepare, args=(shape, device), name="manylora-flashinfer", daemon=True
        )
        self.thread.start()

    def plan(self, rows: AttentionRows, page: PageShape) -> PlannedPrompts | None:
        """Return the plan for the step's rows of several queries; None where our kernel must serve them."""
        prompts = self._prompts
        return None if prompts is None else prompts.plan(rows, page)

    def close(self) -> None:
        """End FlashInfer's compiler if it is still running: it would outlive this process."""
        self._is_closed = True
        if self.thread.is_alive():
            for child in _children():
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{child}/comm").read_text().strip() == "ninja":
                        os.kill(child, signal.SIGTERM)

    def _prepare(self, shape: AttentionShape, device: torch.device) -> None:
        try:
            backend, began = _backend(device), time.perf_counter()
            prompts = PromptAttention(shape, device, backend)
            prompts.try_out()
        except Exception as error:  # from FlashInfer, the compiler or a broken installation
            if not self._is_closed:
                _log.warning("attention of prompts: our kernel, for FlashInfer fails: %s", first_line(error))
            return
        self._prompts = prompts
        _log.info(
            "attention of prompts of %d tokens or more on average: FlashInfer (%s, ready in %.1f s)",
            LEAST_MEAN_QUERIES,
            backend,
            time.perf_counter() - began,
        )


def _why_not(shape: AttentionShape) -> str | None:
    if shape.dtype not in DTYPES:
        return f"FlashInfer has no {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim not in HEAD_DIMS:
        return f"FlashInfer was not measured with heads of {shape.head_dim}"
    if not shape.full_layers:
        return "every layer has a window"
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed"
    return None


def _backend(device: torch.device) -> str:
    """Return the name of FlashInfer's kernels for this device. Raises RuntimeError where it has none."""
    major, minor = torch.get_device_module(device).get_device_capability(device)
    if major < 8:
        raise RuntimeError(f"there is no kernel for compute capability {major}.{minor}")
    return "fa3" if major == 9 else "fa2"


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedPrompts:
    """The plan for one step's prompts, which are inside tokens ``[first, last)`` of the batch."""

    shape: AttentionShape
    wrapper: Any
    first: int
    last: int

    def serves(self, q: torch.Tensor, scores: Scores) -> bool:
        """Return whether the plan is for a layer with this q ``[T, heads, head_dim]`` and these scores."""
        shape = self.shape
        return (
            q.dtype == shape.dtype and q.shape[1:] == (shape.heads, shape.head_dim) and scores == shape.scores
        )

    def run(self, q: torch.Tensor, pool: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        """Write the prompts' part of ``out`` ``[T, heads * head_dim]``; tokens between prompts get zeros."""
        inside = slice(self.first, self.last)
        keys_and_values = (pool[:, layer, 0], pool[:, layer, 1])
        self.wrapper.run(q[inside], keys_and_values, out=out.view(q.shape)[inside])


class PromptAttention:
    """FlashInfer on one device for one AttentionShape. Plans are made and run in order on one stream."""

    def __init__(self, shape: AttentionShape, device: torch.device, backend: str) -> None:
        """Allocate the workspace and FlashInfer's wrappers. Raises whatever FlashInfer raises."""
        module: Any = importlib.import_module("flashinfer")
        self._shape = shape
        self._device = device
        size = _FA3_WORKSPACE if backend == "fa3" else _FA2_WORKSPACE
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        # A wrapper writes its plan into its own pinned memory, from which it is copied to the device. RING
        # wrappers take turns, so that a step's plan does not overwrite one that is still in flight.
        self._wrappers = [
            module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend) for _ in range(RING)
        ]
        self._sent = [torch.get_device_module(device).Event() for _ in range(RING)]
        self._next = 0
        self._has_failed = False

    def plan(self, rows: AttentionRows, page: PageShape) -> PlannedPrompts | None:
        """Return the plan for the step's rows of several queries; None where our kernel must serve them."""
        length = np.diff(rows.query_start)
        prompts = np.flatnonzero(length > 1)
        if len(prompts) == 0 or length[prompts].mean() < LEAST_MEAN_QUERIES:
            return None
        if page.kv_heads != self._shape.kv_heads or page.head_dim != self._shape.head_dim:
            return None
        try:
            return self._plan(rows, prompts, page.page_tokens)
        except Exception as error:
            # For example, the step needs more workspace than there is.
            if not self._has_failed:
                _log.warning("a step's prompts are left to our kernel: FlashInfer says %s", first_line(error))
            self._has_failed = True
            return None

    def _plan(self, rows: AttentionRows, prompts: np.ndarray, page_tokens: int) -> PlannedPrompts:
        starts, ends = rows.query_start[prompts], rows.query_start[prompts + 1]
        # FlashInfer's rows are contiguous, so the tokens between two prompts become a row without keys.
        edges = np.unique(np.concatenate((starts, ends)))
        is_prompt = np.isin(edges[:-1], starts)
        context = np.zeros(len(is_prompt), dtype=np.int64)
        context[is_prompt] = rows.kv_len[prompts]
        pages = -(-context // page_tokens)
        table = rows.page_table[prompts]
        used = np.arange(table.shape[1]) < pages[is_prompt][:, None]
        shape, turn = self._shape, self._next
        self._next = (turn + 1) % RING
        wrapper, sent = self._wrappers[turn], self._sent[turn]
        sent.synchronize()
        wrapper.plan(
            _int32(edges - edges[0]),
            _int32(np.concatenate(([0], np.cumsum(pages)))),
            upload([table[used]], self._device)[0],
            _int32(np.where(is_prompt, (context - 1) % page_tokens + 1, 0)),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            page_tokens,
            causal=True,
            sm_scale=shape.scores.scale,
            logits_soft_cap=shape.soft_cap,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        sent.record()
        return PlannedPrompts(shape, wrapper, int(edges[0]), int(edges[-1]))

    def try_out(self) -> None:
        """Run once, which compiles. Raises RuntimeError on a wrong result, or whatever FlashInfer raises."""
        shape, tokens = self._shape, LEAST_MEAN_QUERIES
        page = PageShape(1, 16, shape.kv_heads, shape.head_dim, shape.dtype.itemsize)
        sizes = (tokens // 16, 1, 2, 16, shape.kv_heads, shape.head_dim)
        pool = torch.ones(sizes, dtype=shape.dtype, device=self._device)
        table = np.arange(tokens // 16, dtype=np.int32)[None]
        rows = AttentionRows(np.array([0, tokens], np.int32), np.array([tokens], np.int32), table)
        planned = self._plan(rows, np.array([0]), page.page_tokens)
        q = torch.ones((tokens, shape.heads, shape.head_dim), dtype=shape.dtype, device=self._device)
        out = torch.zeros_like(q).flatten(1)
        planned.run(q, pool, 0, out)
        if not bool(((out - 1).abs() < 1e-2).all()):
            raise RuntimeError("a mean of ones is not one")


def _children() -> list[int]:
    """Return the ids of the processes that any thread of this process has started."""
    found: list[int] = []
    for listed in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, listed.read_text().split())
    return found


def _int32(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32))
