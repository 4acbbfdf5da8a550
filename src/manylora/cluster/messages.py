"""The messages of a cluster's processes, by the link that they go over.

Between a front end and the router requests go by what routing needs to know; tokens go between front ends and
replicas alone. Does not know how any of it is carried out.
"""

from __future__ import annotations

import msgspec

from manylora.config.sections import EngineSettings
from manylora.engine.client import EngineStats, GenerationRequest
from manylora.engine.wire import Deltas, Failed
from manylora.protocol.routing import (
    Asked,
    Assign,
    Cancelled,
    Ended,
    Held,
    Progress,
    Refuse,
    ReplicaFacts,
    ReplicaId,
    ReplicaReport,
    Withdraw,
    Withdrawn,
)
from manylora.reports import AdapterUse
from manylora.types import AdapterCard, AdapterId, EngineInfo, RequestError, RequestId

ROUTER, SUPERVISOR, FRONTEND, REPLICA = "router", "supervisor", "frontend", "replica"
NEWCOMER = "newcomer"
"""The role of a front end that was started by hand, for as long as it does not know what the cluster serves."""
PULLER = "puller"
"""The role of a replica on the link by which it gets adapters' files."""
RAY = "ray"
"""The role of the process that speaks to Ray: it has no link."""

# ---------------------------------------------------------------- the registry


class Listing(msgspec.Struct, frozen=True):
    """A revision of the registry: the state of one version of an adapter. ``state``: "loading", until replicas
    have it; "listed"; "leaving", when no new request may name it; "gone", when no replica has it any more.
    ``digest``: of its files, "" where these were not read."""

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
    """News of requests, oldest first. ``stale_tokens``: dropped so far, since they were of an attempt that was not
    the last; ``recomputed_tokens``: computed again so far, in later attempts."""

    asked: list[Asked] = []
    held: list[Held] = []
    progress: list[Progress] = []
    withdrawn: list[Withdrawn] = []
    ended: list[Ended] = []
    cancelled: list[Cancelled] = []
    stale_tokens: int = 0
    recomputed_tokens: int = 0


class Synced(msgspec.Struct, tag=True):
    """All open requests have been reported: the first message of a front end after them."""


class AdapterCall(msgspec.Struct, tag=True):
    """Load an adapter (``path``), in place of another of its name where ``replaces``; or unload it (no path)."""

    call: int
    name: str
    path: str = ""
    replaces: bool = False


class HasRevision(msgspec.Struct, tag=True):
    """The front end goes by this revision of the registry."""

    revision: int


class AskStatus(msgspec.Struct, tag=True):
    """A question for the cluster's status."""

    call: int


ToRouterFromFrontend = Note | Synced | AdapterCall | HasRevision | AskStatus

# ---------------------------------------------------------------- router -> front end


class Rulings(msgspec.Struct, tag=True):
    """The router's decisions, in order within each list; a request is in one of the lists at most."""

    assign: list[Assign] = []
    withdraw: list[Withdraw] = []
    refuse: list[Refuse] = []


class Endpoint(msgspec.Struct, frozen=True):
    """A replica that is up, and where it listens."""

    id: ReplicaId
    epoch: int
    host: str
    port: int


class Endpoints(msgspec.Struct, tag=True):
    """The replicas that are up now. ``can_serve``: one of them takes requests."""

    endpoints: list[Endpoint]
    can_serve: bool = True


class Revisions(msgspec.Struct, tag=True):
    """The changes up to this revision; ``is_whole``: all that is listed or leaving, and nothing else is."""

    revision: int
    listings: list[Listing]
    is_whole: bool = False


class Reply(msgspec.Struct, tag=True):
    """The one answer to a call; ``status`` 0 when it went well. ``body``: JSON."""

    call: int
    status: int = 0
    message: str = ""
    body: bytes = b""
    listing: Listing | None = None


ToFrontendFromRouter = Rulings | Endpoints | Revisions | Reply

