"""Declares the settings that users give, in one frozen section for each reader: each part of the engine
receives only its own.

Each setting is declared only here (or in ``CacheConfig``): its type, default, bounds, help text and name for
users. This module does not know where values come from (``manylora.flags``), nor what a device has free.
"""

import dataclasses
import re
from typing import Annotated, Literal

from manylora.config import policy as policies
from manylora.config.cold_start import ColdStartConfig, check_host_pool
from manylora.config.declaring import GIVEN, ConfigError, Count, Seconds, Section, check_rules, setting
from manylora.config.merging import MergeConfig
from manylora.config.queueing import QueueConfig
from manylora.rules import FINITE, Rule, at_least, at_most, between, more_than

MOST_SEQS = 2**15
"""The most sequences that an engine runs at once. Each has a row in the executor's tables and a token on the
device."""


LoraSharding = Literal["sharded", "replicated"]
LORA_SHARDINGS: tuple[LoraSharding, ...] = ("sharded", "replicated")


def lora_sharding_of(wanted: str, count: int) -> LoraSharding:
    """Return the sharding that ``--lora-sharding`` means with ``count`` ranks. With ``auto``, two ranks
    replicate, which costs no exchange and a third more bytes. More ranks shard, since replicated adapters
    would take more than twice the memory."""
    if wanted == "auto":
        return "sharded" if count > 2 else "replicated"
    return "sharded" if wanted == "sharded" else "replicated"


def _are_filled(texts: tuple[str, ...]) -> bool:
    """Return whether no text is empty. An empty API key, such as from an unset variable, would admit every
    client that sends an empty key."""
    return all(text.strip() for text in texts)


def _is_root(path: str) -> bool:
    return not path or path.startswith("/")


def _are_hosts(texts: tuple[str, ...]) -> bool:
    names = [name.strip() for text in texts for name in text.split(",")]
    return all(name and name.count(":") != 1 and not re.search(r"[\s/]|\]:", name) for name in names)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSettings(Section):
    """The base model, and how its weights are held."""

    model: str
    served_model_names: tuple[str, ...] = setting(
        (),
        "the base model's id for clients (default: MODEL as given); of several each is taken, and answers have "
        "the first",
        "NAME",
        name="served_model_name",
        takes_several=True,
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "where to run; auto takes a CUDA GPU when there is one"
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16", "float", "half"] = setting(
        "auto",
        "type of weights, adapters and KV; auto is float32 on a CPU and the checkpoint's own on CUDA (bfloat16 "
        "for a float32 checkpoint); float is float32, half is float16",
    )
    load_format: Literal["auto", "dummy"] = setting(
        "auto", "dummy fills the base with random weights, for performance work"
    )
    max_model_len: Count | None = setting(
        None, "longest prompt plus answer, in tokens (default: the model's, as the pool allows)"
    )
    tokenizer: str | None = setting(None, "folder or hub id of the tokenizer (default: MODEL's own)", "PATH")

    def __post_init__(self) -> None:
        check_rules(self)
        object.__setattr__(self, "dtype", {"float": "float32", "half": "float16"}.get(self.dtype, self.dtype))

    @property
    def names(self) -> tuple[str, ...]:
        """The ids of the base model for clients."""
        return tuple(dict.fromkeys(filter(None, self.served_model_names))) or (self.model,)

    chat_template: Annotated[tuple[str, ...], Rule("text that is not empty", _are_filled)] = setting(
        (),
        "a chat template in place of the base model's own, or, as NAME=FILE, in place of the one that the adapter "
        "NAME has or brings; may be repeated",
        "FILE",
    )
    generation_config: Literal["auto", "none", "vllm"] = setting(
        "auto",
        "auto: the temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens of "
        "generation_config.json hold for requests that do not say; none, or vllm: they do not",
    )

    @property
    def name(self) -> str:
        """The base model's id in answers."""
        return self.names[0]


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterSettings(Section):
    """The adapters that are served from the start, by name, and those that may be loaded later."""

    adapters: tuple[tuple[str, str], ...] = setting(
        (), "serve this adapter under this name; may be repeated", "NAME=PATH", name="adapter"
    )
    adapter_dir: str | None = setting(
        None,
        "serve every adapter found in a folder of DIR under the folder's name, and allow loading more from inside "
        "DIR at run time (off without this)",
        "DIR",
    )
    max_adapter_rank: Count | None = setting(None, "refuse adapters of a larger rank (default: no limit)")


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerSettings(Section):
    """The number of requests that run at once (None: chosen for the device), and the order of admission."""

    max_num_seqs: Annotated[int, at_least(1), at_most(MOST_SEQS)] | None = setting(
        None, "most sequences that run at once (default: 64 on a CPU, else 256)"
    )
    max_batch_tokens: Count | None = setting(
        None, "most tokens that one step computes; longer prompts go in chunks"
    )
    admission: policies.Admission = setting(
        "fcfs",
        "which request is next when there is room: the oldest, the newest, or (early-abort) one that can still be "
        "served within --slo-ttft, others being refused with 503",
    )
    slo_ttft_s: policies.Objective | None = setting(
        None,
        "when a request's first token should have come, after its arrival; early-abort only",
        name="slo_ttft",
    )
    pipeline_depth: policies.PipelineDepth | None = setting(
        None,
        "steps in flight at most: with 2, a step is decided while the one before it runs (default: 2 on a GPU, 1 "
        "on a CPU)",
        is_internal=True,
    )
    max_prefills: Count | None = setting(
        None,
        "most prompts that one step computes a part of (default: as many as its tokens allow; Punica: 1)",
        name="max_prefills_per_step",
    )
    kept_share: Annotated[float, at_least(0), at_most(1)] = setting(
        policies.KEPT_SHARE,
        "the most of the device's pages that adapters which a router wants kept there may take (dLoRA's chunk)",
        "SHARE",
        is_internal=True,
    )
    max_waiting: policies.Positive | None = None
    """The server's own setting, passed to the policy. None: any number of requests may wait."""
    queue: QueueConfig = QueueConfig()
    merge: MergeConfig = MergeConfig()
    cold_start: ColdStartConfig = ColdStartConfig(follows_device=True)

    def __post_init__(self) -> None:
        check_rules(self)
        policies.check_objective(self.admission, self.slo_ttft_s)
        policies.check_cold_start(self.cold_start, self.merge)

    def limits_on(self, kind: Literal["cpu", "cuda"]) -> tuple[int, int, int]:
        """Return the most sequences, tokens of a step, and steps in flight on a device of this kind. A
        default yields to the other settings that are given."""
        num_seqs, batch_tokens = self.max_num_seqs, self.max_batch_tokens
        if num_seqs is None:
            num_seqs = min(_NUM_SEQS[kind], batch_tokens or _NUM_SEQS[kind])
        if batch_tokens is None:
            batch_tokens = max(_BATCH_TOKENS[kind], num_seqs)
        return num_seqs, batch_tokens, self.pipeline_depth or _PIPELINE_DEPTH[kind]


