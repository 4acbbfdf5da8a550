"""Speaks to Ray for the supervisor: places replicas as actors, and reports when they have ended.

Ray ends each process that speaks to it a minute after its head is lost, and starting Ray may hang. Both risks
are confined to this process. When it ends, its actors end, too. It measures each node's resources once,
before it places any replica. No request and no token passes here.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from manylora._version import VERSION
from manylora.cluster import children, messages
from manylora.cluster.adapter_files import model_digest
from manylora.cluster.local import check_shared_gpu, gpus_needed, with_share
from manylora.config.cold_start import num_cores
from manylora.config.declaring import ConfigError
from manylora.config.sections import EngineSettings
from manylora.devices.free_memory import free_bytes
from manylora.engine.wire import Failed
from manylora.listening import is_loopback
from manylora.models.source import resolve_model
from manylora.models.spec import ModelError
from manylora.processes import at_parents_end
from manylora.progress import configure_logging
from manylora.types import first_line

REACH_S = 3.0
CONNECT_S = 7.0
"""The bound of Ray's own handshake, counted from its beginning."""
MEASURE_S = 60.0
_OBJECT_STORE_BYTES = 80 * 2**20
"""Size of Ray's object store. Nothing is kept in it; this is the least that Ray accepts."""
_PORT = 6379
_ANSWER_S = 0.1
"""The time that a process which ends waits for its last answer to leave."""


class RayNodeFacts(msgspec.Struct):
    """A node, by Ray's id. ``model``: the digest of the model's files on it, or "?" and the reason why there
    is none."""

    id: str
    address: str
    gpus: int
    version: str = ""
    model: str = ""
    free_bytes: int = 0
    threads: int = 1


def measure(node: RayNodeFacts, model: str, folder: str) -> RayNodeFacts:
    """Measure the node on which this runs, and return its complete facts. ``folder``: where relative paths
    begin."""
    try:
        inside = Path(folder, model)
        digest = model_digest(inside if inside.is_dir() else resolve_model(model))
    except (ConfigError, ModelError, OSError) as error:
        digest = f"?{error}"
    return msgspec.structs.replace(
        node, version=VERSION, model=digest, free_bytes=free_bytes(), threads=num_cores()
    )


