"""The front end of a simulated cluster: hands a stream's requests over, and keeps what came of each.

It owns the tokens that it has accepted: what an attempt that is not the last still says is dropped. Does not know
how replicas are chosen.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from manylora.config.declaring import ConfigError
from manylora.config.policy import PolicyConfig
from manylora.config.queueing import QueueConfig
from manylora.protocol.commands import Admitted, ClientCommand, Emit, Finish, Ready, Reject
from manylora.protocol.hashing import prefix_hashes, reply_hashes
from manylora.protocol.routing import Asked, Assign, Ended, ReplicaId
from manylora.types import BASE, Request, RequestId
from manylora_lab.sim.prompts import StreamTurns, client_name, request_of
from manylora_lab.sim.replay import Outcome
from manylora_lab.workloads.stream import Stream, StreamRequest

PROGRESS_TOKENS = 32
"""A front end tells the router of a request's first token, and of every so many."""


def most_output(configs: Sequence[PolicyConfig]) -> int:
    """Tokens of a prompt and a reply that each of these replicas can hold beside an adapter of half its pages."""
    return min(min(config.max_model_len, config.num_pages * config.page_tokens // 2) for config in configs)


class OpenRequest:
    """A request from its arrival, at ``arrived_s``, to its end. ``num_tokens``: those that were accepted;
    ``num_before``: of these, before the present attempt; ``num_cached``: what that one found in its replica's
    prefix cache."""

    __slots__ = (
        "arrived_s", "attempt", "num_before", "num_cached", "num_tokens", "outcome", "prompt_tokens", "replica",
        "request",
    )  # fmt: skip

    def __init__(self, request: Request, outcome: Outcome, arrived_s: float) -> None:
        self.request = request
        self.arrived_s = arrived_s
        self.outcome = outcome
        self.prompt_tokens = len(request.prompt)
        self.attempt = 0
        self.replica: ReplicaId | None = None
        self.num_tokens = self.num_before = self.num_cached = 0

    @property
    def generated(self) -> tuple[int, ...]:
        """The tokens that were accepted; a simulated device counts on from the prompt's last."""
        first = self.request.prompt[-1] + 1
        return tuple(range(first, first + self.num_tokens))

    def as_ended(self) -> Ended:
        """What a router is told of its end."""
        request = self.request
        blocks = reply_hashes(request.adapter, request.cache_scope, request.prompt, self.generated)
        return Ended(request.id, self.num_tokens, blocks)


class FrontEnd:
    """Of one stream. ``began_s``: the moment from which the stream's arrivals count; outcomes do likewise."""

    def __init__(
        self, stream: Stream, queue: QueueConfig, drops: bool, answer_s: float, most_tokens: int | None = None
    ) -> None:
        """``drops``: whether early abort may refuse requests; ``answer_s``: from a step's end to its tokens;
        ``most_tokens``: a prompt and its reply together, as far as the router is told; None: it is told how long
        the reply will be."""
        self.stream = stream
        self.outcomes: list[Outcome] = []
        self.began_s = 0.0
        self.last_news_s = 0.0
        self.served: dict[ReplicaId, list[Outcome]] = {}
        """By the replica that gave the last token, or dropped the request."""
        self.moved_from: collections.Counter[ReplicaId] = collections.Counter()
        self.recomputed_on: collections.Counter[ReplicaId] = collections.Counter()
        """Tokens of requests that came from another replica, which were computed again."""
        self.open: dict[RequestId, OpenRequest] = {}
        self._num_handed = 0
        self._prompts = StreamTurns(stream)
        self._queue = queue
        self._drops = drops
        self._answer_s = answer_s
        self._most_tokens = most_tokens
        self._longest = max(request.output_tokens for request in stream.requests)

    # ------------------------------------------------------------ arrivals

    @property
    def next_arrival_s(self) -> float:
        """When the next of the stream's requests comes; infinite after the last."""
        requests, number = self.stream.requests, self._num_handed
        return self.began_s + requests[number].arrival_s if number < len(requests) else math.inf

    @property
    def is_done(self) -> bool:
        """Whether every request has come and has ended."""
        return not self.open and self._num_handed == len(self.stream.requests)

    def next_request(self) -> StreamRequest | None:
        """The next of the stream; None where it is a turn that has to wait for the reply before it."""
        request = self.stream.requests[self._num_handed]
        self._num_handed += 1
        return request if self._prompts.is_free(request) else None

    def ask(self, request: StreamRequest, moment: float) -> Asked:
        """The request comes now; what the router is asked."""
        prompt, said = self._prompts.take(request)
        name = f"{request.conversation}-{request.turn}"
        outcome = Outcome(request, len(prompt), moment - self.began_s, said)
        self.outcomes.append(outcome)
        adapter = BASE if request.adapter is None else request.adapter + 1
        share = self._queue.shares.get(client_name(request.adapter), 1.0)
        made = request_of(name, adapter, prompt, request.output_tokens, share)
        self.open[name] = OpenRequest(made, outcome, moment)
        self.last_news_s = moment
        allowed = request.output_tokens
        if self._most_tokens is not None:
            # All clients allow as much, as far as a replica could hold it; the router is not to know more.
            allowed = max(allowed, min(self._longest, self._most_tokens - len(prompt)))
        return Asked(
            name,
            adapter,
            len(prompt),
            allowed,
            prefix_hashes(adapter, made.cache_scope, prompt),
        )

    def send(self, assign: Assign) -> OpenRequest | None:
        """The request that is to go to a replica, as it is then; None where it has ended meanwhile."""
        found = self.open.get(assign.request)
        if found is None:
            return None
        if found.replica is not None:
            self.moved_from[found.replica] += 1
        found.attempt, found.replica = assign.attempt, assign.replica
        found.num_before, found.num_cached = found.num_tokens, 0
        return found

    # ------------------------------------------------------------ news of requests

    def hear_token(self, replica: ReplicaId, command: Emit, now: float) -> int | None:
        """Accept a token; how many there are, where that is to be told to the router."""
        found = self.open.get(command.request)
        if found is None or found.replica != replica or command.position != found.num_tokens:
            return None  # of an attempt that is not the last
        outcome = found.outcome
        outcome.end_s = now - self.began_s + self._answer_s
        found.num_tokens = count = found.num_tokens + 1
        outcome.num_tokens = count
        if outcome.said is not None:
            outcome.said.append(command.token)
        if count == 1:
            outcome.first_s = outcome.end_s
            return 1
        return count if count % PROGRESS_TOKENS == 0 else None

    def hear(self, replica: ReplicaId, command: ClientCommand, now: float) -> None:
        """Note when a request was admitted, and when what it waits for was there."""
        match command:
            case Admitted():
                found = self.open.get(command.request)
                if found is not None and found.replica == replica:
                    found.num_cached = command.num_cached
                    if found.attempt > 1:
                        num_tokens = found.prompt_tokens + found.num_before
                        self.recomputed_on[replica] += num_tokens - command.num_cached
                    if not found.num_before:
                        found.outcome.num_cached = command.num_cached
                        found.outcome.queue_s = now - self.began_s - found.outcome.handed_s
            case Ready():
                found = self.open.get(command.request)
                if found is not None and found.replica == replica and not found.num_before:
                    found.outcome.adapter_s, found.outcome.kv_s = command.adapter_s, command.kv_s
            case Reject():
                raise ConfigError(f"the workload does not fit: {command.error.message}")

    def end(
        self, replica: ReplicaId, command: Finish, now: float
    ) -> tuple[OpenRequest, StreamRequest | None] | None:
        """The request that has ended, and the turn that waited for its reply; None where this is no news."""
        found = self.open.get(command.request)
        if found is None or found.replica != replica:
            return None
        if command.error is not None and (not self._drops or command.error.status != 503):
            # On a simulated device nothing fails, so it must be early abort.
            raise RuntimeError(f"request {command.request} failed: {command.error.message}")
        return self._close(found, now, is_dropped=command.error is not None)

    def refuse(self, request: RequestId, status: int, message: str, now: float) -> StreamRequest | None:
        """The router serves the request no further; returns the turn that waited for its reply."""
        if status != 503:
            raise ConfigError(f"the workload does not fit: {message}")
        _, following = self._close(self.open[request], now, is_dropped=True)
        return following

    def _close(
        self, found: OpenRequest, now: float, is_dropped: bool
    ) -> tuple[OpenRequest, StreamRequest | None]:
        del self.open[found.request.id]
        if found.replica is not None:
            self.served.setdefault(found.replica, []).append(found.outcome)
        self.last_news_s = now
        if is_dropped:
            found.outcome.is_dropped, found.outcome.end_s = True, now - self.began_s + self._answer_s
        return found, self._prompts.ended(found.outcome.request)