_NUM_SEQS = {"cpu": 64, "cuda": 256}
_BATCH_TOKENS = {"cpu": 1024, "cuda": 8192}
_PIPELINE_DEPTH = {"cpu": 1, "cuda": 2}
"""The steps in flight by kind of device. A step on a CPU is run by the loop that decides on it, so there is
one."""


_KEYS = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in policies.CACHE_SETTINGS.items() if keys)


@dataclasses.dataclass(frozen=True, slots=True)
class CacheSettings(Section):
    """The two pools of pages, in bytes; None: chosen from free memory. With a host pool of 0 there is one
    tier."""

    page_tokens: Count = setting(
        16,
        "tokens that one page of KV holds (default: 16; 32 with --cache-policy static-lru)",
        default_follows=True,
    )
    device_pool: int | None = setting(
        None,
        "memory for KV and adapters together, such as 512MiB or 10GB (default: on a CPU min(4 GiB, 25%% of free "
        "memory), on CUDA most of what the weights leave)",
        is_size=True,
    )
    gpu_memory_utilization: Annotated[float, more_than(0), at_most(1)] | None = setting(
        None,
        "instead of --device-pool: the share of the whole GPU's memory that weights, steps and the pool take "
        "together, such as 0.9",
        "SHARE",
    )
    host_pool: int | None = setting(
        None,
        "host memory for adapters that have been read and for KV that had to leave the device; 0 for none "
        "(default: on a CPU min(4 GiB, 25%% of free memory), on CUDA min(64 GiB, 50%% of it))",
        is_size=True,
    )
    policy: policies.CacheConfig = policies.CacheConfig()
    settings: tuple[str, ...] = setting(
        (),
        f"a number of the cache policy; may be repeated ({_KEYS})",
        "KEY=VALUE",
        name="cache_set",
    )
    """The texts from which ``policy`` was built."""
    trace: str | None = setting(None, "write every cache decision as a line that a person can read", "FILE")


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSettings(Section):
    """The settings of one engine."""

    model: ModelSettings
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    adapters: AdapterSettings = AdapterSettings()
    tensor_parallel_size: Count = setting(
        1,
        "cut the model among N processes of this host, which compute each step together; --device-pool and "
        "--host-pool are of all of them",
    )
    lora_sharding: Literal["auto", "sharded", "replicated"] = setting(
        "auto",
        "with --tensor-parallel-size: sharded (a part of every adapter in each process, one exchange more for "
        "each group of projections), replicated (one of A and B whole in each, no exchange) or auto (replicated "
        "with two processes, else sharded)",
    )
    seed: Annotated[int, at_least(-(2**63)), at_most(2**64 - 1)] | None = setting(
        None, "seed of requests that give none (default: another one for each)"
    )
    cuda_graphs: Literal["auto", "on", "off"] = setting(
        "auto",
        "auto, on: steps of fixed sizes are captured at start-up, which spares the host their launches, where the "
        "device can; off launches every kernel each time",
    )
    step_timeout_s: Seconds = setting(
        300.0,
        "seconds after which a step that has not ended, or an engine that says nothing, is taken for lost: open "
        "requests fail and the server ends with exit code 1; compiling and capturing do not count",
        name="step_timeout",
    )
    journal: str | None = setting(
        None, "record every event the policy sees, to replay its decisions later", "FILE"
    )
    journal_part_bytes: Annotated[int, at_least(4096, " bytes")] | None = setting(
        None,
        "go on in FILE.1, FILE.2, ... whenever a part of the journal has this size; a replay needs all of them "
        "(default: one file)",
        name="journal_rotate",
        is_size=True,
        needs=("journal", GIVEN),
    )

    def __post_init__(self) -> None:
        check_rules(self)
        check_host_pool(self.scheduler.cold_start, self.cache.host_pool)
        if self.tensor_parallel_size > 1 and self.scheduler.cold_start.mode == "cpu":
            raise ConfigError("--cold-start cpu does not work with --tensor-parallel-size above 1 yet")

    @property
    def head_fixed_by(self) -> str:
        """The option that excludes adapters on the output head; empty: no option does."""
        if self.tensor_parallel_size > 1:
            return "--tensor-parallel-size above 1"
        if self.scheduler.merge.is_on:
            return f"--merge {self.scheduler.merge.mode}"
        return "--cold-start cpu" if self.scheduler.cold_start.mode == "cpu" else ""


