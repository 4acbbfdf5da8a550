"""Which adapter is merged into the base's weights, and which sequences may run meanwhile (dLoRA §4).

A ``MergePolicy`` chooses, ``state.MergeState`` has it carried out, ``batching.MergedBatching`` composes
steps by it. Where nothing is ever merged none of this is used.
"""

from __future__ import annotations

from manylora.config import MERGE_POLICIES, PolicyConfig, place_of
from manylora.config.named import imported_class
from manylora.policy.merging.choice import MergePolicy
from manylora.policy.merging.times import StepSeconds


def merge_policy(config: PolicyConfig, times: StepSeconds) -> MergePolicy:
    """The policy that ``--merge`` names; not for ``unmerged``, which needs none."""
    found = imported_class("merge mode", place_of("merge", MERGE_POLICIES, config.merge.mode), MergePolicy)
    return found(config, times)
