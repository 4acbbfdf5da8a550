"""Declares the events and commands of a router: the interface between a cluster's decisions and its processes.

They are records of numbers, texts and tuples of these, so that each can be sent to another process and kept
in a journal. ``Timer`` and ``SetTimer`` are those of a replica. This module does not know how a router
decides.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from manylora.protocol.commands import SetTimer, Status
from manylora.protocol.events import Timer
from manylora.types import AdapterId, RequestError, RequestId

ReplicaId = int
"""The number of a place for a replica. Each replica in it has its own epoch, higher than the one before."""

NOWHERE, ON_HOST, ON_DEVICE = 0, 1, 2
"""The tiers in which a replica may have an adapter. Where it is in two, the higher one counts."""

BLOCK_TOKENS = 64
"""The number of tokens in a block that is hashed for ``Asked.prefix``."""


class StepPlane(NamedTuple):
    """Seconds of a decode step, as a plane over its work. A step takes the largest value of its planes."""

    step_s: float
    row_s: float = 0.0
    kv_token_s: float = 0.0
    """Seconds for each position that a row attends to."""
    adapter_s: float = 0.0
    """Seconds for each distinct adapter."""
    adapter_page_s: float = 0.0
    """Seconds for each page of these adapters."""
    rank_s: float = 0.0
    """Seconds for each unit of rank of each request, for kernels that share nothing between rows (CaraServe's
    MBGMV)."""
    padded_rank_s: float = 0.0
    """Seconds for each row and unit of the largest rank, for kernels that pad (BGMV)."""


class RankCosts(NamedTuple):
    """Seconds in the cost model of CaraServe's router: slope and base of a decode step, and of a prefill. The
    decode slope is per unit of rank, as the router's kernel counts it; the prefill slope is per token."""

    decode_slope_s: float
    decode_base_s: float
    prefill_slope_s: float
    prefill_base_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """The facts of a replica while its epoch lasts. Lengths are in tokens, times in seconds.

    ``max_seqs``: sequences that run at once; ``adapter_pages``: device pages that adapters may take;
    ``token_s``: time of one token of a prompt; ``page_in_s``: of one page from the host to the device;
    ``page_read_s``: of one page of an adapter from its files. ``numerics``: replicas with the same text
    compute equal tokens. Where the seconds are equal too, replicas are of one kind. ``rank_costs``: given
    where replicas differ; None: as in the router's settings.
    """

    num_pages: int
    page_tokens: int
    max_model_len: int
    max_seqs: int
    planes: tuple[StepPlane, ...]
    token_s: float
    page_in_s: float
    page_read_s: float
    page_bytes: int = 2 * 2**20
    adapter_pages: int | None = None
    num_host_pages: int = 0
    numerics: str = ""
    rank_costs: RankCosts | None = None


