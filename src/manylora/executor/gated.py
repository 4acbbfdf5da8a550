"""Gates inside captured steps: kernels that wait until what the step's rows read has landed.

Owns what these gates tell. Where operations have no such kernel, or the device cannot tell kernels what has
landed, there are none, and a captured step waits for the whole of its copies before it begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from manylora.devices.device import Device
from manylora.kernels.ops import Ops
from manylora.memory.gates import LandedWords

NUMBERS = 2
"""Of a step: what its gates wait for (``Awaited.numbers``)."""


@runtime_checkable
class _PassesGates(Protocol):
    def pass_gate(
        self, landed: torch.Tensor, wanted: torch.Tensor, told: torch.Tensor, is_first: bool
    ) -> None:
        """What is issued after it begins once ``landed`` [1] is at least ``wanted[1]``, or the step's gates were
        shut for ``wanted[0]`` nanoseconds. ``told`` [2]: for how many they were, and 1 where that was too long;
        the first gate begins it anew. All int64."""


def step_gates(ops: Ops, words: LandedWords | None, device: Device) -> StepGates | None:
    """The gates of captured steps; None where there are none."""
    return StepGates(ops, words, device) if words is not None and isinstance(ops, _PassesGates) else None


class StepGates:
    """Shared by all captures, which run one after another."""

    def __init__(self, ops: _PassesGates, words: LandedWords, device: Device) -> None:
        self._ops = ops
        self._words = words
        self._device = device
        self._told = device.zeros((2,), torch.int64)

    def before_layer(self, wanted: torch.Tensor) -> Callable[[int], None]:
        """For StepBatch. ``wanted``: on the device, the step's ``NUMBERS``."""
        group_of = {first: group for group, (first, _) in enumerate(self._words.groups)}

        def pass_gate(layer: int) -> None:
            group = group_of.get(layer)
            if group is not None:
                self._ops.pass_gate(self._words.words[group : group + 1], wanted, self._told, group == 0)

        return pass_gate

    def told(self) -> Callable[[], np.ndarray]:
        """What the gates of the step that was issued last will have told; for ``Awaited.passes_on_device``."""
        return self._device.download(self._told)
