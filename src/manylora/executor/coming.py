"""The copies to the device that steps may await: their gates, from the command on until no step can name them."""

from __future__ import annotations

from manylora.memory.gates import Awaited, Gate, layer_groups
from manylora.protocol import RunStep, SwapPages
from manylora.types import CopyId


class Coming:
    """Gates by copy. Used by the step loop's thread."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._gates: dict[CopyId, Gate] = {}

    def gate(self, command: SwapPages) -> Gate:
        """A gate for a copy that is about to start. Raises ValueError for one from the device."""
        if not command.to_device:
            raise ValueError("only copies to the device have groups")
        gate = self._gates[command.copy] = Gate(layer_groups(self._num_layers, command.groups))
        return gate

    def awaited(self, step: RunStep) -> Awaited:
        """What the step has to pass. Raises ValueError where it names a copy that is not known."""
        unknown = [wanted.copy for wanted in step.awaits if wanted.copy not in self._gates]
        if unknown:
            raise ValueError(f"the step awaits copy {unknown[0]}, which is not on its way")
        return Awaited([(self._gates[wanted.copy], wanted.sequences) for wanted in step.awaits])

    def answered(self) -> list[CopyId]:
        """The copies that have been answered."""
        return [copy for copy, gate in self._gates.items() if gate.is_answered]

    def forget(self, copies: list[CopyId]) -> None:
        """No step will name these any more."""
        for copy in copies:
            del self._gates[copy]
