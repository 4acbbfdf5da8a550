"""Starts a cluster's processes as children of the supervisor: the local launcher.

Each replica gets a share of the machine: memory, CPU threads and GPUs.
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
from typing import Any, Protocol

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
"""How long a starting process may neither answer nor compute nor read before it counts as hung."""
LOAD_S, RAY_START_S = 60.0, 150.0
"""The same bound for a replica, and for the process that speaks to Ray, which waits for Ray's nodes."""

_from_child = msgspec.msgpack.Decoder(messages.FromChild)


def gpus() -> list[str]:
    """List the GPUs of this machine that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    # In a container one of the two folders may be absent, or show the GPUs of the whole machine.
    counts = [len(list(_GPUS.glob("*"))), len(list(_DEVICES.glob("nvidia[0-9]*")))]
    return [str(number) for number in range(min(filter(None, counts), default=0))]


def gpus_needed(replicas: int, ranks: int, per_gpu: int) -> int:
    """Count the GPUs of ``replicas`` replicas of ``ranks`` ranks each where ``per_gpu`` replicas share each
    GPU."""
    return ranks * -(-replicas // per_gpu)


def check_shared_gpu(settings: EngineSettings, per_gpu: int) -> None:
    """Raise ConfigError where replicas share a GPU and each would take most of it."""
    if per_gpu > 1 and settings.cache.device_pool is None:
        raise ConfigError(
            "--replicas-per-gpu above 1 needs --device-pool: each takes most of a GPU otherwise"
        )


def with_share(
    settings: EngineSettings, free: int, count: int, uses_gpus: bool, replica: int, cores: int
) -> EngineSettings:
    """Return the settings of one of ``count`` replicas where ``free`` bytes are free, with the CPU threads of
    ``cores`` cores. The settings' sizes of pools are taken as given. A pool without one is the ``count``-th part
    of a lone replica's pool. A device pool of None means that the replica measures its GPU itself."""
    cache, scheduler = settings.cache, settings.scheduler
    device_pool, host_pool = cache.device_pool, cache.host_pool
    if device_pool is None and not uses_gpus:
        device_pool = cpu_pool_bytes(free) // count
    if host_pool is None:
        host_pool = host_pool_bytes(free, "cuda" if uses_gpus else "cpu") // count
    return dataclasses.replace(
        settings,
        cache=dataclasses.replace(cache, device_pool=device_pool, host_pool=host_pool),
        scheduler=dataclasses.replace(scheduler, cold_start=scheduler.cold_start.share(replica, cores)),
    )


class NotStarted(Exception):
    """A start that has failed, or was ended because it hung; the message gives the reason."""


class Started(Protocol):
    """A process that a launcher has started."""

    pid: int

    async def begun(self) -> messages.ChildReady | Failed | None:
        """Wait for the process's report of its start. Returns None where it ends without one. Raises
        NotStarted where it hung and was killed."""

    async def live(self, silence_s: float) -> bool:
        """Wait until the process ends or is silent for ``silence_s`` seconds. Return whether it has ended."""

    def stop(self) -> None:
        """Ask the process to end in order. A second call asks it to end now."""

    def kill(self) -> None:
        """Kill the process and those that it has started, even where signals have stopped them."""

    async def wait(self) -> int:
        """Wait for the process's end, and return its exit code, negative for a signal."""


class Launcher(Protocol):
    """A source of processes. ``most_replicas``: how many replicas it can start; None: any number."""

    name: str
    most_replicas: int | None

    async def open(self) -> None:
        """Prepare for the first start. Raises ConfigError where nothing can be started."""

    async def close(self) -> None:
        """Clean up after the last process has ended."""

    async def start(self, launch: Launch, descriptors: Sequence[int] = ()) -> Started:
        """Start a process. It gets these descriptors under their own numbers; a replica gets its share of its
        machine. Raises OSError."""


class LocalLauncher:
    """A launcher of processes on this machine, which is measured once and shared by ``most`` replicas."""

    name = "local"

    def __init__(self, settings: EngineSettings, most: int, num_at_start: int, per_gpu: int) -> None:
        """Measure the machine. Raises ConfigError where it has too few GPUs for ``num_at_start`` replicas."""
        self._most = most
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
        self._free_bytes = free_bytes()
        self.most_replicas = per_gpu * (len(self._gpus) // self._ranks) if self._gpus else None

    async def open(self) -> None:
        """See Launcher."""

    async def close(self) -> None:
        """See Launcher."""

    async def start(self, launch: Launch, descriptors: Sequence[int] = ()) -> LocalProcess:
        """See Launcher."""
        if launch.role != messages.REPLICA:
            return await start_child(launch, {}, descriptors)
        uses_gpus = bool(self._gpus)
        engine = with_share(launch.engine, self._free_bytes, self._most, uses_gpus, launch.id, self._cores)
        launch = msgspec.structs.replace(launch, engine=engine)
        return await start_child(launch, self.environment(launch.id), descriptors)

    def environment(self, replica: int) -> Mapping[str, str]:
        """Return the environment variables of a replica's process, whose ranks share the threads and the GPUs."""
        found = {}
        if "OMP_NUM_THREADS" not in os.environ:
            found["OMP_NUM_THREADS"] = str(max(1, self._cores))
        if self.most_replicas is not None:
            first = self._ranks * (replica % self.most_replicas // self._per_gpu)
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[first : first + self._ranks])
        return found


async def start_child(
    launch: Launch, environment: Mapping[str, str], descriptors: Sequence[int] = ()
) -> LocalProcess:
    """Start a process on this machine, in a process group of its own. So a terminal's signals reach the
    supervisor only, which decides what to do."""
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
        ours.close()  # ends a process that was started despite the error
        raise
    finally:
        theirs.close()
    reader, writer = await open_stream(ours)
    writer.write(frame(launch))
    return LocalProcess(process, reader, writer, launch.role)


class LocalProcess:
    """A process of this machine, reached over a socket pair."""

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
        """Wait until the process ends or is silent (see Started). Silence is counted in questions, so a
        supervisor that was itself stopped does not count that time."""
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
        """Ask whether the process lives, and wait up to ``PING_S`` for its message. Returns Pong where it
        only answers the question. Raises TimeoutError where nothing arrives."""
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
        """Wait for the process's next message. Returns None when its stream has ended."""
        return await read_message(self._reader, _from_child)

    def send(self, message: messages.ToChild) -> None:
        """Send the process a message."""
        self._writer.write(frame(message))

    def stop(self) -> None:
        """See Started."""
        self.send(messages.StopChild())

    def kill(self) -> None:
        """Kill the process's whole group (see Started)."""
        if self._process.returncode is None:  # after its end, another process may have the number
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """See Started."""
        code = await self._process.wait()
        self._writer.close()
        return code
