"""Runs ``manylora serve --replicas N``: starts a cluster's processes, and restarts those that end.

The supervisor is the only process that a user starts, that signals reach, and that speaks to a launcher. It
takes part in no request: the router decides, and front ends and replicas serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from manylora._version import VERSION
from manylora.cluster import children, messages
from manylora.cluster.adapter_files import model_digest
from manylora.cluster.children import Tasks
from manylora.cluster.folder import SECRET, Folder, default_folder, remove_left, was_left
from manylora.cluster.link import Hello, Link, bind, credentials_of, redial
from manylora.cluster.local import Launcher, LocalLauncher, NotStarted, Started
from manylora.cluster.ray_launcher import RayLauncher, check_ray
from manylora.cluster.slots import ProcessPlace, ReplicaPlace, end_soon
from manylora.config.cluster import TLS_OPTIONS, ClusterOptions
from manylora.config.declaring import ConfigError
from manylora.config.sections import EngineSettings, HttpSettings
from manylora.engine.wire import Failed
from manylora.inspection import check_named_adapters
from manylora.listening import address_of, bound
from manylora.main import check_model
from manylora.models.source import resolve_model
from manylora.processes import stop_signals
from manylora.progress import configure_logging
from manylora.protocol.routing import ReplicaId
from manylora.router.router import Router
from manylora.types import BASE, AdapterId

log = logging.getLogger("manylora")

MEND_S = 1.0
"""The time between two checks that the cluster's folder exists."""
LEFT_S = 10.0
"""How long to wait for the port after a supervisor's death. By then all its processes have ended."""
LAST_S = 5.0
"""The time that front ends may take beyond the time for draining."""


def run_cluster(engine: EngineSettings, http: HttpSettings, cluster: ClusterOptions) -> int:
    """Serve until a signal ends the cluster, and return the exit code. Raises ConfigError where the settings
    cannot work."""
    configure_logging()
    scheduler = dataclasses.replace(engine.scheduler, max_waiting=http.max_waiting)
    engine = dataclasses.replace(engine, scheduler=scheduler)
    if cluster.launcher == "ray":
        check_ray()
    if http.uds is not None and cluster.cluster_dir is None:
        raise ConfigError(
            "--uds with several replicas needs --cluster-dir: a cluster's own folder is by port"
        )
    with contextlib.ExitStack() as stack:
        sock = _bind(stack, http, cluster)  # done first, so that a taken port costs no model load
        check_model(engine.model.model)
        check_named_adapters(engine)
        Router(cluster.router_config())  # raises ConfigError for an unknown policy or missing settings
        port = sock.getsockname()[1]
        path = default_folder(port) if cluster.cluster_dir is None else Path(cluster.cluster_dir)
        remove_left(default_folder(port).parent)
        folder = Folder(path, is_lasting=cluster.cluster_dir is not None)
        stack.callback(folder.close)
        secret = folder.secret
        credentials_of(secret, cluster.tls, cluster.cluster_host)
        launch = children.Launch(
            role="",
            id=0,
            epoch=0,
            engine=engine,
            http=http,
            cluster=cluster,
            folder=str(path),
            secret=secret,
            router=(cluster.cluster_host, 0),
            model=model_digest(Path(resolve_model(engine.model.model))),
            host=cluster.cluster_host,
        )
        return asyncio.run(_serve(launch, sock, folder))


def _bind(stack: contextlib.ExitStack, http: HttpSettings, cluster: ClusterOptions) -> socket.socket:
    """Bind the server's port. Where front ends of a dead supervisor still have it, wait for their end. Raises
    ConfigError."""
    folder = default_folder(http.port) if cluster.cluster_dir is None else Path(cluster.cluster_dir)
    until_s = time.monotonic() + LEFT_S
    while True:
        try:
            return stack.enter_context(bound(http))
        except ConfigError:
            if not was_left(folder) or time.monotonic() > until_s:
                raise
        time.sleep(0.1)


async def _serve(launch: children.Launch, sock: socket.socket, folder: Folder) -> int:
    cluster = launch.cluster
    launcher: Launcher
    if cluster.launcher == "ray":
        launcher = RayLauncher(launch)
    else:
        most = max(cluster.num_at_start, cluster.bounds[1])
        launcher = LocalLauncher(launch.engine, most, cluster.num_at_start, cluster.replicas_per_gpu)
    try:
        await launcher.open()
        return await _Supervisor(launch, launcher, sock, folder).serve()
    finally:
        await launcher.close()


