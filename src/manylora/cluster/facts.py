"""What a router is told of a replica when it comes up: its sizes, and what its work takes, as first guesses.

A replica has measured nothing when it comes up. Guesses by the device's kind order replicas that are alike; what
prompts, copies and reads really take is learnt there and comes with each report.
"""

from __future__ import annotations

from manylora.protocol.routing import ReplicaFacts, StepPlane
from manylora.types import EngineInfo

_STEP_S = {"cpu": 0.01, "cuda": 0.01}
_ROW_S = {"cpu": 5e-4, "cuda": 2e-5}
_TOKEN_S = {"cpu": 1e-3, "cuda": 2.5e-5}
_PAGE_BYTES_S = {"cpu": 4e9, "cuda": 2e10}
_READ_BYTES_S = 1e9


def facts_of(info: EngineInfo, adapter_pages: int) -> ReplicaFacts:
    """The facts of a replica. ``adapter_pages``: what of its pool one adapter may take."""
    kind = "cuda" if info.device.startswith("cuda") else "cpu"
    return ReplicaFacts(
        num_pages=info.num_pages,
        page_tokens=info.page_tokens,
        max_model_len=info.max_model_len,
        max_seqs=info.max_num_seqs,
        planes=(StepPlane(_STEP_S[kind], _ROW_S[kind]),),
        token_s=_TOKEN_S[kind],
        page_in_s=info.page_bytes / _PAGE_BYTES_S[kind],
        page_read_s=info.page_bytes / _READ_BYTES_S,
        page_bytes=info.page_bytes,
        adapter_pages=adapter_pages,
        num_host_pages=info.num_host_pages,
        numerics=f"{info.dtype} on {info.device}",
    )
