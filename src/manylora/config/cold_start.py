"""Whether a step may begin while what some of its rows read is still on its way to the device."""

import dataclasses
from typing import Annotated

from manylora.config.declaring import ConfigError, Section, check_rules, setting
from manylora.rules import at_most, more_than, one_of

COLD_START_MODES = ("wait", "block", "layerwise")

_STALL = 0.02
_GROUPS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class ColdStartConfig(Section):
    """What a request does whose adapter, or whose cached KV, has to come from the host (CaraServe §4)."""

    mode: Annotated[str, one_of(COLD_START_MODES)] = setting(
        "wait",
        "when a request begins whose adapter or cached KV comes from the host: wait (when it is there; steps of "
        "others go on), block (at once; its step waits for it), layerwise (at once, layer group by layer group as "
        "it lands, within --cold-start-stall)",
        name="cold_start",
    )
    stall: Annotated[float, more_than(0), at_most(1)] = setting(
        _STALL,
        "layerwise: the share of others' time for which steps may stand still for copies",
        "SHARE",
        name="cold_start_stall",
    )

    def __post_init__(self) -> None:
        check_rules(self)
        if self.stall != _STALL and self.mode != "layerwise":
            raise ConfigError("--cold-start-stall needs --cold-start layerwise")

    @property
    def num_groups(self) -> int:
        """Groups of layers in which a copy lands that steps may await; 0: none does."""
        return {"wait": 0, "block": 1, "layerwise": _GROUPS}[self.mode]
