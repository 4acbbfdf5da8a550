"""Collects the settings in sections, for users and for the policy. A section checks its values when it is
created."""

from __future__ import annotations

from manylora.config.cold_start import (
    COLD_START_MODES,
    MOST_CPU_TOKENS,
    ColdStartConfig,
    check_host_pool,
    num_cores,
)
from manylora.config.declaring import (
    LARGEST_NUMBER,
    ConfigError,
    check_rules,
    option_of,
    parse_size,
    setting_of,
)
from manylora.config.merging import MERGE_MODES, MERGE_POLICIES, MergeConfig, MergeTimes, StepTimes
from manylora.config.named import is_import_name, place_of
from manylora.config.policy import (
    ADMISSIONS,
    CACHE_POLICIES,
    FIRST_STEP_S,
    CacheConfig,
    PipelineDepth,
    PolicyConfig,
)
from manylora.config.queueing import LEAST_PRIORITY, MOST_PRIORITY, QueueConfig, as_share
from manylora.config.sections import (
    LORA_SHARDINGS,
    MOST_SEQS,
    AdapterSettings,
    CacheSettings,
    EngineSettings,
    HttpSettings,
    LoraSharding,
    ModelSettings,
    SchedulerSettings,
    lora_sharding_of,
)

__all__ = [
    "ADMISSIONS",
    "CACHE_POLICIES",
    "COLD_START_MODES",
    "FIRST_STEP_S",
    "LARGEST_NUMBER",
    "LEAST_PRIORITY",
    "LORA_SHARDINGS",
    "MERGE_MODES",
    "MERGE_POLICIES",
    "MOST_CPU_TOKENS",
    "MOST_PRIORITY",
    "MOST_SEQS",
    "AdapterSettings",
    "CacheConfig",
    "CacheSettings",
    "ColdStartConfig",
    "ConfigError",
    "EngineSettings",
    "HttpSettings",
    "LoraSharding",
    "MergeConfig",
    "MergeTimes",
    "ModelSettings",
    "PipelineDepth",
    "PolicyConfig",
    "QueueConfig",
    "SchedulerSettings",
    "StepTimes",
    "as_share",
    "check_host_pool",
    "check_rules",
    "is_import_name",
    "lora_sharding_of",
    "num_cores",
    "option_of",
    "parse_size",
    "place_of",
    "setting_of",
]
