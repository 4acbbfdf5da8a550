"""Measures how much memory the machine, and this process's cgroups, can still give. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from manylora.config.declaring import ConfigError

_CGROUPS = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Return the bytes that the machine can give without swapping, within the limits of this process's
    cgroups."""
    return max(0, min([_machine_free_bytes(), *_cgroup_free_bytes()]))


def _machine_free_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        # Other systems than Linux do not report what is free: assume half.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError) as error:
        raise ConfigError("cannot find out how much memory this machine has") from error


def _cgroup_free_bytes() -> list[int]:
    """Return for each limited cgroup above this process its limit less the memory that it uses and cannot
    drop."""
    free = []
    for line in _own_cgroups():
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if line.startswith("0::"):
            files = ("memory.max", "memory.current", "inactive_file")
            root = _CGROUPS
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = _CGROUPS / "memory"
        else:
            continue
        # In a container the path may name folders that only the host sees; then the root's files hold the limit.
        folder = root / path.lstrip("/")
        for place in [folder, *folder.parents]:
            if place.is_relative_to(root) and (found := _limit(place, *files)) is not None:
                free.append(found)
    return free


def _own_cgroups() -> list[str]:
    """Return lines of the form hierarchy:controllers:path."""
    try:
        return Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []


def _limit(folder: Path, limit_file: str, usage_file: str, reclaimable: str) -> int | None:
    try:
        limit = (folder / limit_file).read_text().strip()
        if limit == "max":
            return None
        used = int((folder / usage_file).read_text())
        for line in (folder / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name == reclaimable:
                used -= int(value)
        return int(limit) - used
    except (OSError, ValueError):
        return None
