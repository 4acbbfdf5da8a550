"""Declares the messages of a cluster's processes, by the link that they use.

Between a front end and the router, requests are described only by what routing needs. Tokens pass only
between front ends and replicas. This module does not know how a message is carried out.
"""

from __future__ import annotations

import msgspec

from manylora.config.sections import EngineSettings
from manylora.engine.client import EngineStats, GenerationRequest
from manylora.engine.wire import Deltas, Failed
from manylora.protocol import routing
from manylora.protocol.routing import ReplicaId
from manylora.reports import AdapterUse
from manylora.types import AdapterCard, AdapterId, EngineInfo, RequestError, RequestId

ROUTER, SUPERVISOR, FRONTEND, REPLICA = "router", "supervisor", "frontend", "replica"
NEWCOMER = "newcomer"
"""The role of a front end that was started by hand, until it knows what the cluster serves."""
PULLER = "puller"
"""The role of a replica on the link over which it copies adapters' files."""
RAY = "ray"
"""The role of the process that speaks to Ray. It has no link."""

# ---------------------------------------------------------------- the registry


class Listing(msgspec.Struct, frozen=True):
    """A revision of the registry: the state of one version of an adapter.

    ``state``: "loading", until replicas have it; "listed"; "leaving", when no new request may name it;
    "gone", when no replica has it any more. ``digest``: the digest of its files, or "" where these were not
    read.
    """

    revision: int
    id: AdapterId
    name: str
    path: str
    digest: str
    rank: int
    num_pages: int
    created_s: int
    state: str

    @property
    def card(self) -> AdapterCard:
        return AdapterCard(self.name, self.path, self.id, self.rank, self.num_pages, self.created_s)


# ---------------------------------------------------------------- front end -> router


class Note(msgspec.Struct, tag=True):
    """News of requests, oldest first. ``stale_tokens``: the number of tokens dropped so far because their
    attempt was not the last; ``recomputed_tokens``: the number that later attempts have computed again so
    far."""

    asked: list[routing.Asked] = []
    held: list[routing.Held] = []
    progress: list[routing.Progress] = []
    withdrawn: list[routing.Withdrawn] = []
    ended: list[routing.Ended] = []
    cancelled: list[routing.Cancelled] = []
    stale_tokens: int = 0
    recomputed_tokens: int = 0


class Synced(msgspec.Struct, tag=True):
    """The notice that all open requests have been reported: a front end's first message after them."""


class AdapterCall(msgspec.Struct, tag=True):
    """A call to load an adapter (``path``), in place of another of its name where ``replaces``, or to unload
    it (no path)."""

    call: int
    name: str
    path: str = ""
    replaces: bool = False


class HasRevision(msgspec.Struct, tag=True):
    """The notice that the front end has this revision of the registry."""

    revision: int


class AskStatus(msgspec.Struct, tag=True):
    """A question for the cluster's status."""

    call: int


ToRouterFromFrontend = Note | Synced | AdapterCall | HasRevision | AskStatus

# ---------------------------------------------------------------- router -> front end


class Rulings(msgspec.Struct, tag=True):
    """The router's decisions, in order within each list; a request is in one of the lists at most."""

    assign: list[routing.Assign] = []
    withdraw: list[routing.Withdraw] = []
    refuse: list[routing.Refuse] = []


class Endpoint(msgspec.Struct, frozen=True):
    """A replica that is up, and the address at which it listens."""

    id: ReplicaId
    epoch: int
    host: str
    port: int


class Endpoints(msgspec.Struct, tag=True):
    """The replicas that are up now. ``can_serve``: whether one of them takes requests."""

    endpoints: list[Endpoint]
    can_serve: bool = True


class Revisions(msgspec.Struct, tag=True):
    """The changes up to this revision. ``is_whole``: these are all versions that are not gone, and no others
    exist."""

    revision: int
    listings: list[Listing]
    is_whole: bool = False


class Reply(msgspec.Struct, tag=True):
    """The one answer to a call. ``status``: 0 where the call succeeded; ``body``: JSON."""

    call: int
    status: int = 0
    message: str = ""
    body: bytes = b""
    listing: Listing | None = None


ToFrontendFromRouter = Rulings | Endpoints | Revisions | Reply

