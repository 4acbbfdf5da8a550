"""What CaraServe's router needs of the demo model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from manylora_lab.sim.shipped import find_profile

from manylora.pricing.profile import save_profile
from manylora.pricing.ranks import RankLine, RankLines

LINES = RankLines(
    bgmv=RankLine(1e-4, 5e-3, 0.9, 20),
    mbgmv=RankLine(2e-4, 6e-3, 0.9, 20),
    prefill=RankLine(1e-3, 5e-3, 0.9, 9),
)


def write_profile(path: Path, name: str = "cpu-demo", lines: RankLines | None = LINES) -> str:
    """A shipped profile with its steps by rank."""
    save_profile(dataclasses.replace(find_profile(name), ranks=lines), path)
    return str(path)


def objective(folder: Path) -> tuple[str, ...]:
    """Flags of a start under ``caraserve``."""
    return ("--slo-tpot", "0.1", "--profile", write_profile(folder / "profile.json"))
