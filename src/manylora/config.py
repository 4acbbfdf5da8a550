"""Frozen settings, one section a reader: each part of the engine receives only its own.

Owns the sections, sizes as text ("512MiB") and their checks; does not know where values come from (flags,
a file, keyword arguments: ``manylora.flags``) nor what a device has free.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10,
    "m": 10**6, "mb": 10**6, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip


LARGEST_NUMBER = 2**62
"""No size and no count may be larger, so that each can cross to another process."""


MOST_SEQS = 2**15
"""No engine runs more sequences at once: each has a row in the executor's tables and a token on the device."""


class ConfigError(ValueError):
    """A setting that cannot work; one line for the user."""


def parse_size(value: str | int) -> int:
    """Bytes from an int or from text such as "512MiB", "10GB", "4096"; raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
        if found is None or found[2].lower() not in _UNITS:
            raise ConfigError(f"{value!r} is not a size; write it as 512MiB or 10GB")
        # Bounded before it becomes an int: it may be infinite.
        size = int(min(float(found[1]) * _UNITS[found[2].lower()], LARGEST_NUMBER + 1))
    if not 0 <= size <= LARGEST_NUMBER:
        raise ConfigError(f"{value!r} is not a size; it must lie between 0 and {LARGEST_NUMBER}")
    return size


CACHE_POLICIES = (
    "manylora", "fastlibra", "fastlibra-wom", "fastlibra-wos", "fastlibra-wol", "static-lru", "s-lora", "lru",
)  # fmt: skip


def is_import_name(name: str) -> bool:
    """Whether it names an attribute of a module, as ``module:Class``."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


@dataclasses.dataclass(frozen=True, slots=True)
class CacheConfig:
    """Which cache policy, and its numbers. ``tau_s`` and ``window_s`` are assumptions of ours where the
    FastLibra paper is silent (its equation 5): the scale of its time decay, and how long a visit counts."""

    policy: str = "manylora"
    adapter_share: float = 0.2
    """The share of the device's pages for adapters; static-lru only."""
    tau_s: float = 10.0
    window_s: float = 60.0
    interval_s: float = 0.1
    high_mark: float | None = None
    """None: the policy's own, 0.95 in the paper; of ``manylora`` 0.90 to 0.98, by what steps take."""
    low_mark: float = 0.70
    trace: bool = False

    def __post_init__(self) -> None:
        if self.policy not in CACHE_POLICIES and not is_import_name(self.policy):
            raise ConfigError(
                f"cache policy {self.policy!r} is not known: use {', '.join(CACHE_POLICIES)} or module:Class"
            )
        for name in ("tau_s", "window_s", "interval_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, got {getattr(self, name)}")
        if not 0 < self.adapter_share < 1:
            raise ConfigError(f"adapter_share must lie between 0 and 1, got {self.adapter_share}")
        if not 0 < self.low_mark <= (self.high_mark or 1) <= 1:
            raise ConfigError("the marks must satisfy 0 < low_mark <= high_mark <= 1")


ADMISSIONS = ("fcfs", "lcfs", "early-abort")
FIRST_STEP_S = 0.5
"""What early abort allows for the step that gives the first token."""


def check_pipeline_depth(pipeline_depth: int) -> None:
    """Raises ConfigError."""
    if pipeline_depth not in (1, 2):
        raise ConfigError(f"pipeline_depth must be 1 or 2, got {pipeline_depth}")


def check_max_waiting(max_waiting: int | None) -> None:
    """Raises ConfigError."""
    if max_waiting is not None and max_waiting < 1:
        raise ConfigError(f"max_waiting must be at least 1, got {max_waiting}")


