"""``manylora serve --replicas N``: starts a cluster's processes, and starts again those that end.

The only process that a user starts, that signals reach, and that speaks to a launcher. It takes part in no
request: the router decides, front ends and replicas serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from manylora._version import VERSION
from manylora.cluster import children, messages
from manylora.cluster.credentials import credentials_of
from manylora.cluster.digests import model_digest
from manylora.cluster.folder import SECRET, Folder, default_folder, read_secret, was_left
from manylora.cluster.link import Hello, Link, LinkError, bind, dial
from manylora.cluster.local import Launcher, LocalLauncher, Started
from manylora.cluster.node_share import NodeShare
from manylora.cluster.ray_launcher import RayLauncher, check_ray
from manylora.cluster.router_options import with_profile
from manylora.cluster.slots import ReplicaPlace, raise_if_failed
from manylora.config import ConfigError, EngineSettings, HttpSettings
from manylora.config.cluster import TLS_OPTIONS, ClusterOptions
from manylora.engine.wire import Failed
from manylora.inspection import check_named_adapters
from manylora.listening import address_of, bound
from manylora.main import check_model, configure_logging
from manylora.models.source import resolve_model
from manylora.policy.router import Router
from manylora.protocol.routing import ReplicaId
from manylora.signals import stop_signals

log = logging.getLogger("manylora")

PING_S = 0.5
RESTART_S = 0.2
"""Before a router or a front end is started again."""
LEFT_S = 10.0
"""By then nothing is left of a cluster whose supervisor has died."""
LAST_S = 5.0
"""What front ends may take beyond the time for draining."""

_from_router = msgspec.msgpack.Decoder(messages.ToSupervisorFromRouter)


def run_cluster(engine: EngineSettings, http: HttpSettings, cluster: ClusterOptions) -> int:
    """Serve until told to stop; the exit code. Raises ConfigError where the settings cannot work."""
    configure_logging()
    scheduler = dataclasses.replace(engine.scheduler, max_waiting=http.max_waiting)
    engine = dataclasses.replace(engine, scheduler=scheduler)
    if cluster.launcher == "ray":
        check_ray()
    if http.uds is not None and cluster.cluster_dir is None:
        raise ConfigError("--uds with several replicas needs --cluster-dir: a cluster's own folder is by port")
    with contextlib.ExitStack() as stack:
        sock = _bind(stack, http, cluster)  # first: a taken port must not cost a model load
        check_model(engine.model.model)
        check_named_adapters(engine)
        cluster = with_profile(cluster, engine)
        Router(cluster.router_config())  # a policy that is not there, or lacks settings
        port = sock.getsockname()[1]
        path = default_folder(port) if cluster.cluster_dir is None else Path(cluster.cluster_dir)
        folder = Folder(path, is_lasting=cluster.cluster_dir is not None)
        stack.callback(folder.close)
        secret = read_secret(folder.secret_path)
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
        return asyncio.run(_serve(launch, sock))


def _bind(stack: contextlib.ExitStack, http: HttpSettings, cluster: ClusterOptions) -> socket.socket:
    """The port; where front ends of a supervisor that has died have it, once they end. Raises ConfigError."""
    folder = default_folder(http.port) if cluster.cluster_dir is None else Path(cluster.cluster_dir)
    until_s = time.monotonic() + LEFT_S
    while True:
        try:
            return stack.enter_context(bound(http))
        except ConfigError:
            if not was_left(folder) or time.monotonic() > until_s:
                raise
        time.sleep(0.1)


async def _serve(launch: children.Launch, sock: socket.socket) -> int:
    cluster = launch.cluster
    launcher: Launcher
    if cluster.launcher == "ray":
        launcher = RayLauncher(launch)
    else:
        most = max(cluster.num_at_start, cluster.bounds[1])
        launcher = LocalLauncher(
            NodeShare(launch.engine, most, cluster.num_at_start, cluster.replicas_per_gpu)
        )
    try:
        await launcher.open()
        return await _Supervisor(launch, launcher, sock).serve()
    finally:
        await launcher.close()


class _Supervisor:
    def __init__(self, launch: children.Launch, launcher: Launcher, sock: socket.socket) -> None:
        self._sock = sock
        self._launcher = launcher
        self._router_sock = bind(launch.host, launch.cluster.cluster_port)
        self._launch = msgspec.structs.replace(launch, router=self._router_sock.getsockname()[:2])
        self._credentials = credentials_of(launch.secret, launch.cluster.tls)
        self._slots: dict[ReplicaId, ReplicaPlace] = {}
        self._epochs: dict[ReplicaId, int] = {}  # the last of each place that is no more
        self._frontends: dict[int, Started] = {}
        self._router: Started | None = None
        self._link: Link | None = None
        self._pong_s = time.monotonic()
        self._is_stopping = False
        self._is_serving = False
        self._stops = 0
        self._stopped = asyncio.Event()
        self._hurried = asyncio.Event()
        self._failed: asyncio.Future[Failed]
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self) -> int:
        """See ``run_cluster``."""
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        for number in stop_signals():
            loop.add_signal_handler(number, self._stop, number)
        self._spawn(self._keep_router())
        self._spawn(self._follow_router())
        for replica in range(self._launch.cluster.num_at_start):
            self._add_slot(replica)
        stopped = loop.create_task(self._stopped.wait())
        waits: list[asyncio.Future[Any]] = [stopped, self._failed]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                failed = self._failed.result()
                raise_if_failed(failed)
                log.error("%s", failed.message)
                return 1
            return 0
        finally:
            await self._end()

    def _stop(self, number: int) -> None:
        log.info("signal %d: the cluster ends", number)
        (self._hurried if self._stopped.is_set() else self._stopped).set()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ------------------------------------------------------------ replicas

    def _add_slot(self, replica: ReplicaId) -> None:
        launch = msgspec.structs.replace(self._launch, role=messages.REPLICA)
        slot = ReplicaPlace(
            replica,
            self._epochs.get(replica, 0),
            launch,
            self._launcher,
            self._changed,
            self._exited,
        )
        self._slots[replica] = slot
        self._spawn(slot.run())

    def _changed(self) -> None:
        """A replica's state is another."""
        for replica, slot in list(self._slots.items()):
            if slot.state == "gone":
                self._epochs[replica] = slot.epoch
                del self._slots[replica]
            elif slot.info is not None and self._launch.info is None:
                self._launch = msgspec.structs.replace(self._launch, info=slot.info)
                for number in range(self._launch.cluster.frontends):
                    self._spawn(self._keep_frontend(number))
        self._tell_table()

    def _exited(self, exited: messages.Exited) -> None:
        slot = self._slots.get(exited.replica)
        failed = None if slot is None else slot.failed
        if failed is not None and not self._is_serving:
            if not self._failed.done():
                self._failed.set_result(failed)
            return
        if failed is not None:
            log.error("replica %d: %s", exited.replica, failed.message)
        if self._link is not None:
            self._link.send(exited)

    def _tell_table(self) -> None:
        if self._link is None:
            return
        frontends = [messages.ChildProcess(number, each.pid) for number, each in self._frontends.items()]
        slots = [slot.as_told() for slot in self._slots.values()]
        self._link.send(
            messages.ProcessTable(
                slots,
                frontends,
                os.getpid(),
                self._launcher.name,
                self._launcher.most_replicas,
                self._launch.info,
            )
        )

    # ------------------------------------------------------------ the router

    async def _keep_router(self) -> None:
        epoch = 0
        descriptor = self._router_sock.fileno()
        while not self._is_stopping:
            epoch += 1
            launch = msgspec.structs.replace(
                self._launch, role=messages.ROUTER, epoch=epoch, descriptor=descriptor
            )
            self._pong_s = float("inf")
            self._router = await self._launcher.start(launch, [descriptor])
            said = await self._router.receive()
            if isinstance(said, Failed) and not self._is_serving and not self._failed.done():
                self._failed.set_result(said)
            code = await self._router.wait()
            if not self._is_stopping:
                log.error("the router has ended with %d: another takes its place", code)
                await asyncio.sleep(RESTART_S if isinstance(said, messages.ChildReady) else 1.0)

    async def _follow_router(self) -> None:
        hello = Hello(messages.SUPERVISOR, 0, 1, os.getpid(), VERSION, self._launch.model)
        while not self._is_stopping:
            try:
                link = await dial(self._launch.router, self._credentials, hello, _from_router)
            except LinkError:
                await asyncio.sleep(0.1)
                continue
            self._link = link
            self._pong_s = time.monotonic()
            self._tell_table()
            pings = self._spawn(self._ping(link))
            while (message := await link.receive()) is not None:
                self._hear_router(message)
            pings.cancel()
            self._link = None

    async def _ping(self, link: Link) -> None:
        """A router that says nothing is ended: replicas live by its word."""
        most_s = max(1.0, 0.6 * self._launch.cluster.lease)
        number = 0
        while True:
            number += 1
            link.send(messages.Ping(number))
            await asyncio.sleep(PING_S)
            if time.monotonic() - self._pong_s > most_s and self._router is not None:
                log.error("the router has said nothing for %.1f s: it is ended", most_s)
                self._router.kill()
                link.abort()
                return

    def _hear_router(self, message: Any) -> None:
        match message:
            case messages.Pong():
                self._pong_s = time.monotonic()
            case messages.EndReplica(replica, epoch):
                if (slot := self._slots.get(replica)) is not None:
                    slot.kill(epoch)
            case messages.NoteDrain(replica, drains_to):
                if (slot := self._slots.get(replica)) is not None:
                    slot.drains_to = drains_to
                    self._tell_table()
            case messages.StartReplicas(replicas):
                for each in replicas:
                    if each not in self._slots:
                        self._add_slot(each)
                self._tell_table()
            case messages.EndSlot(replica):
                if (slot := self._slots.get(replica)) is not None:
                    self._spawn(slot.end())

    # ------------------------------------------------------------ front ends

    async def _keep_frontend(self, number: int) -> None:
        epoch = 0
        descriptor = self._sock.fileno()
        while not self._is_stopping:
            epoch += 1
            launch = msgspec.structs.replace(
                self._launch, role=messages.FRONTEND, id=number, epoch=epoch, descriptor=descriptor
            )
            process = self._frontends[number] = await self._launcher.start(launch, [descriptor])
            self._tell_table()
            said = await process.receive()
            if isinstance(said, messages.ChildReady):
                self._say_serving()
            elif not self._is_serving and not self._failed.done():
                if not isinstance(said, Failed):
                    said = Failed("a front end ended while it was starting")
                self._failed.set_result(said)
            code = await process.wait()
            del self._frontends[number]
            self._tell_table()
            if not self._is_stopping:
                log.error("front end %d has ended with %d: another takes its place", number, code)
                await asyncio.sleep(RESTART_S if isinstance(said, messages.ChildReady) else 1.0)

    def _say_serving(self) -> None:
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
        """Front ends drain; then nothing needs replicas, nor a router."""
        self._is_stopping = True
        frontends = list(self._frontends.values())
        if self._is_serving:
            for each in frontends:
                each.stop()
            hurrying = self._spawn(self._hurry(frontends))
            waits = [asyncio.ensure_future(each.wait()) for each in frontends]
            if waits:
                await asyncio.wait(waits, timeout=self._launch.http.drain_timeout + LAST_S - 1.0)
            hurrying.cancel()
        for each in frontends:
            each.kill()
        await asyncio.gather(*(slot.end() for slot in self._slots.values()))
        if self._router is not None:
            self._router.stop()
            try:
                await asyncio.wait_for(self._router.wait(), 1.0)
            except TimeoutError:
                self._router.kill()

    async def _hurry(self, frontends: list[Started]) -> None:
        await self._hurried.wait()
        for each in frontends:
            each.stop()
