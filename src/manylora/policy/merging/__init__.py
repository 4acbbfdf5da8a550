"""Which adapter is merged into the base's weights, and which sequences may run meanwhile (dLoRA §4).

A ``MergePolicy`` chooses, ``state.MergeState`` has it carried out, ``batching.MergedBatching`` composes
steps by it. Where nothing is ever merged none of this is used.
"""

from __future__ import annotations

from manylora.config import PolicyConfig
from manylora.policy.merging.choice import MergePolicy
from manylora.policy.merging.dlora import DloraMerging
from manylora.policy.merging.merged import AlwaysMerged
from manylora.policy.merging.regret import RegretMerging
from manylora.policy.merging.times import StepSeconds


def merge_policy(config: PolicyConfig, times: StepSeconds) -> MergePolicy:
    """The policy that ``--merge`` names; not for ``unmerged``, which needs none."""
    match config.merge.mode:
        case "merged":
            return AlwaysMerged(config.merge)
        case "dlora":
            return DloraMerging(config, times)
        case "manylora":
            return RegretMerging(config.merge, times)
    raise AssertionError(f"{config.merge.mode} merges nothing")
