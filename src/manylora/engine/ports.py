"""The connections of a replica: clients, the executor, the catalog of adapters, the trace.

Turns items of the inbox into the replica's events, and its commands into commands of the executor and deltas of
clients. Owns no policy and no tensor.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import queue
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from manylora.config.policy import PolicyConfig
from manylora.engine.catalog import Catalog
from manylora.engine.client import Delta, EngineDead, EngineStats, GenerationRequest, Meters
from manylora.engine.journal import TraceWriter
from manylora.engine.outbox import Outbox
from manylora.policy.cache_policies import adapter_pages_limit
from manylora.protocol import commands, events
from manylora.protocol.executor import AdapterChecked, Executor, ExecutorLost, ExecutorState, StepResult
from manylora.reports import AdapterUse
from manylora.types import BASE, AdapterId, EngineInfo, Request, RequestError

log = logging.getLogger(__name__)

Routes = Mapping[type, Callable[[Any, float], object]]
"""The method that carries out each kind of command, given the command and the moment at which it was
commanded."""

MAX_FAILED_STEPS = 3
"""Steps that may fail in a row before the device is taken for broken, not counting steps that fail with
another."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StatusAsked:
    """An item of the inbox: a router's question for a Status."""

    is_full: bool
    future: concurrent.futures.Future[commands.Status]


StatsAsked = concurrent.futures.Future[EngineStats]
"""An item of the inbox: a question for a snapshot."""


