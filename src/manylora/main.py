"""Builds engines from settings, and starts the two processes of a server: the only wiring.

The parent handles HTTP and text. The child (``python -m manylora.main FD``) has the model, the pool and the
policy. They share one socket pair; when either dies, the other sees the end of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from manylora import processes
from manylora._version import VERSION
from manylora.adapters.sources import discover
from manylora.config.declaring import ConfigError, naming_what_is_missing
from manylora.config.queueing import QueueConfig
from manylora.config.sections import AdapterSettings, EngineSettings, HttpSettings, ModelSettings
from manylora.engine import service, wire
from manylora.engine.client import EngineDead
from manylora.engine.driver import Driver
from manylora.engine.journal import JournalWriter, TraceWriter, private
from manylora.engine.remote import RemoteEngine
from manylora.inspection import check_named_adapters
from manylora.listening import address_of, bound, cannot_listen
from manylora.models.config import read_model_config
from manylora.models.source import resolve_model
from manylora.models.spec import ModelError
from manylora.policy.cache_policies import find_cache
from manylora.processes import stop_signals
from manylora.progress import Bar, configure_logging
from manylora.protocol.executor import AdapterError, Executor
from manylora.text.texts import Texts, read_base
from manylora.text.tokenizer import MissingTokenizer, TokenizerError
from manylora.types import EngineInfo, why_reserved

if TYPE_CHECKING:
    from manylora.server.connection import ServerSettings

log = logging.getLogger("manylora")

START_EXIT_S = 10.0
"""The time that the engine's process has to end where it has not finished its start."""

LEAST_EXIT_S = 1.0
"""The time that the engine's process always has to end, even when the server's time is over."""

OWN_EXIT_S = 0.5
"""The time that the server's process needs once the engine's process has ended."""

RELEASED_BYTES_PER_S = 2**30
"""The least speed at which the system takes back the pinned memory of a process that has ended."""

_Writer = TypeVar("_Writer")


# ---------------------------------------------------------------- an engine in this process


@naming_what_is_missing()
def build_driver(
    settings: EngineSettings,
    *,
    shows_progress: bool = False,
    wrap: Callable[[Executor], Executor] | None = None,
    has_all_adapters: bool = True,
) -> Driver:
    """Build a driver, not started, with its adapters added. Loads the model's weights. Raises ConfigError.

    ``wrap``: returns the executor to use in place of the one that runs the steps. ``has_all_adapters``: False
    where the caller adds further adapters before anything is served.
    """
    check_named_adapters(settings)  # done first, so that a bad adapter costs no model load
    from manylora.executor.build import build_worker  # imports torch

    with contextlib.ExitStack() as undo:
        # Nor may an unknown policy, or a path that cannot be written.
        find_cache(settings.cache.policy.policy)
        if settings.journal is not None:
            open_output("journal", settings.journal, lambda path: os.close(private(path, os.O_APPEND)))
        trace = None
        if settings.cache.trace is not None:
            trace = open_output("trace", settings.cache.trace, TraceWriter)
            undo.callback(trace.close)
        try:
            progress = Bar("loading weights") if shows_progress else None
            executor: Executor
            if settings.tensor_parallel_size > 1:
                from manylora.executor.ranks.start import build_ranks

                executor, config, info = build_ranks(settings, progress=progress)
            else:
                steps = Bar("capturing steps", "step") if shows_progress else None
                executor, config, info = build_worker(settings, progress=progress, capture_progress=steps)
        except ModelError as error:
            raise ConfigError(str(error)) from error
        undo.callback(executor.close)
        if settings.cache.gpu_memory_utilization is not None and info.device.startswith("cpu"):
            log.warning("--gpu-memory-utilization does nothing on a CPU: --device-pool sizes the pool")
        journal = None
        if settings.journal is not None:
            opened = functools.partial(JournalWriter, config=config, part_bytes=settings.journal_part_bytes)
            journal = open_output("journal", settings.journal, opened)
            undo.callback(journal.close)
        if wrap is not None:
            executor = wrap(executor)
        limit_s = settings.step_timeout_s
        driver = Driver(config, executor, info, journal=journal, trace=trace, step_timeout_s=limit_s)
        add_initial_adapters(driver, settings.adapters, settings.model.names)
        if settings.scheduler.queue.fair_by == "adapter" and has_all_adapters:
            served = {settings.model.name, *(card.name for card in driver.adapters())}
            warn_of_shares(settings.scheduler.queue, served)
        undo.pop_all()
    return driver


