"""The part of h200_aims with one request at a time: how soon its first token comes, and where the time goes."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING

from manylora.executor.direct import DirectExecutor

if TYPE_CHECKING:
    from manylora_lab.benchmarks.h200_aims import Aims

NONE, WARM, HOST, NEVER = "no adapter", "warm adapter", "adapter in host memory", "adapter never read"


async def first(aims: Aims) -> None:
    """One request at a time, of 64 tokens with one token out: the median time to it, in ms, and when, on the way,
    the worker was asked for what and had done it."""
    if not aims.has(15.0, "first"):
        return
    direct = DirectExecutor(aims.worker)
    card_pages = 1 + max(direct.add_adapter(10**6, aims.adapters["adapter-0"]).num_pages, 1)
    direct.forget_adapter(10**6)
    many = min(len(aims.adapters), 40)
    # Room for 8 adapters, so that those not used for long are in host memory only.
    target = aims.open(num_pages=8 * card_pages + 16, max_model_len=min(aims.policy.max_model_len, 128))

    parts: dict[str, dict[str, list[float]]] = {}

    async def ms(adapter: int | None, kind: str = "") -> float:
        call = aims.call(64, 1, adapter)
        aims.lent.moments.clear()
        began_s = time.monotonic()
        answer = await target.generate(call)
        if answer.error is not None or answer.first_s is None:
            raise RuntimeError(answer.error)
        for what, moment_s in (*aims.lent.moments, ("delivered", answer.first_s)):
            parts.setdefault(kind, {}).setdefault(what, []).append(1e3 * (moment_s - began_s))
        await asyncio.sleep(0.02)
        return 1e3 * (answer.first_s - began_s)

    base = [await ms(None, NONE) for _ in range(20)]
    never = [await ms(adapter, NEVER) for adapter in range(many)]
    await asyncio.sleep(0.5)
    host = [await ms(adapter, HOST) for adapter in range(many)]
    warm = []
    for adapter in range(many - 4, many):
        await ms(adapter)
        warm += [await ms(adapter, WARM) for _ in range(5)]
    stats = await target.counters()
    await target.close()
    for kind, found, vllm, aim in (
        (NONE, base[2:], None, None), (WARM, warm, 10.6, 5), (HOST, host, 21.2, 7), (NEVER, never, 113.7, 50),
    ):  # fmt: skip
        middle, worst = statistics.median(found), max(found)
        row = {"kind": kind, "ms": middle, "most_ms": worst, "vllm_ms": vllm, "aim_ms": aim}
        moments = {what: round(statistics.median(each), 3) for what, each in parts[kind].items()}
        aims.note("first", {**row, "moments_ms": moments})
    aims.report["first_steps"] = aims.lent.by_tokens()
    aims.report["first_counters"] = {name: stats[name] for name in ("adapter_reads", "adapter_evictions")}
