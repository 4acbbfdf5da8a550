"""A replica as an actor of Ray: the same process that the local launcher starts, told what to be by Ray's calls.

The engine runs in the actor's own process, so that nothing outlives the actor. Imports no ray: Ray imports this.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable

import msgspec

from manylora.cluster import children, messages
from manylora.engine.wire import Failed
from manylora.main import configure_logging

_ANSWER_S = 0.1
"""What the last answer may take to leave a process that ends."""

_launch = msgspec.msgpack.Decoder(children.Launch)
_encoder = msgspec.msgpack.Encoder()


class ReplicaActor:
    """``run`` first. Each call has a thread of its own; calls see bytes, as links do."""

    def __init__(self) -> None:
        configure_logging()
        self._starter = _CallingStarter()
        self._code: queue.SimpleQueue[int] = queue.SimpleQueue()

    def place(self) -> tuple[int, str, str]:
        """The process, and the node that it is on: Ray's id, and the address."""
        import ray

        return os.getpid(), ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def run(self, launch: bytes, threads: int, folder: str) -> int:
        """Be that replica until it ends; its exit code. A process that leaves at once still answers. ``folder``:
        where paths begin."""
        told = _launch.decode(launch)
        with contextlib.suppress(OSError):  # a node without it has whole paths only
            os.chdir(folder)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))

        def leaving(code: int) -> None:
            self._code.put(code)
            time.sleep(_ANSWER_S)

        children.tell_before_leaving(leaving)
        threading.Thread(target=self._run, args=(told,), name="manylora-replica", daemon=True).start()
        return self._code.get()

    def _run(self, launch: children.Launch) -> None:
        from manylora.cluster import replica

        code = 1
        try:
            code = replica.run(launch, self._starter)
        finally:
            self._starter.say(Failed("the replica has ended"))
            self._code.put(code)

    def said(self) -> bytes:
        """The first thing that it says: ChildReady, or Failed."""
        return self._starter.said.get()

    def stop(self) -> None:
        """End in order."""
        self._starter.stop()


class _CallingStarter:
    """See Starter. Its side of the conversation are calls."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._stopped: Callable[[], None] | None = None

    def say(self, message: messages.FromChild) -> None:
        """See Starter. Only the first message is asked for."""
        self.said.put(_encoder.encode(message))

    def watch(self, stopped: Callable[[], None], orphaned: Callable[[], None]) -> None:
        """See Starter. An actor is never told that it is an orphan: it loses its lease."""
        self._stopped = stopped

    def stop(self) -> None:
        """Tell the replica; one that is not built yet ends as it is."""
        if self._stopped is None:
            children.leave(0)
        else:
            self._stopped()