def check_admission(admission: str, slo_ttft_s: float | None) -> None:
    """Raises ConfigError for an admission policy and a first-token objective that make no sense together."""
    if admission not in ADMISSIONS:
        raise ConfigError(f"admission {admission!r} is not known: use {', '.join(ADMISSIONS)}")
    if slo_ttft_s is None:
        if admission == "early-abort":
            raise ConfigError("admission early-abort needs slo_ttft, the objective for the first token")
    elif not FIRST_STEP_S < slo_ttft_s < float("inf"):
        raise ConfigError(f"slo_ttft must be more than {FIRST_STEP_S} seconds, got {slo_ttft_s}")


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyConfig:
    """All that the policy needs to know. Lengths in tokens. Without host pages there is one tier."""

    num_pages: int
    page_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_batch_tokens: int
    num_host_pages: int = 0
    page_bytes: int = 2 * 2**20
    cache: CacheConfig = CacheConfig()
    admission: str = "fcfs"
    slo_ttft_s: float | None = None
    """When a request's first token should have come, after its arrival; early-abort only."""
    pipeline_depth: int = 1
    """Steps in flight at most. With 2, a step is decided while the one before it still runs."""
    max_waiting: int | None = None
    """Requests that may wait for their first admission; more are refused. None: any number."""

    def __post_init__(self) -> None:
        check_admission(self.admission, self.slo_ttft_s)
        check_pipeline_depth(self.pipeline_depth)
        check_max_waiting(self.max_waiting)
        for name in (
            "num_pages", "page_tokens", "max_model_len", "max_num_seqs", "max_batch_tokens", "page_bytes",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_host_pages < 0:
            raise ConfigError(f"num_host_pages must not be negative, got {self.num_host_pages}")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence decodes one token a step"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which base model, and how its weights are held."""

    model: str
    served_model_name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None

    @property
    def name(self) -> str:
        """The base model's id for clients."""
        return self.served_model_name or self.model


@dataclasses.dataclass(frozen=True, slots=True)
class CacheSettings:
    """The two pools of pages, in bytes; None: chosen from free memory. A host pool of 0: one tier."""

    page_tokens: int = 16
    device_pool: int | None = None
    host_pool: int | None = None
    policy: CacheConfig = CacheConfig()
    trace: str | None = None
    """A file for decisions that a person can read."""


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How much runs at once (None: chosen for the device), and which request is admitted next."""

    max_num_seqs: int | None = None
    max_batch_tokens: int | None = None
    admission: str = "fcfs"
    slo_ttft_s: float | None = None
    pipeline_depth: int | None = None
    """Steps in flight at most."""
    max_waiting: int | None = None
    """Requests that may wait for their first admission. None: any number."""

    def __post_init__(self) -> None:
        check_admission(self.admission, self.slo_ttft_s)
        check_max_waiting(self.max_waiting)
        if self.pipeline_depth is not None:
            check_pipeline_depth(self.pipeline_depth)

    def limits_on(self, kind: Literal["cpu", "cuda"]) -> tuple[int, int, int]:
        """Sequences, tokens a step and steps in flight, at most, on such a device. A default gives way to what was
        set beside it."""
        num_seqs, batch_tokens = self.max_num_seqs, self.max_batch_tokens
        if num_seqs is None:
            num_seqs = min(_NUM_SEQS[kind], batch_tokens or _NUM_SEQS[kind])
        if batch_tokens is None:
            batch_tokens = max(_BATCH_TOKENS[kind], num_seqs)
        return num_seqs, batch_tokens, self.pipeline_depth or _PIPELINE_DEPTH[kind]


_NUM_SEQS = {"cpu": 64, "cuda": 256}
_BATCH_TOKENS = {"cpu": 1024, "cuda": 8192}
_PIPELINE_DEPTH = {"cpu": 1, "cuda": 2}
"""On a CPU a step is run by the loop that decides on it."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Adapters served from the start, and what may be loaded later."""

    adapters: tuple[tuple[str, str], ...] = ()
    adapter_dir: str | None = None
    max_adapter_rank: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything that makes one engine."""

    model: ModelSettings
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    adapters: AdapterSettings = AdapterSettings()
    journal: str | None = None
    journal_part_bytes: int | None = None
    """From which size the journal goes on in another file; None: never."""
    cuda_graphs: str = "auto"
    """auto: decoding steps are captured where the device can; off: every step is launched kernel by kernel."""
    step_timeout_s: float = 300.0
    """An engine whose step takes longer, or that is silent for longer, is taken for lost."""


@dataclasses.dataclass(frozen=True, slots=True)
class HttpSettings:
    """The server's own side. ``max_body_size`` in bytes; None: as the model's context and vocabulary need."""

    host: str = "127.0.0.1"
    port: int = 8000
    drain_timeout: float = 5.0
    api_keys: tuple[str, ...] = ()
    metrics_key: str = "required"
    """Whether /metrics asks for one of the keys: required or open."""
    max_waiting: int = 10_000
    max_connections: int | None = None
    max_body_size: int | None = None