class EnginePorts:
    """Bring a replica its events and carry out its commands.

    The methods belong to the loop's thread and are not called after ``close``, unless they say otherwise.
    """

    def __init__(
        self,
        config: PolicyConfig,
        executor: Executor,
        info: EngineInfo,
        inbox: queue.SimpleQueue[object],
        clock: Callable[[], float],
        trace: TraceWriter | None,
    ) -> None:
        self._info = info
        self._by_key = config.queue.fair_by == "key"
        self._shares = config.queue.shares
        self._executor = executor
        self._inbox = inbox
        self._start_s = clock()
        self._trace = trace
        # A request needs a page beside its adapter's.
        limit = min(adapter_pages_limit(config), config.num_pages - 1)
        self.catalog = Catalog(executor, inbox.put, config.num_pages, limit)
        self._uses: dict[AdapterId, AdapterUse] = {}
        self._outbox = Outbox(clock)
        self.deliver: Callable[[list[Delta]], None]
        """The receiver of each round's deltas, which is set before the loop runs."""
        self._meters = Meters()
        self._state = ExecutorState()
        # Requests that have arrived and that the replica does not know yet.
        self._arrived: collections.deque[tuple[Request, GenerationRequest]] = collections.deque()
        self._more_follow = False  # after the last of them, at once
        self._in_flight: collections.deque[int] = collections.deque()  # steps, oldest first
        self._results: dict[int, StepResult] = {}  # of these, that have ended
        self._failed_steps = 0
        self._asked: set[StatsAsked] = set()  # and not answered
        self._status_asked: collections.deque[StatusAsked] = collections.deque()  # likewise, the oldest first
        self._reporting: list[StatsAsked] = []  # of these, the report's
        executor.connect(self._receive)

    # ------------------------------------------------------------ what comes in

    def _receive(self, answer: object) -> None:
        """Take an answer of the executor, a DeviceEvent, on any thread.

        Answers that a hanging loop must not hold up do not go through the inbox; nor do steps, whose end the
        loop waits for: storing and taking one entry of a dict relies on the GIL.
        """
        match answer:
            case StepResult():
                self._results[answer.done.step] = answer
            case ExecutorState():
                self._state = answer
            case AdapterChecked():
                self.catalog.checked(answer)
            case _:
                self._inbox.put(answer)

    def ask_stats(self) -> StatsAsked:
        """Ask for a snapshot; from any thread."""
        future: StatsAsked = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # A cancelled one cannot be answered: the loop would end of it.
        # Not only in the inbox: a loop may take it from there and hang before it answers.
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        self._inbox.put(future)
        return future

    def ask_status(self, is_full: bool) -> concurrent.futures.Future[commands.Status]:
        """Ask for a Status; from any thread."""
        asked = StatusAsked(is_full, concurrent.futures.Future())
        asked.future.set_running_or_notify_cancel()
        self._status_asked.append(asked)
        self._inbox.put(asked)
        return asked.future

    def take(self, item: object) -> Iterator[events.Event]:
        """Turn an item of the inbox into events, perhaps later.

        Requests that come together are reported together, before anything that comes after them.
        """
        if isinstance(item, GenerationRequest):
            self._open(item)
            return
        yield from self._arrivals()
        if isinstance(item, concurrent.futures.Future):
            self._reporting.append(item)
            self._executor.obey(commands.ReportState())
            yield events.ReportDue("changed")
            return
        match item:
            case ExecutorLost():
                raise RuntimeError(item.reason)
            case StatusAsked():
                yield events.StatusDue(item.is_full)
                return
            case events.AdapterAdded():
                self._note_uses([AdapterUse(item.adapter, "absent", item.num_pages, 0, 0)])
            case events.AdapterRemoved():
                self._uses.pop(item.adapter, None)
            case events.AdapterRead():
                self._meters.adapter_read_s += item.read_s
                self._meters.adapter_read_failures += not item.ok
        yield item  # type: ignore[misc]  # the rest of the inbox are events

    def drained(self) -> Iterator[events.Event]:
        """Return the events that were held back until the inbox is empty."""
        if not self._more_follow:
            yield from self._arrivals()

    def _arrivals(self) -> Iterator[events.Event]:
        """Yield all requests since the last other event, marked as arriving together."""
        self._more_follow = False
        while self._arrived:
            request, asked = self._arrived.popleft()
            more = bool(self._arrived)
            yield events.Arrive(request, more, asked.resume, asked.closed, asked.waited_s, asked.attempt)

    def _open(self, asked: GenerationRequest) -> None:
        adapter = asked.version
        if adapter is None:
            adapter = BASE if asked.adapter is None else self.catalog.lookup(asked.adapter)
        elif adapter != BASE and self.catalog.card(adapter) is None:
            adapter = None  # it is not served
        more_ids = (token for token in asked.eos_ids if token < self._info.vocab_size)
        eos_ids = () if asked.params.ignore_eos else (*self._info.eos_ids, *more_ids)
        ends = tuple(dict.fromkeys((*eos_ids, *asked.params.stop_token_ids)))
        params = asked.params
        if params.seed is None:
            # Chosen here, outside the policy, so that the journal knows it and a replay draws the same.
            seed = self._info.seed
            params = dataclasses.replace(params, seed=secrets.randbits(63) if seed is None else seed)
        # An earlier attempt may still get tokens of steps, until the policy knows of this one.
        self._more_follow = asked.more and not asked.attempt
        client = str(asked.client) if self._by_key else asked.adapter or self._info.model
        scope, share = asked.cache_scope, self._shares.get(client, 1.0)
        request = Request(
            asked.id, adapter or BASE, asked.prompt, params, ends, scope, asked.priority, asked.client, share
        )
        error = None
        if not self._outbox.may_open(asked):
            error = RequestError(400, f"request id {asked.id!r} is already in use")
        elif adapter is None:
            error = RequestError(404, f"The model `{asked.adapter}` does not exist.", "model")
        elif asked.params.seed is None and any(asked.resume):
            error = RequestError(400, "a request that goes on needs the seed with which it began", "seed")
        if error is not None:
            self._outbox.refuse(request, asked, error)
            return
        self._outbox.open(request, asked)
        if not any(asked.resume):
            self._meters.prompt_tokens += len(asked.prompt)
        self._arrived.append((request, asked))

    # ------------------------------------------------------------ steps

    @property
    def is_busy(self) -> bool:
        """Whether a step is on its way."""
        return bool(self._in_flight)

    def wait(self) -> None:
        """Wait until the oldest step in flight has ended."""
        oldest = self._in_flight[0]
        while oldest not in self._results:
            self._executor.wait_step()

    def ended(self) -> Iterator[events.Event]:
        """Return the end of the oldest step, asked for when the replica knows of all that came before.

        The next step's end comes with it where that step is known to have failed: a step started in between
        would rely on it and fail too, and so would the one after that, without end.
        """
        results = [self._results.pop(self._in_flight.popleft())]
        while self._in_flight and self._in_flight[0] in self._results:
            if self._results[self._in_flight[0]].done.ok:
                break
            results.append(self._results.pop(self._in_flight.popleft()))
        if any(result.done.ok for result in results):
            self._failed_steps = 0
        # Of those that end together one failed by itself.
        self._failed_steps += not results[-1].done.ok
        for number, result in enumerate(results, 1):
            yield self._ended(result, more=number < len(results))

    def _ended(self, result: StepResult, more: bool) -> events.Event:
        done = result.done
        self._meters.steps += 1
        self._meters.step_s += done.device_s
        self._meters.generated_tokens += sum(len(tokens) for _, tokens in done.tokens)
        if not done.ok:
            log.error("step %d failed: %s", done.step, done.error)
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise RuntimeError(f"{self._failed_steps} steps in a row failed: {done.error}")
        self._outbox.logprobs = result.logprobs
        self._outbox.prompt_logprobs = result.prompt_logprobs
        return dataclasses.replace(done, more=True) if more else done

    @property
    def preparation_s(self) -> float:
        """Seconds spent on compiling and capturing so far: no step is late because of them. From any thread."""
        self._executor.obey(commands.ReportState())
        return self._state.preparation_s

    # ------------------------------------------------------------ commands

    def routes(self) -> Routes:
        """Return the routes of every kind of command but SetTimer, which is the loop's own."""
        return {
            **dict.fromkeys(commands.DEVICE_COMMANDS, self._obey),
            commands.RunStep: self._run_step,
            commands.SwapPages: self._begin_copy,
            **commands.handlers(self._outbox, commands.CLIENT_COMMANDS),
            **commands.handlers(self, commands.ENGINE_COMMANDS - {commands.SetTimer}),
        }

    def _obey(self, command: commands.DeviceCommand, now: float) -> None:
        self._executor.obey(command)

    def _run_step(self, command: commands.RunStep, now: float) -> None:
        # Where the device is the caller's own processor, issuing is running.
        self._send()
        self._in_flight.append(command.step)
        self._executor.obey(command)

    def _begin_copy(self, command: commands.SwapPages, now: float) -> None:
        # At a step's end the policy keeps and brings pages for later, which takes the host a while.
        self._send()
        self._executor.obey(command)

    def adapter_freed(self, command: commands.AdapterFreed, now: float) -> None:
        """Carry out AdapterFreed."""
        self.catalog.freed(command.adapter)

    def decided(self, command: commands.Decided, now: float) -> None:
        """Carry out Decided."""
        if self._trace is not None:
            self._trace.record(command, self.catalog.label(command.adapter), now - self._start_s)

    def report(self, command: commands.Report, now: float) -> None:
        """Carry out Report: give names to ids, and leave out ids whose names were removed."""
        gauges, info = command.gauges, self._info
        self._note_uses(gauges.adapters)
        key_of = str if self._by_key else self._name_of
        clients = (dataclasses.replace(each, name=key_of(each.client)) for each in gauges.clients)
        credits = (dataclasses.replace(each, name=self._name_of(each.adapter)) for each in gauges.credits)
        named = dataclasses.replace(
            gauges,
            adapters=(),
            clients=tuple(each for each in clients if each.name),
            credits=tuple(each for each in credits if each.name),
        )
        merged = None if gauges.merged == BASE else self._name_of(gauges.merged) or None
        meters = dataclasses.replace(self._meters)
        stats = EngineStats(
            named, command.counters, meters, self._state, merged, info.pristine_bytes, info.cold_start_kinds
        )
        for future in self._reporting:
            # The loop may have been given up meanwhile.
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_result(stats)
        self._reporting.clear()

    def status(self, command: commands.Status, now: float) -> None:
        """Carry out Status: answer questions in their order."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._status_asked.popleft().future.set_result(command)

    def _name_of(self, adapter: AdapterId) -> str:
        """Return an adapter's name, or the base's; "" if the name was removed."""
        if adapter == BASE:
            return self._info.model
        card = self.catalog.card(adapter)
        return "" if card is None else card.name

    # ------------------------------------------------------------ each adapter's state

    def adapter_uses(self) -> tuple[AdapterUse, ...]:
        """Return every served adapter as of the newest snapshot, in the order in which they were added.

        The table is updated by changes alone, so that the cost of a snapshot does not grow with thousands of
        adapters. Any thread may call this: it relies on the GIL, as values are copied in one piece.
        """
        return tuple(self._uses.values())

    def _note_uses(self, uses: Iterable[AdapterUse]) -> None:
        for use in uses:
            card = self.catalog.card(use.adapter)
            if card is not None:  # neither the base nor an adapter whose name was removed
                self._uses[use.adapter] = dataclasses.replace(use, name=card.name, rank=card.rank)

    # ------------------------------------------------------------ the end of a round, and of all

    def flush(self) -> None:
        """Send what was held back until the end of the round."""
        self._send()
        self._executor.flush()  # after what clients wait for
        if self._trace is not None:
            self._trace.flush()

    def _send(self) -> None:
        deltas = self._outbox.collect()
        if deltas:
            self.deliver(deltas)

    def abandon(self, error: EngineDead) -> None:
        """Fail every question and load that waits, as the loop has ended. Idempotent; from any thread."""
        self.catalog.fail_waiting(error)
        futures: list[concurrent.futures.Future[Any]] = [*self._asked]
        for future in [*futures, *(asked.future for asked in list(self._status_asked))]:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # answered at this very moment
                future.set_exception(error)

    def close(self, *, frees: bool = True) -> None:
        """Close what the ports hold; without ``frees`` memory is left to the system, as the process ends."""
        if self._trace is not None:
            self._trace.close()
        self._executor.close(frees=frees)