class RayNodes:
    """The nodes on which replicas may be placed. Raises ConfigError where they cannot all serve the same
    model, or have too few GPUs. ``most``: the number of replicas for which there is room; None: any number.
    ``gpus_each``: the number of GPUs that Ray reserves for a replica; a fraction where replicas share one."""

    def __init__(
        self,
        nodes: Sequence[RayNodeFacts],
        model: str,
        settings: EngineSettings,
        *,
        most: int,
        at_start: int,
        per_gpu: int,
    ) -> None:
        """Check the nodes. ``most``: the most replicas at any time; ``at_start``: the replicas that must fit."""
        self._nodes = {node.id: node for node in nodes}
        self._most = most
        self._ranks = settings.tensor_parallel_size
        self._per_gpu = per_gpu
        device, num_gpus = settings.model.device, sum(node.gpus for node in nodes)
        self.uses_gpus = device == "cuda" or (device == "auto" and num_gpus > 0)
        self.most = sum(map(self._room, nodes)) if self.uses_gpus else None
        self.gpus_each = self._ranks / per_gpu if self.uses_gpus else 0
        if not nodes:
            raise ConfigError("Ray has no node that replicas may run on")
        for node in nodes:
            if node.version != VERSION:
                raise ConfigError(
                    f"node {node.address} has manylora {node.version}, and this machine {VERSION}"
                )
            if node.model.startswith("?"):
                raise ConfigError(f"node {node.address} cannot serve the model: {node.model[1:]}")
            if node.model != model:
                raise ConfigError(f"the model on node {node.address} is another one: its files differ")
        if self.most is not None and at_start > self.most:
            needed = gpus_needed(at_start, self._ranks, per_gpu)
            together = f", {self._ranks} of one node each" if self._ranks > 1 else ""
            raise ConfigError(f"{at_start} replicas need {needed} GPUs{together}, and Ray has {num_gpus}")
        if self.uses_gpus and per_gpu > 1 and self._ranks > 1:
            raise ConfigError(
                "--replicas-per-gpu above 1 does not work with --tensor-parallel-size above 1 on Ray, which gives "
                "parts of one GPU only"
            )
        if self.uses_gpus:
            check_shared_gpu(settings, per_gpu)

    def _room(self, node: RayNodeFacts) -> int:
        """Count the replicas for which the node has GPUs. One replica's GPUs are all on one node."""
        return self._per_gpu * (node.gpus // self._ranks)

    def share(self, settings: EngineSettings, node: str, replica: int) -> tuple[EngineSettings, int]:
        """Return a replica's settings with its own share of that node, and its CPU threads. Without GPUs the
        node is divided by the most replicas of the cluster: all may end up on one node when the others are
        gone."""
        found = self._nodes.get(node) or min(self._nodes.values(), key=lambda each: each.free_bytes)
        count = min(self._most, max(1, self._room(found))) if self.uses_gpus else self._most
        cores = found.threads // count
        shared = with_share(settings, found.free_bytes, count, self.uses_gpus, replica % count, cores)
        return shared, max(1, cores)


def run(launch: children.Launch, starter: children.PairedStarter) -> int:
    """Place replicas until the starter ends this process or is gone. Return the exit code. Raises ConfigError."""
    at_parents_end(signal.SIGCONT)  # it has to clean up after its parent's end
    _keep_stderr_for_replicas()
    try:
        driver = _Driver(launch, starter)
    except ConfigError:
        raise
    except Exception as error:  # Ray's own have no common base
        raise ConfigError(f"Ray does not work: {first_line(error)}") from error
    starter.report(messages.RayReady(driver.nodes.most))
    while (message := starter.read()) is not None:
        match message:
            case messages.StartActor():
                threading.Thread(target=driver.follow, args=(message,), daemon=True).start()
            case messages.StopActor(name):
                driver.stop(name)
            case messages.KillActor(name):
                driver.kill(name)
            case messages.Ping():  # a question from the time of the start
                pass
            case _:  # StopChild
                break
    else:
        time.sleep(children.ORPHAN_S)  # replicas go on serving for this time
    driver.close()
    return 0


class _Driver:
    """The connection to Ray and the actors placed there. ``nodes``: the nodes that Ray had at the start."""

    def __init__(self, launch: children.Launch, starter: children.PairedStarter) -> None:
        """Connect to Ray, or start it, and measure its nodes. Raises ConfigError and any error of Ray's."""
        import ray

        self._ray = ray
        self._starter = starter
        self._actors: dict[str, Any] = {}
        self._placed: dict[str, str] = {}
        self._placing = threading.Lock()
        self._work_dir = os.getcwd()
        given = launch.cluster.ray_address or "auto"
        address = "local" if given == "local" else _reachable(given, launch.cluster.insecure_ray)
        patience = threading.Timer(CONNECT_S if address != "local" else MEASURE_S, self._give_up, (given,))
        patience.daemon = True
        patience.start()
        own = {}
        self._own_folder = os.environ.get("RAY_TMPDIR") if address == "local" else None
        if address == "local":
            own = {
                "include_dashboard": False,
                "num_cpus": 1,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "_node_ip_address": "127.0.0.1",
            }
            if launch.engine.model.device == "cpu":
                own["num_gpus"] = 0
        ray.init(address=address, configure_logging=False, log_to_driver=True, **own)
        patience.cancel()
        cluster = launch.cluster
        self.nodes = RayNodes(
            self._measured(launch),
            launch.model,
            launch.engine,
            most=max(cluster.num_at_start, cluster.bounds[1]),
            at_start=cluster.num_at_start,
            per_gpu=cluster.replicas_per_gpu,
        )

    def _give_up(self, address: str) -> None:
        self._starter.report(Failed(f"Ray at {address} does not answer", is_user_error=True))
        children.leave(2)

    def _measured(self, launch: children.Launch) -> list[RayNodeFacts]:
        """Measure the nodes on which replicas may run. Raises ConfigError."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray = self._ray
        alive = [node for node in ray.nodes() if node["Alive"]]
        uses_gpus = launch.engine.model.device == "cuda" or (
            launch.engine.model.device == "auto" and any(node["Resources"].get("GPU") for node in alive)
        )
        nodes, asked = [], []
        for each in alive:
            address, gpus = each["NodeManagerAddress"], int(each["Resources"].get("GPU", 0))
            if not (gpus if uses_gpus else each["Resources"].get("CPU")):
                continue
            if address != ray.util.get_node_ip_address() and is_loopback(launch.host):
                raise ConfigError(f"node {address} of Ray is another machine: it needs --cluster-host")
            node = RayNodeFacts(each["NodeID"], address, gpus if uses_gpus else 0)
            strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
            task = ray.remote(measure).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
            nodes.append(node)
            asked.append(task.remote(node, launch.engine.model.model, self._work_dir))
        if launch.engine.model.device == "cuda" and not nodes:
            count, per_gpu = launch.cluster.num_at_start, launch.cluster.replicas_per_gpu
            needed = gpus_needed(count, launch.engine.tensor_parallel_size, per_gpu)
            raise ConfigError(f"{count} replicas need {needed} GPUs, and Ray has 0")
        found = []
        for node, answer in zip(nodes, asked, strict=True):
            try:
                found.append(ray.get(answer, timeout=MEASURE_S))
            except ray.exceptions.RayError as error:
                raise ConfigError(f"node {node.address} of Ray: {first_line(error)}") from error
        return found

    # ------------------------------------------------------------ actors

    def follow(self, order: messages.StartActor) -> None:
        """Start an actor, and report its start and its end. Runs on a thread of its own."""
        name = order.name
        code, reason = 1, ""
        try:
            life = self._start(name, order.launch)
            said = self._ray.get(self._actors[name].said.remote())
            said = msgspec.msgpack.decode(said, type=messages.ChildReady | Failed)
            self._starter.report(messages.ActorSaid(name, said))
            code = self._ray.get(life)
        except self._ray.exceptions.ActorUnavailableError as error:
            code, reason = children.FENCED, first_line(error)  # it may still live, cut off from Ray
        except Exception as error:  # Ray's own have no common base
            reason = first_line(error)
        self.kill(name)
        self._actors.pop(name, None)
        self._placed.pop(name, None)
        self._starter.report(messages.ActorEnded(name, code, reason))

    def _start(self, name: str, encoded: bytes) -> Any:
        """Start an actor, and return the call that ends when the actor does."""
        ray = self._ray
        kind = ray.remote(max_concurrency=8, max_restarts=0, max_task_retries=0, num_cpus=0)(ReplicaActor)
        placed = kind.options(num_gpus=self.nodes.gpus_each, scheduling_strategy=self._place(name))
        actor = self._actors[name] = placed.remote()
        pid, node, address = ray.get(actor.place.remote())
        self._placed[name] = node
        self._starter.report(messages.ActorBegan(name, pid, node))
        launch = msgspec.msgpack.decode(encoded, type=children.Launch)
        engine, threads = self.nodes.share(launch.engine, node, launch.id)
        host = launch.host if is_loopback(launch.host) else address
        launch = msgspec.structs.replace(launch, engine=engine, host=host)
        return actor.run.remote(msgspec.msgpack.encode(launch), threads, self._work_dir)

    def _place(self, name: str) -> Any:
        """Choose the place of an actor: where GPUs are free, or else the node with the fewest replicas.
        Without GPUs, Ray's own spreading may put two of two replicas on one node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self.nodes.uses_gpus:
            return "SPREAD"
        with self._placing:
            counts = collections.Counter(self._placed.values())
            nodes = [
                each["NodeID"] for each in self._ray.nodes() if each["Alive"] and each["Resources"].get("CPU")
            ]
            if not nodes:
                return "SPREAD"
            node = self._placed[name] = min(nodes, key=lambda each: counts[each])
        return NodeAffinitySchedulingStrategy(node, soft=False)

    def stop(self, name: str) -> None:
        """Ask an actor to end in order."""
        if (actor := self._actors.get(name)) is not None:
            actor.stop.remote()

    def kill(self, name: str) -> None:
        """Kill an actor, in whatever state it is."""
        if (actor := self._actors.get(name)) is not None:
            self._ray.kill(actor)

    def close(self) -> None:
        """Kill the remaining actors, and shut Ray down where this process started it."""
        for name in list(self._actors):
            self.kill(name)
        self._ray.shutdown()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)


