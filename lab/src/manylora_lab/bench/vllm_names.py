"""The report of a replay under the names that ``vllm bench serve`` writes, for tools that read those.

Names and meanings are those of vllm/benchmarks/serve.py (commit def9ce8; ``start_times`` of 009e6d4, here since
the replay's start) and, for ``offline_fields``, of vllm/benchmarks/throughput.py (commit 1a91bc2). Where vLLM
writes 0 for want of any value this says null.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from manylora_lab.bench.replay import RequestResult
from manylora_lab.bench.summary import Summary

_TIMES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "e2e_ms"}


def serve_fields(summary: Summary, results: Sequence[RequestResult], model: str | None) -> dict[str, Any]:
    """What ``--save-result --save-detailed`` saves, with percentiles 50, 90 and 99."""
    done = [result for result in results if result.error is None]
    tokens, requests = _peaks(done)
    found: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai",
        "backend": "openai",
        "label": None,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": summary["planned"],
        "request_rate": summary["offered_per_s"] or "inf",
        "burstiness": None,  # A workload's arrivals are its own.
        "max_concurrency": None,
        "duration": summary["wall_s"],
        "completed": len(done),
        "failed": summary["failed"],
        "total_input_tokens": summary["prompt_tokens"],
        "total_output_tokens": summary["output_tokens"],
        "request_throughput": summary["done_per_s"],
        "request_goodput": summary["goodput_per_s"],
        "output_throughput": summary["output_tokens_per_s"],
        "total_token_throughput": summary["total_tokens_per_s"],
        "max_output_tokens_per_s": tokens,
        "max_concurrent_requests": requests,
    }
    for name, ours in _TIMES.items():
        found |= _time_fields(name, summary[ours])
    return found | {
        "input_lens": [result.prompt_tokens for result in results],
        "output_lens": [0 if result.error is not None else result.reply_tokens for result in results],
        "ttfts": [round(result.ttft_s, 6) for result in results],
        "itls": [[round(itl_s, 6) for itl_s in result.itls_s] for result in results],
        "generated_texts": [result.text for result in results],
        "errors": [result.error or "" for result in results],
        "start_times": [round(result.handed_s, 6) for result in results],
    }


def offline_fields(summary: Summary) -> dict[str, Any]:
    """What ``vllm bench throughput --output-json`` saves."""
    return {
        "elapsed_time": summary["wall_s"],
        "num_requests": summary["requests"] - summary["failed"],
        "total_num_tokens": summary["prompt_tokens"] + summary["output_tokens"],
        "requests_per_second": summary["done_per_s"],
        "tokens_per_second": summary["total_tokens_per_s"],
    }


def _time_fields(name: str, spread: Mapping[str, float] | None) -> dict[str, float | None]:
    values = spread or {}
    found = {f"{what}_{name}_ms": values.get(what) for what in ("mean", "p50", "p90", "p99", "std")}
    return found | {f"median_{name}_ms": values.get("p50")}


def _peaks(done: Sequence[RequestResult]) -> tuple[float, int]:
    """Of the seconds since the first request: most output tokens in one, most requests open in one."""
    if not done:
        return 0.0, 0
    first_s = min(result.handed_s for result in done)
    seconds = int(np.ceil(max(result.end_s for result in done) - first_s)) + 1
    tokens, open_requests = np.zeros(seconds, int), np.zeros(seconds, int)
    for result in done:
        begun_s = result.handed_s - first_s
        moments = begun_s + result.ttft_s + np.cumsum([0.0, *result.itls_s])
        np.add.at(tokens, np.minimum(moments.astype(int), seconds - 1), 1)
        open_requests[int(begun_s) : int(result.end_s - first_s) + 1] += 1
    return float(tokens.max()), int(open_requests.max())