@dataclasses.dataclass(frozen=True, slots=True)
class HttpSettings(Section):
    """The settings of the HTTP server."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: Annotated[int, between(0, 65535)] = setting(8000, "port to listen on")
    uds: Annotated[str, Rule("a socket's path", str.strip)] | None = setting(
        None, "listen on a Unix socket at PATH, which is this user's alone, not on --host and --port", "PATH"
    )
    root_path: Annotated[str, Rule("empty or begin with /", _is_root)] = setting(
        "", "path under which a proxy serves this server, such as /llm; requests may have it or not", "PATH"
    )
    drain_timeout: Annotated[float, at_least(0), FINITE] = setting(
        5.0,
        "seconds that running requests get to finish after SIGTERM, SIGINT or SIGHUP, which a second signal ends; "
        "the server is gone at most 5 s after them, so that the default ends before Docker kills after 10 s",
    )
    allowed_hosts: Annotated[tuple[str, ...], Rule("names without a port", _are_hosts)] = setting(
        (),
        "answer only requests to this host, named without its port; may be repeated, or a list with commas; * is "
        "any text (default: localhost, 127.0.0.1, [::1] and --host where that is of the loopback, else *)",
        "HOST",
    )
    api_keys: Annotated[tuple[str, ...], Rule("text that is not empty", _are_filled)] = setting(
        (), "accept only requests that carry this key; may be repeated", "KEY", name="api_key"
    )
    api_key_file: str | None = setting(
        None,
        "take keys from FILE, one a line, blank lines and those that begin with # left out; processes show "
        "--api-key to other users of the host, and neither this nor MANYLORA_API_KEY in the environment",
        "FILE",
    )
    metrics_key: Literal["required", "open"] = setting(
        "required", "where keys are set, whether /metrics asks for one too"
    )
    trust_request_chat_template: bool = setting(
        False,
        "render the chat_template that a request brings, which is code in a sandbox (refused without this)",
    )
    max_waiting: Count = setting(10_000, "most requests that wait to be admitted; more are refused with 429")
    max_connections: Count | None = setting(
        None,
        "most connections at once; more are answered with 503 and closed (default: 16384, or more where "
        "--max-waiting asks for it, as the limit on open files allows)",
    )
    max_body_size: Count | None = setting(
        None,
        "largest body of a request, such as 16MiB; a larger one is refused with 413 (default: 4 MiB and what the "
        "longest prompt may need)",
        is_size=True,
    )