# ---------------------------------------------------------------- router -> newcomer


class Joining(msgspec.Struct, tag=True):
    """The settings of a front end that was started by hand. ``info``: None while no replica has started;
    ``model``: the model's digest."""

    engine: EngineSettings
    info: EngineInfo | None
    model: str
    queue_timeout_s: float


# ---------------------------------------------------------------- replica -> router


class Up(msgspec.Struct, tag=True):
    """The notice that the replica's model is loaded, and the address at which it listens. ``adapters``:
    versions that it serves already; ``cold_start``: the mode in which it serves."""

    facts: routing.ReplicaFacts
    host: str
    port: int
    adapters: list[AdapterId] = []
    cold_start: str = ""


class Alive(msgspec.Struct, tag=True):
    """A sign of life, with its time by the replica's own clock. ``report``: the present state or the last
    counts; None while a full report is due."""

    sent_s: float
    report: routing.ReplicaReport | None = None


class AdapterReady(msgspec.Struct, tag=True):
    """The notice that the replica serves this version, or the reason why it cannot."""

    id: AdapterId
    card: AdapterCard | None = None
    error: RequestError | None = None


class AdapterGone(msgspec.Struct, tag=True):
    """The notice that the replica has nothing of this version any more."""

    id: AdapterId


ToRouterFromReplica = Up | Alive | AdapterReady | AdapterGone

# ---------------------------------------------------------------- router -> replica


class Lease(msgspec.Struct, tag=True):
    """The right to serve for the time of a lease, counted from the replica's time in ``Alive``."""

    sent_s: float


class AskWhole(msgspec.Struct, tag=True):
    """A request that the next report be a full one."""


class AddAdapter(msgspec.Struct, tag=True):
    """A command to serve this version. ``verify``: whether to read all of its weights, rather than its
    headers."""

    listing: Listing
    verify: bool


class DropAdapter(msgspec.Struct, tag=True):
    """A command to free this version: no request will name it any more."""

    id: AdapterId


class KeepAdapter(msgspec.Struct, tag=True):
    """A command to keep a copy of this version on the device, within the share for such copies, or to end
    that."""

    id: AdapterId
    is_pinned: bool


ToReplicaFromRouter = Lease | AskWhole | AddAdapter | DropAdapter | KeepAdapter

# ---------------------------------------------------------------- a replica that pulls <-> router


class AskFiles(msgspec.Struct, tag=True):
    """A question for the files of a version."""

    id: AdapterId


PIECE_BYTES = 256 * 1024
"""The most bytes of a piece."""


class AskPiece(msgspec.Struct, tag=True):
    """A question for these bytes of one of its files. ``file``: the file's place in the order of a digest."""

    id: AdapterId
    file: int
    offset: int
    num_bytes: int


ToRouterFromPuller = AskFiles | AskPiece


class Files(msgspec.Struct, tag=True):
    """The version's digest, and the size of each file."""

    digest: str
    sizes: list[int]


class FilePiece(msgspec.Struct, tag=True):
    """The bytes; fewer than asked for where the file ends."""

    data: bytes


class NoFiles(msgspec.Struct, tag=True):
    """The notice that the files cannot be read, with the reason."""

    error: RequestError


ToPullerFromRouter = Files | FilePiece | NoFiles

# ---------------------------------------------------------------- front end -> replica


class Attempt(msgspec.Struct, tag=True):
    """A command to run an attempt at a request. ``number``: the number of the assignment, given by the router
    of epoch ``router``."""

    request: GenerationRequest
    number: int
    router: int


class CancelAttempt(msgspec.Struct, tag=True):
    """A command to end an attempt at a request, or one of its samples, early."""

    request: RequestId
    attempt: int
    sample: int | None = None
    reason: str = "abort"


class ReleaseAttempt(msgspec.Struct, tag=True):
    """A command to release an attempt for another replica: its open samples end as released."""

    request: RequestId
    attempt: int


class AskStats(msgspec.Struct, tag=True):
    """A question for the engine's gauges and counters."""

    call: int


ToReplicaFromFrontend = Attempt | CancelAttempt | ReleaseAttempt | AskStats

# ---------------------------------------------------------------- replica -> front end