class _Supervisor:
    """The processes of one cluster, and the link to its router."""

    def __init__(
        self, launch: children.Launch, launcher: Launcher, sock: socket.socket, folder: Folder
    ) -> None:
        self._sock = sock
        self._folder = folder
        self._launcher = launcher
        self._router_sock = bind(launch.host, launch.cluster.cluster_port)
        self._launch = msgspec.structs.replace(launch, router=self._router_sock.getsockname()[:2])
        self._credentials = credentials_of(launch.secret, launch.cluster.tls)
        self._slots: dict[ReplicaId, ReplicaPlace] = {}
        self._epochs: dict[ReplicaId, int] = {}  # the last epoch of each place that has been removed
        self._listings: dict[AdapterId, messages.Listing] = {}  # for the next router
        self._last_adapter: AdapterId = BASE
        self._frontends: dict[int, ProcessPlace] = {}
        # Replicas end without the router's leases.
        self._router = ProcessPlace("the router", launcher, max(1.0, 0.6 * launch.cluster.lease))
        self._link: Link | None = None
        self._is_stopping = False
        self._is_serving = False
        self._is_stopped = False  # by a signal
        self._failed: Failed | None = None
        self._tasks = Tasks()

    async def serve(self) -> int:
        """Serve until a signal, a failed start or a failed task, and return the exit code. Raises ConfigError
        where the settings cannot work."""
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._stop, number)
        keeps_router = self._keep(self._router, messages.ROUTER, 0, self._router_sock)
        for work in (self._keep_folder(), keeps_router, self._follow_router()):
            self._tasks.spawn(work)
        for replica in range(self._launch.cluster.num_at_start):
            self._add_slot(replica)
        try:
            await self._tasks.over.wait()
            if self._failed is None:
                return 0 if self._is_stopped else 1
            if self._failed.is_user_error:
                raise ConfigError(self._failed.message)
            log.error("%s", self._failed.message)
            return 1
        finally:
            await self._end()

    def _stop(self, number: int) -> None:
        log.info("signal %d: the cluster ends", number)
        if self._is_stopped:  # a second signal: front ends end now
            for process in self._frontend_processes():
                process.stop()
        self._is_stopped = True
        self._tasks.over.set()

    def _frontend_processes(self) -> list[Started]:
        return [place.process for place in self._frontends.values() if place.process is not None]

    async def _keep_folder(self) -> None:
        """Make the cluster's folder again whenever it vanishes."""
        while True:
            await asyncio.sleep(MEND_S)
            with contextlib.suppress(ConfigError):  # the process that needs the folder reports the error
                self._folder.mend()
            self._launch = msgspec.structs.replace(self._launch, folder=str(self._folder.path))
            for slot in self._slots.values():
                slot.folder = self._launch.folder

    # ------------------------------------------------------------ replicas

    def _add_slot(self, replica: ReplicaId) -> None:
        launch = msgspec.structs.replace(self._launch, role=messages.REPLICA)
        slot = ReplicaPlace(
            replica, self._epochs.get(replica, 0), launch, self._launcher, self._changed, self._exited
        )
        self._slots[replica] = slot
        self._tasks.spawn(slot.run())

    def _changed(self) -> None:
        """React to a change of a replica's state: forget replicas that are gone, and start the front ends
        once one is ready."""
        for replica, slot in list(self._slots.items()):
            if slot.state == "gone":
                self._epochs[replica] = slot.epoch
                del self._slots[replica]
            elif slot.info is not None and self._launch.info is None:
                self._launch = msgspec.structs.replace(self._launch, info=slot.info)
                for number in range(self._launch.cluster.frontends):
                    name, silence_s = f"front end {number}", self._launch.cluster.silence_s
                    place = self._frontends[number] = ProcessPlace(name, self._launcher, silence_s)
                    self._tasks.spawn(self._keep(place, messages.FRONTEND, number, self._sock))
        self._send_table()

    def _exited(self, exited: messages.Exited) -> None:
        slot = self._slots.get(exited.replica)
        failed = None if slot is None else slot.failed
        if failed is not None and not self._is_serving:
            self._fail(failed)
            return
        if failed is not None:
            log.error("replica %d: %s", exited.replica, failed.message)
        if self._link is not None:
            self._link.send(exited)

    def _fail(self, failed: Failed) -> None:
        """End the cluster if it does not serve yet. The first reason counts."""
        if not self._is_serving and self._failed is None:
            self._failed = failed
            self._tasks.over.set()

    def _send_table(self) -> None:
        if self._link is None:
            return
        launcher, slots = self._launcher, [slot.as_slot() for slot in self._slots.values()]
        frontends = {n: each.process.pid for n, each in self._frontends.items() if each.process is not None}
        most, info = launcher.most_replicas, self._launch.info
        self._link.send(messages.ProcessTable(slots, frontends, os.getpid(), launcher.name, most, info))

    # ------------------------------------------------------------ the router and front ends

    async def _keep(self, place: ProcessPlace, role: str, number: int, sock: socket.socket) -> None:
        """Keep a router or a front end in its place, one process after another."""
        epoch, has_routed = 0, False
        while not self._is_stopping:
            epoch += 1
            launch = msgspec.structs.replace(
                self._launch, role=role, id=number, epoch=epoch, descriptor=sock.fileno()
            )
            if role == messages.ROUTER:
                listings = list(self._listings.values())
                launch = msgspec.structs.replace(
                    launch, takes_over=has_routed, listings=listings, last_adapter=self._last_adapter
                )
            with contextlib.suppress(NotStarted):
                await place.start(launch, [sock.fileno()])
                self._send_table()
                answer = await place.begun()
                if isinstance(answer, Failed):
                    self._fail(answer)
                elif role == messages.ROUTER:
                    has_routed |= answer is not None
                elif answer is None:
                    self._fail(Failed("a front end ended while it was starting"))
                else:
                    self._report_serving()
                code = await place.ended()
                if not self._is_stopping and self._failed is None:
                    log.error("%s has ended with %d: another takes its place", place.name, code)
            self._send_table()
            await place.pause()

    async def _follow_router(self) -> None:
        hello = Hello(messages.SUPERVISOR, 0, 1, os.getpid(), VERSION, self._launch.model)
        while not self._is_stopping:
            link = self._link = await redial(
                self._launch.router, self._credentials, hello, messages.ToSupervisorFromRouter, insists=True
            )
            self._send_table()
            while (message := await link.receive()) is not None:
                self._receive(message)
            self._link = None

    def _receive(self, message: Any) -> None:
        match message:
            case messages.Revisions(_, listings, is_whole):
                known = () if is_whole else self._listings.values()
                found = {each.id: each for each in (*known, *listings)}
                self._last_adapter = max((self._last_adapter, *found))
                self._listings = {number: each for number, each in found.items() if each.state != "gone"}
            case messages.EndReplica(replica, epoch):
                if (slot := self._slots.get(replica)) is not None:
                    slot.kill(epoch)
            case messages.NoteDrain(replica, drains_to):
                if (slot := self._slots.get(replica)) is not None:
                    slot.drains_to = drains_to
                    self._send_table()
            case messages.StartReplicas(replicas):
                for each in replicas:
                    if each not in self._slots:
                        self._add_slot(each)
                self._send_table()
            case messages.EndSlot(replica):
                if (slot := self._slots.get(replica)) is not None:
                    self._tasks.spawn(slot.end())

    def _report_serving(self) -> None:
        if not self._is_serving:
            self._is_serving = True
            log.info("the cluster's folder is %s", self._launch.folder)
            log.info(
                "front ends join by: manylora frontend --connect %s:%d --secret-file %s%s",
                *self._launch.router,
                Path(self._launch.folder) / SECRET,
                "".join(f" {option} FILE" for option in TLS_OPTIONS if self._launch.cluster.tls),
            )
            log.info("serving %s on %s", self._launch.engine.model.name, address_of(self._sock))

    # ------------------------------------------------------------ the end

    async def _end(self) -> None:
        """Let the front ends drain, then end the replicas and the router, which nothing needs any more."""
        self._is_stopping = True
        seconds = self._launch.http.drain_timeout + LAST_S - 1.0 if self._is_serving else 0.0
        await asyncio.gather(*(end_soon(process, seconds) for process in self._frontend_processes()))
        await asyncio.gather(*(slot.end() for slot in self._slots.values()))
        if self._router.process is not None:
            await end_soon(self._router.process, 1.0)