# ---------------------------------------------------------------- in an actor's process


class ReplicaActor:
    """A replica as an actor of Ray, driven by Ray's calls instead of a socket pair.

    The engine runs in the actor's own process, so that nothing outlives the actor. ``run`` is called first.
    Each call has a thread of its own. Calls pass messages as encoded bytes, as links do.
    """

    def __init__(self) -> None:
        configure_logging()
        self._said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._code: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._stopped: Callable[[], None] | None = None

    def place(self) -> tuple[int, str, str]:
        """Return the process's id, Ray's id of its node, and the node's address."""
        import ray

        return os.getpid(), ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def run(self, launch: bytes, threads: int, folder: str) -> int:
        """Run the replica until it ends, and return its exit code. A process that leaves at once still
        answers. ``folder``: where relative paths begin."""
        with contextlib.suppress(OSError):  # on a node without this folder all paths must be absolute
            os.chdir(folder)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))

        def leaving(code: int) -> None:
            self._code.put(code)
            time.sleep(_ANSWER_S)

        children.before_leaving.append(leaving)
        decoded = msgspec.msgpack.decode(launch, type=children.Launch)
        threading.Thread(target=self._run, args=(decoded,), name="manylora-replica", daemon=True).start()
        return self._code.get()

    def _run(self, launch: children.Launch) -> None:
        code = 1
        try:
            code = children.run(launch, self)
        finally:
            self.report(Failed("the replica has ended"))
            self._code.put(code)

    def said(self) -> bytes:
        """Wait for the replica's first message: ChildReady or Failed."""
        return self._said.get()

    def stop(self) -> None:
        """End in order. A replica that is not built yet ends at once."""
        if self._stopped is None:
            children.leave(0)
        else:
            self._stopped()

    # The replica's starter.

    def report(self, message: messages.FromChild) -> None:
        """Queue a message for the driver (see Starter), which asks only for the first one."""
        self._said.put(msgspec.msgpack.encode(message))

    def watch(self, stopped: Callable[[], None], orphaned: Callable[[], None]) -> None:
        """Keep ``stopped`` (see Starter). An actor never learns that it is an orphan: its lease ends instead."""
        self._stopped = stopped


