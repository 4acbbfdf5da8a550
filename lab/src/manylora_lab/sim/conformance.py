"""Does a recorded run come out the same again: in a fresh policy, and in the simulator's loop?

Two questions to the journal of a real engine, which says what the replica was told and when, and, by fingerprint,
what it commanded.

**Replay** (``replay_difference``): events and moments are all fed; the commands are held against the fingerprints
of those that the live process obeyed, event by event. Equal: the policy read nothing but its events (no clock, no
random source, no order of a hash), and the journal is a complete account of its decisions.

**Simulation** (``simulation_difference``): fed are

- what came unasked (Arrive, Abort, AdapterAdded, AdapterRemoved), at its moment;
- how long each copy and read took, from its command until the loop heard of it, and what the answer said (tokens
  drawn, failures, seconds); how long each step kept the loop, until it turned to anything else;
- how long after the moment that it was set for each timer was heard;
- of what stood in line, how long the loop was busy with what stood before it.

Not fed are the commands, when they were given, and the order of events: steps, copies, reads and timers begin when
the policy in the simulator commands them, and ``loop.VirtualLoop``, the very loop on which ``replay.Replay`` runs,
hands over what is due first. Compared are events, moments to the last bit, and commands. Equal: given true
durations, the simulator's loop and policy decide as the engine did. Not proved is that the durations in ``costs``
are true, nor that copies queue on ``device``'s lanes as on real ones: their waiting is in the measured times.

A journal knows when the loop turned to an event, not when it came. While the loop waits, that is the same. While a
step runs the loop is deaf: what it turns to between RunStep and StepDone came during the step, or while the loop
handled what had. Such events are fed somewhere inside the step, and a timer at the moment it was set for; that the
loop holds them back until the step has ended, tells the timer after the others and StepDone last, is its doing.
So the time of a copy that lands during a step is known only to within that step, and of one that began and landed
while the loop caught up it can be negative. What durations cannot give is the order of two events that came during
one step: it is the inbox's, kept by feeding them one after the other. Something that came after the loop's last
look into the inbox, but before StepDone was told, is in the journal during the next step, and is fed there. Two
events of one moment while nothing runs would be a tie that only the order of their commands breaks; a clock of
nanoseconds gives none.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from manylora.config.policy import PolicyConfig
from manylora.policy.replica import Replica
from manylora.protocol.events import Event
from manylora_lab.sim.recorded import RecordedLoop, Recording, Told, measured

_SHOWN = 160
"""Characters of a value in a report."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first. ``number``: of the event, from 1, so that a journal has it on line ``number + 1``."""

    number: int
    now: float
    event: Event
    what: str

    def __str__(self) -> str:
        return f"event {self.number} at {self.now:.9f} s, {_short(self.event)}: {self.what}"


class PolicyFailed(Exception):
    """The policy raised on an event: what it was told does not fit what it had commanded."""

    def __init__(self, number: int, now: float, event: Event, error: Exception) -> None:
        what = f"the policy fails here: {type(error).__name__}: {error}"
        self.difference = Difference(number, now, event, what)
        super().__init__(str(self.difference))


def recorded_commands(
    config: Any, events: Iterable[tuple[float, Any]], machine: Callable[[Any], Any] = Replica
) -> Iterator[Told]:
    """Each event with what a fresh replica, or another ``machine`` of this config, commands at it; raises
    PolicyFailed."""
    fresh = machine(config)
    for number, (now, event) in enumerate(events, 1):
        try:
            yield Told(now, event, fresh.handle(event, now))
        except Exception as error:
            raise PolicyFailed(number, now, event, error) from error


def replay_difference(
    config: Any,
    entries: Iterable[tuple[float, Any, str | None]],
    fingerprint: Callable[[Sequence[Any]], str],
    machine: Callable[[Any], Any] = Replica,
) -> Difference | None:
    """Where a fresh replica, or another ``machine``, commands something else than the live one did.

    ``entries``: moment, event and the fingerprint of what was commanded, as ``engine.journal.read_answered`` gives
    them; where that is None, nothing is compared. ``fingerprint``: the function that made them.
    """
    told_to, said_of = itertools.tee(entries)  # in step, so that none is kept
    replayed = recorded_commands(config, ((now, event) for now, event, _ in told_to), machine)
    try:
        for number, (told, (_, _, there)) in enumerate(zip(replayed, said_of), 1):
            here = fingerprint(told.commands)
            if there is not None and there != here:
                names = _short(told.commands)
                what = f"commands of fingerprint {there} there, {here} here: {names}"
                return Difference(number, told.now, told.event, what)
    except PolicyFailed as failure:
        return failure.difference
    return None


def simulation_difference(
    config: PolicyConfig, told: Sequence[Told], recording: Recording | None = None
) -> Difference | None:
    """Where the simulator's loop goes another way than a run did: "there" is the run, "here" the simulator.

    ``told``: the run, from ``recorded_commands``; ``recording``: what is fed, else all that is measured in it.
    """
    loop = RecordedLoop(config, recording or measured(told))
    for number, there in enumerate(told, 1):
        try:
            here = loop.next_told()
        except Exception as error:
            return PolicyFailed(number, there.now, there.event, error).difference
        what = "nothing comes any more here" if here is None else _unlike(there, here)
        if what is not None:
            return Difference(number, there.now, there.event, what)
    return None


# ---------------------------------------------------------------- in words


def _unlike(there: Told, here: Told) -> str | None:
    """What differs, in words."""
    if there.event != here.event:
        return f"here comes {_short(here.event)} at {here.now:.9f} s"
    if there.now != here.now:
        return f"at {here.now:.9f} s here, {here.now - there.now:+.9f} s"
    if list(there.commands) == list(here.commands):
        return None
    pairs = enumerate(itertools.zip_longest(there.commands, here.commands), 1)
    number, (one, other) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    if type(one) is not type(other):
        return f"command {number} is {_short(one)} there, {_short(other)} here"
    path, one, other = _first_unlike(one, other, type(one).__name__)
    return f"command {number}, {path} is {_short(one)} there, {_short(other)} here"


def _first_unlike(there: object, here: object, path: str) -> tuple[str, object, object]:
    """The innermost first part in which two values differ, and the way to it."""
    for name, one, other in _parts(there, here):
        if one != other:
            return _first_unlike(one, other, path + name)
    return path, there, here


def _parts(there: object, here: object) -> Iterator[tuple[str, object, object]]:
    """Pairs of what two values of a kind are made of; none where they are not made alike."""
    if type(there) is not type(here):
        return
    names: Sequence[str] = getattr(there, "_fields", ())
    if dataclasses.is_dataclass(there):
        names = [field.name for field in dataclasses.fields(there)]
    if names:
        yield from ((f".{name}", getattr(there, name), getattr(here, name)) for name in names)
    elif isinstance(there, tuple) and isinstance(here, tuple) and len(there) == len(here):
        yield from ((f"[{place}]", one, other) for place, (one, other) in enumerate(zip(there, here)))


def _short(value: object) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
