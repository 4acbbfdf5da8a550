"""Declares when a step may begin although pages that its rows read are still being copied to the device."""

import dataclasses
import os
import re
from typing import Annotated

from manylora.config.declaring import ConfigError, Section, check_rules, setting
from manylora.rules import Rule, at_least, at_most, more_than, one_of

COLD_START_MODES = ("wait", "block", "layerwise", "cpu", "auto")

_STALL = 0.02
_GROUPS = 8
_NUM_GROUPS = {"wait": 0, "block": 1, "layerwise": _GROUPS, "cpu": _GROUPS, "auto": _GROUPS}

MOST_CPU_TOKENS = 512
"""The most tokens of one step whose adapter products the CPU computes: its threads' memory has room for these."""
SLICE_SHARE = 0.25
"""The arithmetic of a thread's tokens, as a share of the time to pass them on and to read the adapter. It
sets the number of tokens for each thread. With fewer tokens another thread would save little. With more,
cores would be idle that nothing else uses."""
_MOST_AUTO_WORKERS = 16
"""The most threads by default. A step has few tokens for threads, of which each takes dozens; a machine may
have hundreds of cores."""
MOST_WORKERS = 256
_AUTO = "auto"


def _is_worker_count(text: str) -> bool:
    return text == _AUTO or (re.fullmatch("[0-9]{1,3}", text) is not None and int(text) <= MOST_WORKERS)


def num_cores() -> int:
    """Count the cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not every system reports it
        return os.cpu_count() or 1


@dataclasses.dataclass(frozen=True, slots=True)
class ColdStartConfig(Section):
    """The start of a request whose adapter, or cached KV, must be copied from the host (CaraServe §4)."""

    mode: Annotated[str, one_of(COLD_START_MODES)] = setting(
        "wait",
        "when a request begins whose adapter or cached KV comes from the host: wait (when it is there; steps of "
        "others go on), block (at once; its step waits for it), layerwise (at once, layer group by layer group as "
        "it lands, within --cold-start-stall), cpu (at once; threads on the CPU compute its adapter's part of "
        "the prompt meanwhile), auto (wait or layerwise, whichever is expected to answer first) (default: auto on "
        "a GPU without --merge, else wait)",
        name="cold_start",
        default_follows=True,
    )
    stall: Annotated[float, more_than(0), at_most(1)] = setting(
        _STALL,
        "layerwise, auto: the share of others' time for which steps may stand still for cold requests",
        "SHARE",
        name="cold_start_stall",
    )
    cpu_workers: Annotated[
        str, Rule(f"auto or a whole number from 0 to {MOST_WORKERS}", _is_worker_count)
    ] = setting(
        _AUTO,
        "threads that compute adapters' products for --cold-start cpu (auto: half of the cores, at least one "
        f"and at most {_MOST_AUTO_WORKERS})",
        "N|auto",
        name="cpu_lora_workers",
        takes_numbers=True,
    )
    num_workers: Annotated[int, at_least(0)] = 0
    """The number of threads on this machine, computed from ``cpu_workers``, as the policy receives it."""
    cores_before: Annotated[int, at_least(0)] = 0
    """The number of this machine's last cores to which other engines' threads are bound."""
    lands_whole: bool = False
    """Whether copies arrive whole, not in groups of layers, because no kernel copies them."""
    follows_device: bool = False
    """Whether no mode was given, so that the engine's device decides (``on_device``)."""

    def __post_init__(self) -> None:
        check_rules(self)
        if self.mode == "cpu" and self.wanted_workers == 0:
            raise ConfigError("--cold-start cpu needs --cpu-lora-workers of at least 1")
        if self.mode != "cpu" and self.cpu_workers not in (_AUTO, "0"):
            raise ConfigError(f"--cpu-lora-workers {self.cpu_workers} needs --cold-start cpu")

    def on_device(self, has_gates: bool) -> "ColdStartConfig":
        """Return the settings with the mode for an engine's device. ``has_gates``: it is a GPU whose steps
        may await copies, and the engine merges nothing."""
        if not self.follows_device:
            return self
        return dataclasses.replace(self, mode="auto" if has_gates else self.mode, follows_device=False)

    @property
    def num_groups(self) -> int:
        """The number of groups of layers in which a copy arrives that steps may await; 0: no step awaits one."""
        return min(_NUM_GROUPS[self.mode], 1) if self.lands_whole else _NUM_GROUPS[self.mode]

    def begins(self, has_host: bool) -> tuple[str, ...]:
        """List the ways in which a request may begin whose adapter is not on the device, as mode/source."""
        modes = dict.fromkeys(("wait", "layerwise" if self.mode == "auto" else self.mode))
        sources = (*("host",) * has_host, "files")
        return tuple(f"{mode}/{source}" for mode in modes for source in sources)

    @property
    def wanted_workers(self) -> int:
        """The number of threads to start on this machine."""
        return self.workers_of(num_cores())

    def workers_of(self, cores: int) -> int:
        """Count the threads on a machine of ``cores`` cores."""
        if self.mode != "cpu":
            return 0
        if self.cpu_workers != _AUTO:
            return int(self.cpu_workers)
        return max(1, min(cores // 2, _MOST_AUTO_WORKERS))

    def share(self, replica: int, cores: int) -> "ColdStartConfig":
        """Return the settings of one of several engines of a machine. ``cores``: the cores of its share."""
        if self.mode != "cpu":
            return self
        count = self.workers_of(cores)
        return dataclasses.replace(self, cpu_workers=str(count), cores_before=replica * count)


def check_host_pool(config: ColdStartConfig, host_pool: int | None) -> None:
    """Raise ConfigError where the CPU would have no host pool to compute from. ``host_pool``: its size in
    bytes or pages; None: not known yet."""
    if config.mode == "cpu" and host_pool == 0:
        raise ConfigError("--cold-start cpu needs a host pool, and there is none")
