"""Records the journals that a change of form must replay: ``python -m tests.proof.record [NAME ...]``.

A name is a journal's, or the beginning of several; without any, all are recorded. To be run where behaviour was
meant to change, never to make a failing test pass. Every policy lives through every scene with two steps in
flight, most with one, too.
"""

from __future__ import annotations

import itertools
import lzma
import sys
import tempfile
import zlib
from pathlib import Path

from manylora_lab.baselines import ALL_CACHE_POLICIES

from manylora.engine.journal import JournalWriter
from tests.proof.life import DEEP, MERGING_SCENES, MOVING_SCENES, SCENES, SCORING_SCENES, Life

JOURNALS = Path(__file__).parent / "journals"
EVENTS = 3200
DEEP_EVENTS = 60
"""Of a life of deep chains, besides what ends it: hundreds of copies."""
LATER = ("fastlibra", "fastlibra-wom", "fastlibra-wos", "fastlibra-wol", "lru-ahead", "lru-drop")
"""Policies that came later: lives a quarter as long, with two steps in flight, so that all journals together stay
small."""
ABLATIONS = ("fastlibra-wom", "fastlibra-wos", "fastlibra-wol")
"""Of these, which live through the scenes of least memory alone."""


def record(policy: str, pipeline_depth: int, scene: str) -> bytes:
    """The journal of one life."""
    life = Life(
        policy,
        pipeline_depth,
        {**SCENES, **MERGING_SCENES, **MOVING_SCENES, **SCORING_SCENES, "deep": DEEP}[scene],
        zlib.crc32(f"{policy} {pipeline_depth} {scene}".encode()),
    )
    is_short = policy in LATER or scene in SCORING_SCENES
    life.live(DEEP_EVENTS if scene == "deep" else EVENTS // 4 if is_short else EVENTS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        writer = JournalWriter(path, life.config)
        for now, event, commands in life.told:
            writer.record(event, now)
            writer.answered(commands)
        writer.close()
        return path.read_bytes()


def main(names: list[str]) -> int:
    """Record the journals of these names, packed, into ``journals/``."""
    JOURNALS.mkdir(exist_ok=True)
    for policy, pipeline_depth, scene in lives():
        name = f"{policy}-{pipeline_depth}-{scene}.jsonl.xz"
        if names and not name.startswith(tuple(names)):
            continue
        packed = lzma.compress(record(policy, pipeline_depth, scene), preset=9 | lzma.PRESET_EXTREME)
        (JOURNALS / name).write_bytes(packed)
        print(name, len(packed), file=sys.stderr)
    return 0


def lives() -> list[tuple[str, int, str]]:
    """Cache policy, steps in flight and scene of each."""
    return [
        *itertools.product([policy for policy in ALL_CACHE_POLICIES if policy not in LATER], (1, 2), SCENES),
        *itertools.product([policy for policy in LATER if policy not in ABLATIONS], (2,), SCENES),
        *itertools.product(ABLATIONS, (2,), ("tiny", "crush")),
        *itertools.product(ALL_CACHE_POLICIES, (2,), ["deep"]),
        *itertools.product(["manylora"], (1, 2), [*MERGING_SCENES, *MOVING_SCENES]),
        *itertools.product(["manylora"], (2,), SCORING_SCENES),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
