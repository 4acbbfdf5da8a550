"""The local launcher: every process of the cluster is a child of the supervisor's.

A replica gets a share of the machine: memory, CPU threads, GPUs.
"""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import contextlib
import dataclasses
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from manylora.cluster import messages
from manylora.cluster.children import Launch
from manylora.config.cold_start import num_cores
from manylora.config.declaring import ConfigError
from manylora.config.sections import EngineSettings
from manylora.devices.free_memory import free_bytes
from manylora.engine.wire import Failed, frame, open_stream, read_message
from manylora.memory.budget import cpu_pool_bytes, host_pool_bytes
from manylora.processes import LEAST_EFFORT, command, effort, group_of

_GPUS, _DEVICES = Path("/proc/driver/nvidia/gpus"), Path("/dev")

PING_S = 0.5
START_S = 30.0
"""A start that neither answers nor computes nor reads for so long hangs."""
LOAD_S, RAY_START_S = 60.0, 150.0
"""The same of a replica, and of what speaks to Ray, which waits for Ray's nodes."""

_from_child = msgspec.msgpack.Decoder(messages.FromChild)


def gpus() -> list[str]:
    """The GPUs of this machine that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    # A container may have one of them alone, or see in one the GPUs of the whole machine.
    counts = [len(list(_GPUS.glob("*"))), len(list(_DEVICES.glob("nvidia[0-9]*")))]
    return [str(number) for number in range(min(filter(None, counts), default=0))]


class NodeShare:
    """A machine's share for each replica, measured once, for at most ``most`` replicas."""

    def __init__(self, settings: EngineSettings, most: int, num_at_start: int, per_gpu: int) -> None:
        """Raises ConfigError where there are too few GPUs."""
        self._ranks = settings.tensor_parallel_size
        self._gpus = [] if settings.model.device == "cpu" else gpus()
        self._per_gpu = per_gpu
        needed = gpus_needed(num_at_start, self._ranks, per_gpu)
        if settings.model.device == "cuda" and needed > len(self._gpus):
            raise ConfigError(f"{num_at_start} replicas need {needed} GPUs, and there are {len(self._gpus)}")
        if self._gpus and needed > len(self._gpus):
            raise ConfigError(
                f"{num_at_start} replicas do not fit on {len(self._gpus)} GPUs: --replicas-per-gpu shares them, "
                "--device cpu does without"
            )
        if self._gpus:
            check_shared_gpu(settings, per_gpu)
        self._cores = num_cores() // most
        self._pools = shared_pools(settings, free_bytes(), most, "cuda" if self._gpus else "cpu")

    @property
    def _room(self) -> int:
        """The number of replicas that there are GPUs for."""
        return self._per_gpu * (len(self._gpus) // self._ranks)

    @property
    def most_replicas(self) -> int | None:
        """The number of replicas that fit here; None: any."""
        return self._room if self._gpus else None

    def share(self, settings: EngineSettings, replica: int) -> EngineSettings:
        """A replica's settings with its own pools and CPU threads."""
        return with_share(settings, self._pools, replica, self._cores)

    def environment(self, replica: int) -> Mapping[str, str]:
        """Give the environment of a replica's process, whose ranks share the threads and the GPUs."""
        found = {}
        if "OMP_NUM_THREADS" not in os.environ:
            found["OMP_NUM_THREADS"] = str(max(1, self._cores))
        if self._gpus:
            first = self._ranks * (replica % self._room // self._per_gpu)
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[first : first + self._ranks])
        return found


def gpus_needed(replicas: int, ranks: int, per_gpu: int) -> int:
    """Count the GPUs of so many replicas of so many ranks where ``per_gpu`` replicas share each."""
    return ranks * -(-replicas // per_gpu)


def check_shared_gpu(settings: EngineSettings, per_gpu: int) -> None:
    """Raise ConfigError where replicas share a GPU and each would take most of it."""
    if per_gpu > 1 and settings.cache.device_pool is None:
        raise ConfigError(
            "--replicas-per-gpu above 1 needs --device-pool: each takes most of a GPU otherwise"
        )


def shared_pools(
    settings: EngineSettings, free: int, count: int, kind: Literal["cpu", "cuda"]
) -> tuple[int | None, int]:
    """The pools, on the device and the host, of one of ``count`` replicas where this many bytes are free: those
    that are given, else its part of what one alone would take. None: it measures its GPU itself."""
    device_pool, host_pool = settings.cache.device_pool, settings.cache.host_pool
    if kind == "cpu" and device_pool is None:
        device_pool = cpu_pool_bytes(free) // count
    if host_pool is None:
        host_pool = host_pool_bytes(free, kind) // count
    return device_pool, host_pool


def with_share(
    settings: EngineSettings, pools: tuple[int | None, int], replica: int, cores: int
) -> EngineSettings:
    """The same settings with these pools, and with the CPU threads of a replica that has so many cores."""
    scheduler = settings.scheduler
    return dataclasses.replace(
        settings,
        cache=dataclasses.replace(settings.cache, device_pool=pools[0], host_pool=pools[1]),
        scheduler=dataclasses.replace(scheduler, cold_start=scheduler.cold_start.share(replica, cores)),
    )


class NotStarted(Exception):
    """A start that has failed, or was ended because it hung; the message says why."""


class Started(Protocol):
    """A process that a launcher has started."""

    pid: int

    async def begun(self) -> messages.ChildReady | Failed | None:
        """Wait for its report of its start; None where it ends without one. Raises NotStarted where it hung and
        was ended."""

    async def live(self, silence_s: float) -> bool:
        """Wait until it ends or has been silent for so long; whether it ends."""

    def stop(self) -> None:
        """Have it end in order; called again: now."""

    def kill(self) -> None:
        """End it, and what it has started, stopped or not."""

    async def wait(self) -> int:
        """Wait for its end; its exit code, negative for a signal."""


class Launcher(Protocol):
    """Where processes come from. ``most_replicas``: how many it can start; None: any number."""

    name: str
    most_replicas: int | None

    async def open(self) -> None:
        """Before the first start. Raises ConfigError where nothing can be started."""

    async def close(self) -> None:
        """After the last process has ended."""

    async def start(self, launch: Launch, descriptors: Sequence[int] = ()) -> Started:
        """Start a process; it gets these descriptors under their own numbers, and a replica its share of its
        machine. Raises OSError."""


class LocalLauncher:
    """See Launcher."""

    name = "local"

    def __init__(self, node: NodeShare) -> None:
        self._node = node
        self.most_replicas = node.most_replicas

    async def open(self) -> None:
        """See Launcher."""

    async def close(self) -> None:
        """See Launcher."""

    async def start(self, launch: Launch, descriptors: Sequence[int] = ()) -> LocalProcess:
        """See Launcher."""
        if launch.role != messages.REPLICA:
            return await start_child(launch, {}, descriptors)
        launch = msgspec.structs.replace(launch, engine=self._node.share(launch.engine, launch.id))
        return await start_child(launch, self._node.environment(launch.id), descriptors)


async def start_child(
    launch: Launch, environment: Mapping[str, str], descriptors: Sequence[int] = ()
) -> LocalProcess:
    """A process of this machine, in a process group of its own: what a terminal signals is the supervisor's to
    hand on."""
    ours, theirs = socket.socketpair()
    try:
        process = await asyncio.create_subprocess_exec(
            *command("manylora.cluster.children", str(theirs.fileno())),
            pass_fds=[theirs.fileno(), *descriptors],
            env={**os.environ, **environment},
            process_group=0,
            stdin=asyncio.subprocess.DEVNULL,
        )
    except BaseException:
        ours.close()  # a process that was made all the same ends by it
        raise
    finally:
        theirs.close()
    reader, writer = await open_stream(ours)
    writer.write(frame(launch))
    return LocalProcess(process, reader, writer, launch.role)


class LocalProcess:
    """See Started."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        role: str,
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._reader = reader
        self._writer = writer
        self._role = role
        self._receiving: asyncio.Future[Any] | None = None

    async def begun(self) -> Any | None:
        """See Started."""
        most_s = {messages.REPLICA: LOAD_S, messages.RAY: RAY_START_S}.get(self._role, START_S)
        idle_s, before = 0.0, 0.0
        while idle_s <= most_s:
            try:
                said = await self._listen()
            except TimeoutError:
                idle_s += PING_S
                if abs((now := effort(group_of(self.pid))) - before) > LEAST_EFFORT:
                    idle_s, before = 0.0, now
                continue
            if not isinstance(said, messages.Pong):
                return said
            idle_s = 0.0
        self.kill()
        await self.wait()
        raise NotStarted(f"it has not got on for {most_s:g} s, and is ended")

    async def live(self, silence_s: float) -> bool:
        """See Started. Silence is counted in questions: where all is stopped, so is the one that asks."""
        silent_s = 0.0
        while silent_s <= silence_s:
            try:
                if await self._listen() is None:
                    return True
                silent_s = 0.0
            except TimeoutError:
                silent_s += PING_S
        return False

    async def _listen(self) -> Any | None:
        """Ask whether it lives, and wait a moment: what it says, or Pong where it only answers. Raises
        TimeoutError where it does neither."""
        self.send(messages.Ping())
        until_s, answer = time.monotonic() + PING_S, None
        while (left_s := until_s - time.monotonic()) > 0:
            receiving = self._receiving = self._receiving or asyncio.ensure_future(self.receive())
            if not (await asyncio.wait([receiving], timeout=left_s))[0]:
                break
            self._receiving = None
            if not isinstance(answer := receiving.result(), messages.Pong):
                return answer
        if answer is None:
            raise TimeoutError
        return answer

    async def receive(self) -> Any | None:
        """Wait for its next message; None when its stream has ended."""
        return await read_message(self._reader, _from_child)

    def send(self, message: messages.ToChild) -> None:
        """Send it a message."""
        self._writer.write(frame(message))

    def stop(self) -> None:
        """See Started."""
        self.send(messages.StopChild())

    def kill(self) -> None:
        """See Started. With all that it has started, which may be stopped, too."""
        if self._process.returncode is None:  # later the number may be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """See Started."""
        code = await self._process.wait()
        self._writer.close()
        return code