# ---------------------------------------------------------------- router -> newcomer


class Joining(msgspec.Struct, tag=True):
    """The settings of a front end that was started by hand. ``info``: None while no replica has come up;
    ``model``: the digest."""

    engine: EngineSettings
    info: EngineInfo | None
    model: str
    queue_timeout_s: float


# ---------------------------------------------------------------- replica -> router


class Up(msgspec.Struct, tag=True):
    """The replica's model is loaded; it listens there. ``adapters``: versions that it serves already;
    ``cold_start``: the mode in which it serves."""

    facts: ReplicaFacts
    host: str
    port: int
    adapters: list[AdapterId] = []
    cold_start: str = ""


class Alive(msgspec.Struct, tag=True):
    """The replica lives, at this moment of its own clock; ``report`` where there is news, or where a second has
    passed."""

    sent_s: float
    report: ReplicaReport | None = None


class AdapterReady(msgspec.Struct, tag=True):
    """The replica serves this version, or says why not."""

    id: AdapterId
    card: AdapterCard | None = None
    error: RequestError | None = None


class AdapterGone(msgspec.Struct, tag=True):
    """The replica holds nothing of this version any more."""

    id: AdapterId


ToRouterFromReplica = Up | Alive | AdapterReady | AdapterGone

# ---------------------------------------------------------------- router -> replica


class Lease(msgspec.Struct, tag=True):
    """The replica may serve for the time of a lease, from the moment of its own clock that it said."""

    sent_s: float


class AskWhole(msgspec.Struct, tag=True):
    """The next report is to be a full one."""


class AddAdapter(msgspec.Struct, tag=True):
    """Serve this version; ``verify``: all of its weights are read, else its headers."""

    listing: Listing
    verify: bool


class DropAdapter(msgspec.Struct, tag=True):
    """Free this version: no request will name it any more."""

    id: AdapterId


class KeepAdapter(msgspec.Struct, tag=True):
    """Keep a copy of this version on the device, as far as the share for such copies goes; or not any more."""

    id: AdapterId
    is_kept: bool


ToReplicaFromRouter = Lease | AskWhole | AddAdapter | DropAdapter | KeepAdapter

# ---------------------------------------------------------------- a replica that pulls <-> router


class AskFiles(msgspec.Struct, tag=True):
    """A question for the files of a version."""

    id: AdapterId


PIECE_BYTES = 256 * 1024
"""No piece has more."""


class AskPiece(msgspec.Struct, tag=True):
    """These bytes of one of its files, by the file's place in the order of a digest."""

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
    """The bytes; fewer where the file ends before."""

    data: bytes


class NoFiles(msgspec.Struct, tag=True):
    """The files cannot be had."""

    error: RequestError


ToPullerFromRouter = Files | FilePiece | NoFiles

# ---------------------------------------------------------------- front end -> replica


class Attempt(msgspec.Struct, tag=True):
    """Run an attempt at a request. ``number``: the assignment's, by the router of this epoch."""

    request: GenerationRequest
    number: int
    router: int


class CancelAttempt(msgspec.Struct, tag=True):
    """End an attempt at a request, or one of its samples, early."""

    request: RequestId
    attempt: int
    sample: int | None = None
    reason: str = "abort"


class ReleaseAttempt(msgspec.Struct, tag=True):
    """Release an attempt for another replica: its open samples end as released."""

    request: RequestId
    attempt: int


class AskStats(msgspec.Struct, tag=True):
    """A question for the engine's figures."""

    call: int


ToReplicaFromFrontend = Attempt | CancelAttempt | ReleaseAttempt | AskStats

# ---------------------------------------------------------------- replica -> front end


class Stats(msgspec.Struct, tag=True):
    """The engine's snapshot; ``adapters`` are beside it. None: it does not answer."""

    call: int
    stats: EngineStats | None
    adapters: tuple[AdapterUse, ...] = ()


