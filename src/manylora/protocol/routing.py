"""The events and commands of a router: the seam between a cluster's decisions and its processes.

Records of numbers, texts and tuples of these, so that each can cross to another process and be kept in a
journal. ``Timer`` and ``SetTimer`` are those of a replica. Does not know how a router decides.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, get_args

from manylora.protocol.commands import SetTimer, Status
from manylora.protocol.events import Timer
from manylora.types import AdapterId, RequestError, RequestId

ReplicaId = int
"""A place for a replica. Each replica that runs there has an epoch of its own, higher each time."""

NOWHERE, ON_HOST, ON_DEVICE = 0, 1, 2
"""The tier in which a replica has an adapter; the higher one of two."""

BLOCK_TOKENS = 64
"""Tokens of a block that is hashed for ``Asked.prefix``."""


class StepPlane(NamedTuple):
    """Seconds of a decode step, as a plane over what it computes; a step takes the largest of its planes."""

    step_s: float
    row_s: float = 0.0
    kv_token_s: float = 0.0
    """For each position that a row attends to."""
    adapter_s: float = 0.0
    """For each distinct adapter."""
    adapter_page_s: float = 0.0
    """For each page of these."""
    rank_s: float = 0.0
    """For each unit of rank of each request, of kernels that share nothing between rows (CaraServe's MBGMV)."""
    padded_rank_s: float = 0.0
    """For each row and unit of the largest rank, of kernels that pad (BGMV)."""


class RankCosts(NamedTuple):
    """Seconds as CaraServe's router counts them: of a decode step for each unit of rank, by the measure of the
    router's kernel, and besides; of a prefill for each token, and besides."""

    decode_slope_s: float
    decode_base_s: float
    prefill_slope_s: float
    prefill_base_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """The facts of a replica while its epoch lasts. Lengths in tokens, times in seconds.

    ``max_seqs``: sequences that run at once; ``adapter_pages``: device pages that adapters may take;
    ``token_s``: one token of a prompt; ``page_in_s``: one page from the host to the device; ``page_read_s``:
    one page of an adapter from its files; ``numerics``: replicas of one such class compute equal tokens. Where
    the seconds are equal too, replicas are of one kind. ``rank_costs``: where replicas differ; None: as the
    router's settings say.
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
    """A front end wants a request to be served: ``samples`` of at most ``max_tokens`` tokens each.

    ``prefix``: for each full block of the prompt's ``BLOCK_TOKENS`` a 64-bit hash of it and all before it,
    rooted at the adapter's version and the cache scope. ``attempts``: how many were made before; where the
    request is live and its present attempt is among them, the front end has given that one up. ``generated``:
    tokens so far of each sample. ``waited_s``: since the request first came. ``failures``, ``deaths``: what the
    last Assign said of these, should another router have made it.
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
    """A front end tells a new router that this replica serves a request already, in the attempt
    ``asked.attempts``. Where that epoch of the replica is not up, the attempt is lost."""

    asked: Asked
    replica: ReplicaId
    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """The number of tokens of a sample."""

    request: RequestId
    sample: int
    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """All samples of the request have ended, with so many tokens in the mean of them.

    ``blocks``: the blocks that each reply has filled, hashed as in ``Asked.prefix``; so the next turn of a
    conversation is known to be cached where the last one ended.
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
    """A replica serves. One that was down comes back with a higher epoch only. ``lacks``: see Lacks."""

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

    ``seen_upto``: the number of the last Assign whose request the replica had by then.
    """

    replica: ReplicaId
    epoch: int
    seen_upto: int
    status: Status


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaDown:
    """The end of this epoch of a replica. ``is_crash``: it died by itself, and requests may be to blame:
    ``blamed``, or all that it had accepted where that is not known (None). Nothing is, where it was ended."""

    replica: ReplicaId
    epoch: int
    reason: str = ""
    is_crash: bool = True
    blamed: tuple[RequestId, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Drain:
    """Give the replica no more work. ``migrate``: move its requests at once, not only after the time
    allowed."""

    replica: ReplicaId
    migrate: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class MoveAsked:
    """A person's order to move the request to this replica at any cost."""

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
    """From this revision of the registry on, requests may name the adapter. ``num_pages``: when resident."""

    adapter: AdapterId
    rank: int
    num_pages: int
    revision: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Unlisted:
    """No new request may name it; those that have come are served."""

    adapter: AdapterId
    revision: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Solved:
    """An answer to Solve: for each of its requests the share that each of its replicas gets, and the least
    value that any solution can have. Without ``shares`` there was no solution in time."""

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
    """Order the front end to send the request to this replica, with the tokens that it has accepted so far.

    ``number`` counts the replica's assignments. ``resume``: as many tokens of each sample as the router knows
    of. ``failures``, ``deaths``: attempts that were lost before, and those of them that the request is blamed
    for.
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
    """Order the replica to end the request after the step in flight, and to answer with Withdrawn."""

    request: RequestId
    attempt: int
    replica: ReplicaId


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Order the replica to keep the adapter on its device, within the share reserved for such copies."""

    adapter: AdapterId
    replica: ReplicaId


@dataclasses.dataclass(frozen=True, slots=True)
class Unplace:
    """End the order to keep the adapter."""

    adapter: AdapterId
    replica: ReplicaId


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse a request, or end it."""

    request: RequestId
    error: RequestError


class ProgrammeReplica(NamedTuple):
    """A replica in dLoRA's programme: ``pages`` is what its requests and adapters there may take together, and
    ``page_s`` what one page beyond that takes to swap."""

    replica: ReplicaId
    pages: int
    page_s: float


class ProgrammeRequest(NamedTuple):
    """A request in dLoRA's programme. ``source``: the index of its replica; ``run_s``: what is left of it
    there; ``move_s``: what computing it again takes elsewhere."""

    request: RequestId
    attempt: int
    source: int
    adapter: AdapterId
    pages: int
    run_s: float
    move_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Solve:
    """dLoRA's programme (§5.2), to be answered with Solved: which replica is to have each request so that the
    last of them is done soonest. ``adapters``: the pages of each; ``eta_s``: what an adapter adds to a
    replica."""

    number: int
    replicas: tuple[ProgrammeReplica, ...]
    requests: tuple[ProgrammeRequest, ...]
    adapters: tuple[tuple[AdapterId, int], ...]
    eta_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class ScaleHint:
    """Hint that the cluster needs ``delta`` more replicas; a negative one names an empty replica."""

    delta: int
    reason: str
    replica: ReplicaId | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Fence:
    """Fence the replica of this epoch: end it if it still runs."""

    replica: ReplicaId
    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class AskReport:
    """A report was lost: the replica is to answer with a full one."""

    replica: ReplicaId


@dataclasses.dataclass(frozen=True, slots=True)
class Routed:
    """One decision, for people; only with ``RouterConfig.trace``. ``reason``: "new", "memory", "lost", "drain",
    "plan", ...; ``source``: the replica it came from."""

    request: RequestId
    attempt: int
    replica: ReplicaId
    reason: str
    waited_s: float
    source: ReplicaId | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """dLoRA's plan, for people; only with ``RouterConfig.trace``. ``value_s``: the time until the last replica
    is done by it; ``before_s``: had nothing moved; ``bound_s``: no plan is done sooner, as the solver says, 0
    where none has answered."""

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

ROUTER_COMMANDS: frozenset[type] = frozenset(get_args(RouterCommand))