class Stats(msgspec.Struct, tag=True):
    """The engine's snapshot, or None where it does not answer. ``adapters``: its use of adapters, sent beside
    it."""

    call: int
    stats: EngineStats | None
    adapters: tuple[AdapterUse, ...] = ()


ToFrontendFromReplica = Deltas | Stats

# ---------------------------------------------------------------- supervisor <-> router


class Slot(msgspec.Struct, frozen=True):
    """A place for a replica, and the process in it.

    ``state``: "starting", "running", "waiting" (to be started again), "stopping". ``drains_to``: the state
    that follows a drain, see ``NoteDrain``. ``why``: the reason why the last start failed, if it did.
    """

    id: ReplicaId
    epoch: int
    pid: int
    state: str
    drains_to: str = ""
    why: str = ""


class ProcessTable(msgspec.Struct, tag=True):
    """The processes that the supervisor has started. ``frontends``: their processes' ids by number; ``most``: the
    number of replicas that its GPUs allow; None: any number. ``info``: the facts of the first replica that
    started."""

    slots: list[Slot]
    frontends: dict[int, int]
    supervisor: int
    launcher: str
    most: int | None = None
    info: EngineInfo | None = None


class Exited(msgspec.Struct, tag=True):
    """The notice that a replica's process has ended. ``is_crash``: whether it ended without a command to end.
    ``blamed``: the requests of its last step; None where these are not known."""

    replica: ReplicaId
    epoch: int
    reason: str
    is_crash: bool
    blamed: list[RequestId] | None = None


ToRouterFromSupervisor = ProcessTable | Exited


class EndReplica(msgspec.Struct, tag=True):
    """A command to kill the replica of this epoch, which must not serve any more."""

    replica: ReplicaId
    epoch: int


class StartReplicas(msgspec.Struct, tag=True):
    """A command to start these replicas, too."""

    replicas: list[ReplicaId]


class EndSlot(msgspec.Struct, tag=True):
    """A command to end the replica, which is empty, for good."""

    replica: ReplicaId


class NoteDrain(msgspec.Struct, tag=True):
    """The notice that the replica drains, which the supervisor keeps for the next router.

    An empty replica then stays so ("stay"), ends for good ("remove"), or is started anew ("restart").
    """

    replica: ReplicaId
    drains_to: str


ToSupervisorFromRouter = EndReplica | StartReplicas | EndSlot | NoteDrain | Revisions

# ---------------------------------------------------------------- a process <-> the supervisor that started it


class ChildReady(msgspec.Struct, tag=True):
    """The notice that the process runs. ``info``: a replica's facts."""

    info: EngineInfo | None = None


class StopChild(msgspec.Struct, tag=True):
    """A command to end in order; a second one means at once."""


class Ping(msgspec.Struct, tag=True):
    """A question whether the event loop runs."""


class Pong(msgspec.Struct, tag=True):
    """The answer that it does."""


# ---------------------------------------------------------------- supervisor <-> its process that speaks to Ray


class StartActor(msgspec.Struct, tag=True):
    """A command to start a replica as an actor of this name. ``launch``: its ``Launch``, encoded."""

    name: str
    launch: bytes


class StopActor(msgspec.Struct, tag=True):
    """A command to ask the actor to end in order."""

    name: str


class KillActor(msgspec.Struct, tag=True):
    """A command to kill the actor, even where a signal has stopped it."""

    name: str


ToRay = StartActor | StopActor | KillActor


class RayReady(msgspec.Struct, tag=True):
    """The notice that Ray can be used. ``most``: the number of replicas that its GPUs allow; None: any number."""

    most: int | None


class ActorBegan(msgspec.Struct, tag=True):
    """The notice that the actor's process runs on a node."""

    name: str
    pid: int
    node: str


class ActorSaid(msgspec.Struct, tag=True):
    """The actor's report of its start."""

    name: str
    said: ChildReady | Failed


class ActorEnded(msgspec.Struct, tag=True):
    """The notice that the actor's process has ended, or has been cut off. ``code``: its own exit code; 1
    where Ray gives none; ``FENCED`` where it was cut off."""

    name: str
    code: int
    reason: str


FromRay = RayReady | ActorBegan | ActorSaid | ActorEnded
FromChild = ChildReady | Failed | Pong | FromRay
ToChild = StopChild | Ping | ToRay