ToFrontendFromReplica = Deltas | Stats

# ---------------------------------------------------------------- supervisor <-> router


class Slot(msgspec.Struct, frozen=True):
    """A place for a replica, and what runs there. ``state``: "starting", "running", "waiting" (to be started
    again), "stopping". ``drains_to``: what becomes of one that drains, see ``NoteDrain``. ``why``: the last start
    failed, if it has."""

    id: ReplicaId
    epoch: int
    pid: int
    state: str
    drains_to: str = ""
    why: str = ""


class ChildProcess(msgspec.Struct, frozen=True):
    """A front end, or another process that has no slot."""

    id: int
    pid: int


class ProcessTable(msgspec.Struct, tag=True):
    """The processes that the supervisor has started. ``most``: replicas that its GPUs allow; None: any number.
    ``info``: of the first replica that came up."""

    slots: list[Slot]
    frontends: list[ChildProcess]
    supervisor: int
    launcher: str
    most: int | None = None
    info: EngineInfo | None = None


class Exited(msgspec.Struct, tag=True):
    """A replica's process has ended. ``is_crash``: nobody has asked it to. ``blamed``: the requests of its
    last step; None where that is not known."""

    replica: ReplicaId
    epoch: int
    reason: str
    is_crash: bool
    blamed: list[RequestId] | None = None


ToRouterFromSupervisor = ProcessTable | Exited


class EndReplica(msgspec.Struct, tag=True):
    """The replica of this epoch must not serve any more: kill it where it still runs."""

    replica: ReplicaId
    epoch: int


class StartReplicas(msgspec.Struct, tag=True):
    """Start these replicas, too."""

    replicas: list[ReplicaId]


class EndSlot(msgspec.Struct, tag=True):
    """End the replica, which is empty, for good."""

    replica: ReplicaId


class NoteDrain(msgspec.Struct, tag=True):
    """The replica drains, to be remembered, should the router be another. When it is empty it stays so ("stay"),
    ends for good ("remove"), or is started anew ("restart")."""

    replica: ReplicaId
    drains_to: str


ToSupervisorFromRouter = EndReplica | StartReplicas | EndSlot | NoteDrain | Revisions

# ---------------------------------------------------------------- a process <-> the supervisor that started it


class ChildReady(msgspec.Struct, tag=True):
    """The process runs. ``info``: a replica's."""

    info: EngineInfo | None = None


class StopChild(msgspec.Struct, tag=True):
    """End in order; a second time: now."""


class Ping(msgspec.Struct, tag=True):
    """Say that the event loop runs."""


class Pong(msgspec.Struct, tag=True):
    """The answer: it does."""


# ---------------------------------------------------------------- supervisor <-> its process that speaks to Ray


class StartActor(msgspec.Struct, tag=True):
    """Start a replica as an actor of this name. ``launch``: what it is to be, encoded."""

    name: str
    launch: bytes


class StopActor(msgspec.Struct, tag=True):
    """Tell it to end in order."""

    name: str


class KillActor(msgspec.Struct, tag=True):
    """End it, stopped or not."""

    name: str


ToRay = StartActor | StopActor | KillActor


class RayReady(msgspec.Struct, tag=True):
    """Ray is there. ``most``: replicas that its GPUs allow; None: any number."""

    most: int | None


class ActorBegan(msgspec.Struct, tag=True):
    """The actor's process runs, on that node."""

    name: str
    pid: int
    node: str


class ActorSaid(msgspec.Struct, tag=True):
    """The actor's report of its start."""

    name: str
    said: ChildReady | Failed


class ActorEnded(msgspec.Struct, tag=True):
    """Its process has ended, or has been cut off. ``code``: its own exit code, or 1."""

    name: str
    code: int
    reason: str


FromRay = RayReady | ActorBegan | ActorSaid | ActorEnded
FromChild = ChildReady | Failed | Pong | FromRay
ToChild = StopChild | Ping | ToRay
