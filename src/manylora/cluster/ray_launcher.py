"""Starts replicas as Ray's actors, on any of its nodes, and all other processes on this machine.

A child process (``ray_driver``) speaks to Ray. When it ends, perhaps because Ray's head is lost, all its
replicas have ended. The next start of a replica starts another such process.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import logging
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence

import msgspec

from manylora.cluster import messages
from manylora.cluster.children import FENCED, Launch, Tasks
from manylora.cluster.local import LocalProcess, NotStarted, Started, start_child
from manylora.cluster.slots import end_soon
from manylora.config.declaring import ConfigError
from manylora.engine.wire import Failed
from manylora.listening import is_loopback

log = logging.getLogger(__name__)

VERSION = "2.60."
CLOSE_S = 10.0
START_S = 3600.0
"""The bound on an actor's start. It is long because its progress cannot be seen from here."""
_LONGEST_ROOT = 40
"""The most characters of a folder under which the paths of Ray's own sockets are short enough for the system."""


def check_ray() -> None:
    """Check that Ray is installed, in the version that this was built for. Raises ConfigError."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--launcher ray needs ray: pip install 'manylora[cluster]'")
    found = importlib.metadata.version("ray")
    if not found.startswith(VERSION):
        raise ConfigError(f"--launcher ray needs ray {VERSION}*, and {found} is installed")


class RayLauncher:
    """A launcher whose replicas are actors of Ray. Call ``open`` first and ``close`` last."""

    name = "ray"

    def __init__(self, launch: Launch) -> None:
        self._launch = msgspec.structs.replace(launch, role=messages.RAY)
        self._actors: dict[str, RayProcess] = {}
        self._driver: LocalProcess | None = None
        self._opening = asyncio.Lock()
        self._folder: str | None = None
        self._environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0"}
        address = launch.cluster.ray_address or "auto"
        if address == "local" or is_loopback(address.rpartition(":")[0]):
            # Otherwise Ray replaces the loopback by a public address, and listens on all addresses.
            self._environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if address == "local":
            root = tempfile.gettempdir()
            root = root if len(root) <= _LONGEST_ROOT else "/tmp"
            self._folder = tempfile.mkdtemp(prefix="manylora-ray-", dir=root)
            self._environment |= {
                "RAY_TMPDIR": self._folder,
                # Otherwise Ray takes work from everyone who can reach it.
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
            }
        self._tasks = Tasks()
        self.most_replicas: int | None = None

    async def open(self) -> None:
        """Connect to Ray, and measure its nodes. Raises ConfigError."""
        said = await self._open_driver()
        self.most_replicas = said.most

    async def _open_driver(self) -> messages.RayReady:
        """Start the process that speaks to Ray. Raises ConfigError."""
        driver = await start_child(self._launch, self._environment)
        try:
            said = await driver.begun()
        except NotStarted:
            said = None
        except asyncio.CancelledError:
            driver.kill()
            raise
        if not isinstance(said, messages.RayReady):
            await driver.wait()
            why = "the process that speaks to it has ended"
            raise ConfigError(said.message if isinstance(said, Failed) else f"Ray does not work here: {why}")
        self._driver = driver
        self._tasks.spawn(self._follow(driver))
        return said

    async def _follow(self, driver: LocalProcess) -> None:
        """Handle the process's messages until it ends, then report the end of all its replicas."""
        while (message := await driver.receive()) is not None:
            self._receive(message)
        await driver.wait()
        self._driver = None
        log.error("the process that speaks to Ray has ended, and its replicas with it")
        for name in list(self._actors):
            self._receive(messages.ActorEnded(name, FENCED, "the process that speaks to it has ended"))

    def _receive(self, message: object) -> None:
        match message:
            case messages.ActorBegan(name, pid, node):
                if (actor := self._actors.get(name)) is not None:
                    actor.pid = pid
                    actor.is_begun.set()
                log.info("%s runs on node %s of Ray", name, node)
            case messages.ActorSaid(name, said):
                if (actor := self._actors.get(name)) is not None:
                    actor.said.put_nowait(said)
            case messages.ActorEnded(name, code, reason):
                if (actor := self._actors.pop(name, None)) is not None:
                    actor.end(code)
                if reason:
                    log.warning("%s: Ray says: %s", name, reason)

    def _send(self, message: messages.ToRay) -> None:
        if self._driver is not None:
            self._driver.send(message)

    async def start(self, launch: Launch, descriptors: Sequence[int] = ()) -> Started:
        """See Launcher."""
        if launch.role != messages.REPLICA:
            return await start_child(launch, {}, descriptors)
        async with self._opening:
            if self._driver is None:
                try:
                    await self._open_driver()
                except ConfigError as error:
                    raise OSError(str(error)) from error
        name = f"replica {launch.id} (epoch {launch.epoch})"
        actor = self._actors[name] = RayProcess(name, self._send)
        self._send(messages.StartActor(name, msgspec.msgpack.encode(launch)))
        await actor.is_begun.wait()
        return actor

    async def close(self) -> None:
        """End the process that speaks to Ray, and remove its folder."""
        self._tasks.cancel()
        if (driver := self._driver) is not None:
            await end_soon(driver, CLOSE_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class RayProcess:
    """A replica that is an actor of Ray. ``pid``: its process's id on its own node; ``is_begun``: its process
    runs, or has ended before that; ``said``: its report of its start, then None at its end."""

    def __init__(self, name: str, send: Callable[[messages.ToRay], None]) -> None:
        self.pid = 0
        self._name = name
        self._send = send
        self.is_begun = asyncio.Event()
        self._ended = asyncio.Event()
        self._code = 0
        self.said: asyncio.Queue[messages.ChildReady | Failed | None] = asyncio.Queue()

    def end(self, code: int) -> None:
        """Note that the actor has ended."""
        self._code = code
        self.is_begun.set()
        self._ended.set()
        self.said.put_nowait(None)

    async def begun(self) -> messages.ChildReady | Failed | None:
        """See Started."""
        try:
            return await asyncio.wait_for(self.said.get(), START_S)
        except TimeoutError:
            self.kill()
            await self.wait()
            raise NotStarted(f"it has not come up within {START_S:g} s, and is ended") from None

    async def live(self, silence_s: float) -> bool:
        """Wait until the actor ends (see Started). A silent actor ends by itself when its lease does."""
        await self.wait()
        return True

    def stop(self) -> None:
        """See Started."""
        self._send(messages.StopActor(self._name))

    def kill(self) -> None:
        """See Started."""
        self._send(messages.KillActor(self._name))

    async def wait(self) -> int:
        """See Started."""
        await self._ended.wait()
        return self._code