def open_output(what: str, path: str, opened: Callable[[Path], _Writer]) -> _Writer:
    """Open a file by ``opened``. Raises ConfigError, in one line, where it cannot be written."""
    try:
        return opened(Path(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot write the {what} {path}: {reason}") from error


def add_initial_adapters(driver: Driver, settings: AdapterSettings, bases: Collection[str]) -> None:
    """Add the adapters of the start. Raises ConfigError for a named one that is bad; skips a bad one of the
    folder with a warning."""
    for name, path in (*settings.adapters, *adapters_found(settings, bases)):
        try:
            driver.add_adapter(name, path, verify=False)
        except AdapterError as error:
            if (name, path) in settings.adapters:
                raise ConfigError(f"adapter {name!r} cannot be served: {error}") from error
            log.warning("adapter %r in %s is skipped: %s", name, settings.adapter_dir, error)


def adapters_found(settings: AdapterSettings, bases: Collection[str]) -> list[tuple[str, str]]:
    """List the folder's adapters that are not named in the settings. Reserved names are skipped with a warning.

    ``bases``: names that mean the base (``why_reserved``). Raises ConfigError.
    """
    if settings.adapter_dir is None:
        return []
    named, kept = dict(settings.adapters), []
    try:
        found = discover(Path(settings.adapter_dir))
    except AdapterError as error:
        raise ConfigError(str(error)) from error
    for name, folder in found:
        if reason := why_reserved(name, bases):
            log.warning("adapter %r in %s is skipped: %s", name, settings.adapter_dir, reason)
        elif name not in named:
            kept.append((name, str(folder)))
    return kept


def warn_of_shares(queue: QueueConfig, known: Collection[str]) -> None:
    """Warn of clients with a share that are not ``known``: they may arrive later, or be a mistake."""
    for name in queue.shares:
        if name not in known:
            log.warning("--fair-share: there is no %s %r at the moment", queue.fair_by, name)


def load_texts(settings: ModelSettings) -> Texts:
    """Load the text side of the model and of its adapters, with its warnings in the log. Raises ConfigError."""
    templates, has_defaults = {}, settings.generation_config == "auto"
    for given in settings.chat_template:
        name, equals, path = given.partition("=")
        if not equals or Path(given).is_file():
            name, path = "", given
        try:
            templates["" if name in settings.names else name] = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--chat-template {given}: cannot be read: {error}") from error
    try:
        folder = resolve_model(settings.model)
        own = folder if settings.tokenizer is None else resolve_model(settings.tokenizer)
        base = read_base(folder, templates.pop("", None), has_defaults, own)
    except MissingTokenizer as error:
        raise ConfigError(f"--tokenizer: {settings.tokenizer} has no tokenizer.json") from error
    except (TokenizerError, ModelError) as error:
        raise ConfigError(str(error)) from error
    for warning in base.warnings:
        log.warning("%s", warning)
    return Texts(base, folder, templates, has_defaults, own)


# ---------------------------------------------------------------- the server process


def run_server(engine: EngineSettings, http: HttpSettings) -> int:
    """Serve until a signal or the engine's death, and return the exit code. Raises ConfigError where the
    settings cannot work."""
    configure_logging()
    scheduler = dataclasses.replace(engine.scheduler, max_waiting=http.max_waiting)
    engine = dataclasses.replace(engine, scheduler=scheduler)
    if engine.scheduler.queue.fair_by == "key":
        warn_of_shares(engine.scheduler.queue, [str(place) for place in range(len(http.api_keys))])
    with bound(http) as sock:  # done first, so that a taken port costs no model load
        check_model(engine.model.model)
        texts = load_texts(engine.model)
        ours, theirs = socket.socketpair()
        ending = Ending(_start_engine(theirs), ours)
        try:
            return run_loop(_serve(engine, http, sock, texts, ending))
        except EngineDead as error:
            log.error("%s", error)
            return 1
        finally:
            ending.reap()


def check_model(model: str) -> None:
    """Refuse at once a model that the engine would refuse seconds later. Raises ConfigError."""
    try:
        read_model_config(resolve_model(model))
    except ModelError as error:
        raise ConfigError(str(error)) from error


def _start_engine(sock: socket.socket) -> subprocess.Popen[bytes]:
    """Start the child at the other end of ``sock``, and close ``sock`` here.

    A terminal or a supervisor signals the whole group, but the server decides when the engine ends. So the
    child starts with the signals blocked. A signal for this process waits until they are unblocked.
    """
    signals = stop_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        child = processes.start("manylora.main", str(sock.fileno()), pass_fds=[sock.fileno()])

        def leave(number: int, frame: object) -> None:
            child.kill()  # nothing is served yet, so nothing needs an orderly end
            os._exit(0)

        for number in signals:
            signal.signal(number, leave)
        return child
    finally:
        sock.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def run_loop(work: Coroutine[Any, Any, int]) -> int:
    """Run the coroutine on uvloop where it is installed, else on asyncio's loop, and return its result."""
    try:
        from uvloop import run
    except ImportError:  # uvloop does not exist for every system
        from asyncio import run
    return int(run(work))


async def _serve(
    engine: EngineSettings, http: HttpSettings, sock: socket.socket, texts: Texts, ending: Ending
) -> int:
    from manylora.server.app import create_app
    from manylora.server.lifecycle import serve

    client = None
    try:
        client = await _connect_unless_stopped(ending.sock, engine)
        if client is None:
            return 0
        app = create_app(client, texts, server_settings(engine, http, client.info, sock))
        try:
            sock.listen()  # fails where another server has begun to listen on the address
        except OSError as error:
            raise cannot_listen(http, error) from error
        log.info("serving %s on %s", engine.model.name, address_of(sock))
        gc.freeze()  # objects of the start live on: the collector skips them
        code = await serve(app, sock, client, http.drain_timeout, stop_signals())
        pinned = client.info.num_host_pages * client.info.page_bytes + client.info.pristine_bytes
        ending.begin(app.state.lifecycle.left_s(), code, pinned / RELEASED_BYTES_PER_S)
        return code
    finally:
        _ignore_signals()
        if client is None:
            ending.child.kill()  # it has not started, so nothing needs an orderly end
        else:
            await client.close()


def server_settings(
    engine: EngineSettings, http: HttpSettings, info: EngineInfo, sock: socket.socket
) -> ServerSettings:
    """Build the settings of a server's HTTP side. ``sock``: the socket that it listens on.

    By default there may be a connection for each request that may run or wait, and 1024 for other questions.
    """
    from manylora.server.connection import ConnectionLimits, ServerSettings, connections_allowed
    from manylora.server.middleware import allowed_hosts

    wanted = http.max_connections
    if wanted is None:
        wanted = max(ConnectionLimits().max_connections, http.max_waiting + info.max_num_seqs + 1024)
    allowed = connections_allowed(wanted)
    if allowed < wanted:
        log.warning("the limit on open files allows %d connections, not %d", allowed, wanted)
    return ServerSettings(
        served_model_name=engine.model.name,
        other_names=engine.model.names[1:],
        model_root=engine.model.model,
        version=VERSION,
        adapter_dir=Path(engine.adapters.adapter_dir) if engine.adapters.adapter_dir else None,
        api_keys=http.api_keys,
        metrics_open=http.metrics_key == "open",
        root_path=http.root_path.rstrip("/"),
        max_body_bytes=http.max_body_size,
        trusts_templates=http.trust_request_chat_template,
        connections=ConnectionLimits(max_connections=allowed),
        allowed_hosts=allowed_hosts(http.allowed_hosts, http.host, sock),
    )


def _ignore_signals() -> None:
    """Ignore further signals: the end has begun, and a second signal must not turn an orderly end into a kill."""
    complain = sys.unraisablehook

    def of_all_but_signals(unraisable: sys.UnraisableHookArgs) -> None:
        # For a signal at this very moment, Python prints a traceback that says it is ignored.
        if "ignored due to race condition" not in str(unraisable.exc_value):
            complain(unraisable)

    sys.unraisablehook = of_all_but_signals
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


async def _connect_unless_stopped(ours: socket.socket, engine: EngineSettings) -> RemoteEngine | None:
    """Wait until the engine has started. Returns None when one of the signals came first.

    Raises ConfigError, and EngineDead where the settings are not at fault. The signals stay handled: the next
    owner replaces the handlers, so each signal always has one.
    """
    loop, is_stopped = asyncio.get_running_loop(), False
    connecting = asyncio.create_task(RemoteEngine.connect(ours, engine))

    def stop(number: int, frame: object) -> None:
        nonlocal is_stopped
        is_stopped = True
        loop.call_soon_threadsafe(connecting.cancel)

    for number in stop_signals():
        signal.signal(number, stop)
    await asyncio.gather(connecting, return_exceptions=True)
    return None if is_stopped else connecting.result()


class Ending:
    """The end of a server: ends the engine's process, and bounds the time until both processes have ended."""

    def __init__(self, child: subprocess.Popen[bytes], sock: socket.socket) -> None:
        """``child``: the engine's process; it ends when ``sock``, this process's end of the pair, closes."""
        self.child, self.sock = child, sock
        self._by_s = time.monotonic() + START_EXIT_S

    def begin(self, within_s: float, code: int, release_s: float) -> None:
        """End this process with exit code ``code`` after ``within_s`` seconds, even where something hangs.

        ``release_s``: the further time that the system may need to take back the engine's memory. Until then
        the engine's process still exists, and the next server would not find that memory free.
        """
        if code:
            self.child.kill()  # the engine has died or hangs: more time would not help
        self._by_s = time.monotonic() + within_s
        threading.Thread(target=self._force, args=(within_s, code, release_s), daemon=True).start()

    def _force(self, within_s: float, code: int, release_s: float) -> None:
        time.sleep(within_s)
        self.child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(release_s)
        time.sleep(OWN_EXIT_S)
        log.error("something does not end: the server leaves it behind")
        os._exit(code)

    def reap(self) -> None:
        """Close the socket, and wait until the child is gone. Kill it where it takes too long."""
        self.sock.close()
        try:
            self.child.wait(max(self._by_s - OWN_EXIT_S - time.monotonic(), LEAST_EXIT_S))
        except subprocess.TimeoutExpired:
            self.child.kill()  # even where a signal has stopped it; one that has ended keeps its exit code
            if self.child.wait() == -signal.SIGKILL:
                log.warning("the engine's process did not end by itself: it was killed")


# ---------------------------------------------------------------- the engine process


def run_engine(fd: int) -> int:
    """Run the child: build the engine of the first message, and serve it until the socket closes. Returns the
    exit code."""
    configure_logging()
    sock = socket.socket(fileno=fd)
    start = wire.read_from_server(sock)
    if not isinstance(start, wire.Start):
        return 1
    is_up = threading.Event()
    threading.Thread(target=_end_with_server, args=(sock, is_up), daemon=True).start()
    sender = service.Sender(sock)
    try:
        driver = build_driver(start.settings, shows_progress=True)
    except ConfigError as error:
        sender.send(wire.Failed(str(error), is_user_error=True))
        sender.close()
        return 2
    except Exception as error:
        log.exception("the engine could not start")
        sender.send(wire.Failed(f"the engine could not start: {error}"))
        sender.close()
        return 1
    gc.collect()
    gc.freeze()
    is_up.set()
    return service.serve(sock, sender, driver)


def _end_with_server(sock: socket.socket, is_up: threading.Event) -> None:
    """End the process where the server ends while the model loads, since nothing else reads the socket then."""
    try:
        is_gone = not sock.recv(1, socket.MSG_PEEK)
    except OSError:
        is_gone = True
    if is_gone and not is_up.is_set():
        os._exit(1)


if __name__ == "__main__":
    code = run_engine(int(sys.argv[1]))
    logging.shutdown()
    os._exit(code)  # everything is closed: a hanging thread or a load must not keep the process