# ---------------------------------------------------------------- events


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A front end's wish to have a request served: ``samples`` of at most ``max_tokens`` tokens each.

    ``prefix``: for each full block of ``BLOCK_TOKENS`` tokens of the prompt, a 64-bit hash of it and all
    blocks before, rooted at the adapter's version and the cache scope. ``attempts``: the number made before.
    Where the request is live and its present attempt is among them, the front end has given that attempt up.
    ``generated``: the number of tokens so far of each sample. ``waited_s``: time since the request first
    arrived. ``failures``, ``deaths``: the values of the last Assign, in case another router made it.
    """

    request: RequestId
    adapter: AdapterId
    prompt_tokens: int
    max_tokens: int
    prefix: tuple[int, ...] = ()
    samples: int = 1
    attempts: int = 0
    generated: tuple[int, ...] = ()
    waited_s: float = 0.0
    failures: int = 0
    deaths: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A front end's report to a new router that this replica serves a request already, in the attempt
    ``asked.attempts``. Where that epoch of the replica is not up, the attempt is lost."""

    asked: Asked
    replica: ReplicaId
    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """The number of tokens that a sample has."""

    request: RequestId
    sample: int
    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """The end of all samples of the request. ``output_tokens``: their mean number of tokens.

    ``blocks``: the blocks that each reply has filled, hashed as in ``Asked.prefix``. So the router knows that
    the next turn of a conversation is cached where the last one ended.
    """

    request: RequestId
    output_tokens: int = 0
    blocks: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Cancelled:
    """A request that the client has cancelled."""

    request: RequestId


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaUp:
    """The notice that a replica serves. One that was down comes back only with a higher epoch. ``lacks``: see
    Lacks."""

    replica: ReplicaId
    epoch: int
    facts: ReplicaFacts
    lacks: tuple[AdapterId, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Lacks:
    """The listed adapters that the replica of this epoch cannot serve from now on."""

    replica: ReplicaId
    epoch: int
    adapters: tuple[AdapterId, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's state at one moment.

    ``seen_upto``: the number of the last Assign whose request the replica had at that moment.
    """

    replica: ReplicaId
    epoch: int
    seen_upto: int
    status: Status


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaDown:
    """The end of this epoch of a replica.

    ``is_crash``: it died by itself, and requests may be to blame. These are ``blamed``, or all that it had
    accepted where that is None. No request is to blame where the replica was ended.
    """

    replica: ReplicaId
    epoch: int
    reason: str = ""
    is_crash: bool = True
    blamed: tuple[RequestId, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Drain:
    """An order to give the replica no more work. ``migrate``: move its requests at once, not only after the
    time allowed."""

    replica: ReplicaId
    migrate: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class MoveAsked:
    """An operator's order to move the request to this replica at any cost."""

    request: RequestId
    replica: ReplicaId


@dataclasses.dataclass(frozen=True, slots=True)
class Withdrawn:
    """The release of a request by the replica of this attempt, with the number of tokens of each sample."""

    request: RequestId
    attempt: int
    positions: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Listed:
    """The notice that from this revision of the registry on, requests may name the adapter. ``num_pages``:
    its pages when resident."""

    adapter: AdapterId
    rank: int
    num_pages: int
    revision: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Unlisted:
    """The notice that no new request may name the adapter; earlier ones are served."""

    adapter: AdapterId
    revision: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Solved:
    """The answer to Solve: for each request the share of each replica, and the least value that any solution
    can have. Without ``shares`` there was no solution in time."""

    number: int
    shares: tuple[tuple[float, ...], ...] = ()
    bound_s: float = 0.0


RouterEvent = (
    Asked | Held | Progress | Ended | Cancelled | ReplicaUp | ReplicaReport | ReplicaDown | Drain
    | MoveAsked | Withdrawn | Listed | Unlisted | Lacks | Solved | Timer
)  # fmt: skip
"""The events of a router."""


# ---------------------------------------------------------------- commands


@dataclasses.dataclass(frozen=True, slots=True)
class Assign:
    """An order to the front end to send the request to this replica, with the tokens that it has accepted so far.

    ``number`` counts the replica's assignments. ``resume``: the number of tokens of each sample that the
    router knows of. ``failures``: the number of earlier attempts that were lost; ``deaths``: the number of
    those for which the request is blamed.
    """

    request: RequestId
    attempt: int
    replica: ReplicaId
    number: int
    resume: tuple[int, ...] = ()
    failures: int = 0
    deaths: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Withdraw:
    """An order to the replica to end the request after the step in flight, and to answer with Withdrawn."""

    request: RequestId
    attempt: int
    replica: ReplicaId


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """An order to the replica to keep the adapter on its device, within the share reserved for such copies."""

    adapter: AdapterId
    replica: ReplicaId


@dataclasses.dataclass(frozen=True, slots=True)
class Unplace:
    """An end of the order to keep the adapter."""

    adapter: AdapterId
    replica: ReplicaId


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse:
    """A refusal of a request, or the end of one that was accepted."""

    request: RequestId
    error: RequestError


class ProgrammeReplica(NamedTuple):
    """A replica in dLoRA's programme. ``pages``: the pages that its requests and adapters in the programme
    may take together; ``page_s``: the time to swap one page beyond these."""

    replica: ReplicaId
    pages: int
    page_s: float


class ProgrammeRequest(NamedTuple):
    """A request in dLoRA's programme. ``source``: the index of its replica; ``run_s``: its remaining time
    there; ``move_s``: the time to compute it again elsewhere."""

    request: RequestId
    attempt: int
    source: int
    adapter: AdapterId
    pages: int
    run_s: float
    move_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Solve:
    """dLoRA's programme (§5.2), which Solved answers: the replica of each request, so that the last replica
    finishes soonest. ``adapters``: the pages of each; ``eta_s``: the time that an adapter adds to a replica."""

    number: int
    replicas: tuple[ProgrammeReplica, ...]
    requests: tuple[ProgrammeRequest, ...]
    adapters: tuple[tuple[AdapterId, int], ...]
    eta_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class ScaleHint:
    """A hint that the cluster needs ``delta`` more replicas; a negative one names an empty replica."""

    delta: int
    reason: str
    replica: ReplicaId | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Fence:
    """An order to end the replica of this epoch if it still runs."""

    replica: ReplicaId
    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class AskReport:
    """An order to the replica to send a full report, since one was lost."""

    replica: ReplicaId


@dataclasses.dataclass(frozen=True, slots=True)
class Routed:
    """One decision, for people; only with ``RouterConfig.trace``. ``reason``: "new", "memory", "lost",
    "drain", "plan", ...; ``source``: the replica that had the request before."""

    request: RequestId
    attempt: int
    replica: ReplicaId
    reason: str
    waited_s: float
    source: ReplicaId | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """dLoRA's plan, for people; only with ``RouterConfig.trace``.

    ``value_s``: the time until the last replica finishes by the plan; ``before_s``: the same without any
    move; ``bound_s``: the solver's lower bound for all plans, or 0 where it has not answered.
    """

    number: int
    num_requests: int
    num_moves: int
    value_s: float
    before_s: float
    bound_s: float


RouterCommand = (
    Assign | Withdraw | Place | Unplace | Refuse | Solve | ScaleHint | Fence | AskReport
    | Routed | Planned | SetTimer
)  # fmt: skip
"""The commands of a router."""
