"""Mistakes that the random histories of merging must find: each is one line of the policy that is wrong."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from manylora.policy.merging.batching import MergedBatching
from manylora.policy.merging.credits import Credits
from manylora.policy.merging.state import MergeState
from manylora.policy.replica import Replica
from manylora.policy.reservations import Reservations
from tests.policy.test_merging_properties import MergingMachine


class Mutant(NamedTuple):
    """A function of the policy, and what is put in place of some of its text."""

    name: str
    function: Callable[..., Any]
    old: str
    new: str


MUTANTS = [
    Mutant("drop the pin", MergeState._command, "tree.pin(tree.node(after))", "pass"),
    Mutant("a step before the restore has landed", MergeState.must_wait.fget, "self.switch is not None", "False"),  # type: ignore[attr-defined]
    Mutant(
        "free a paused row's KV", Reservations.pause, "sequence.pause(now)",
        "sequence.pause(now); self._residency.device.release(sequence.pages[sequence.num_shared:])",
    ),
    Mutant("removal leaves what is merged", MergeState._is_left_over, "return all(", "return False and all("),
    Mutant("removal frees what is merged", Replica._free_removed, "self._merging.pinned()", "[]"),
    Mutant("a switch between two steps is not told", MergeState.started, "return shape.merged", "return 0"),
    Mutant("others run beside the merged adapter", MergeState.choose, "only=self.adapter", "only=None"),
    Mutant("a failed switch is taken for done", MergeState.ended, "self.adapter = BASE", "pass"),
    Mutant("what was merged may leave at once", MergeState.pinned, "self.switch.before, ", ""),
    Mutant("a second switch before the first has ended", MergeState.choose, "self.switch is None and", "True or"),
    Mutant("paused sequences hold all others up", MergeState.is_stuck, "return self._gives_way", "return False"),
    Mutant("a displaced sequence keeps its row", MergedBatching.admit, "if self._displaced:", "if False:"),
    Mutant("the merged adapter is never let go", MergeState.ended, "self._unpin(switch.before)", "pass"),
    Mutant("credits from nowhere", Credits.transfer, "self.of(payer) - amount", "self.of(payer)"),
    Mutant("a paused sequence is taken for running", MergedBatching.runnable, "if self.may_run(sequence)", ""),
]  # fmt: skip

SETTINGS = settings(
    max_examples=400,
    stateful_step_count=50,
    deadline=None,
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def mutated(mutant: Mutant) -> Callable[..., Any]:
    source = textwrap.dedent(inspect.getsource(mutant.function))
    assert source.count(mutant.old) == 1, f"{mutant.old!r} is there once"
    source = source.replace(mutant.old, mutant.new).replace("@property\n", "")
    names, found = dict(vars(sys.modules[mutant.function.__module__])), dict[str, Any]()
    exec(compile(source, mutant.name, "exec"), names, found)
    function: Callable[..., Any] = found[mutant.function.__name__]
    return function


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_it_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = mutant.function.__qualname__.split(".")[0]
    kind = getattr(sys.modules[mutant.function.__module__], owner)
    function: Any = mutated(mutant)
    is_property = isinstance(inspect.getattr_static(kind, mutant.function.__name__), property)
    monkeypatch.setattr(kind, mutant.function.__name__, property(function) if is_property else function)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        run_state_machine_as_test(MergingMachine, settings=SETTINGS)