# ---------------------------------------------------------------- reaching Ray


def _keep_stderr_for_replicas() -> None:
    """Keep stderr for Ray's lines about replicas, and drop what its own libraries write to the descriptors."""
    sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)


def _reachable(given: str, is_insecure: bool) -> str:
    """Return HOST:PORT of a Ray that listens. Raises ConfigError where there is none, or where it is open to
    everyone who can reach it."""
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )
    from ray._private.services import canonicalize_bootstrap_address

    address = canonicalize_bootstrap_address(given)
    if address is None:
        raise ConfigError("no Ray runs here: ray start --head, or --ray-address HOST:PORT or local")
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port or _PORT)), REACH_S) as sock:
            peer = sock.getpeername()[0]
    except (OSError, ValueError) as error:
        raise ConfigError(f"Ray at {address} cannot be reached: {first_line(error)}") from error
    has_token = maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    if not allowed(peer, has_token=has_token, is_insecure=is_insecure):
        raise ConfigError(
            f"Ray at {address} runs whatever it is sent: set RAY_AUTH_MODE=token there and here, "
            "or say --insecure-ray"
        )
    return str(address)


def allowed(address: str, *, has_token: bool, is_insecure: bool) -> bool:
    """Return whether the Ray at ``address`` may be used: it is on this machine, asks for a token, or the user
    accepts the risk."""
    return has_token or is_insecure or is_loopback(address)
