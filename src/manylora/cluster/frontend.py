"""Runs a front end's process: HTTP and text in front of a cluster.

``manylora frontend`` starts one that joins a cluster by its link, without a supervisor. It asks the router
what the cluster serves, and reads the model's tokenizer from this machine's own disk. When such a front end
dies, replicas drop its open requests.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from manylora._version import VERSION
from manylora.cluster import children, messages
from manylora.cluster.adapter_files import model_digest
from manylora.cluster.client import ClusterClient
from manylora.cluster.exposition import ClusterPage, cluster_operation
from manylora.cluster.folder import read_secret
from manylora.cluster.link import Credentials, Hello, LinkError, LinkRefused, credentials_of, dial
from manylora.config.cluster import MOST_FRONTENDS, tls_files
from manylora.config.declaring import ConfigError
from manylora.config.sections import EngineSettings, HttpSettings
from manylora.engine.client import CacheScopes
from manylora.listening import address_of, bound
from manylora.main import check_model, load_texts, run_loop, server_settings
from manylora.models.source import resolve_model
from manylora.processes import stop_signals
from manylora.progress import configure_logging
from manylora.text.texts import Texts
from manylora.types import EngineInfo

log = logging.getLogger(__name__)

ORPHAN_S = 5.0
"""The time that open requests have after the supervisor's end."""

JOIN_S = 30.0
"""The time that a joining front end waits for a cluster's first replica."""
_AGAIN_S = 0.2


def run(launch: children.Launch, starter: children.Starter) -> int:
    """Serve until the starter stops this process or is gone, and return the exit code. Raises ConfigError."""
    credentials = credentials_of(launch.secret, launch.cluster.tls)
    texts = load_texts(launch.engine.model)
    assert launch.info is not None
    client = ClusterClient(
        launch.info,
        launch.router,
        credentials,
        Hello(messages.FRONTEND, launch.id, launch.epoch, os.getpid(), VERSION, launch.model),
        launch.http.max_waiting,
        launch.cluster.queue_timeout,
    )

    def stop() -> None:
        children.leave(0)  # nothing is served yet

    def is_ready(of_server: Callable[[], None]) -> None:
        nonlocal stop
        stop = of_server
        starter.report(messages.ChildReady())

    def orphaned() -> None:
        stop()
        children.end_after(ORPHAN_S)

    async def serve() -> int:
        starter.watch(lambda: stop(), orphaned)  # watched first: the wait for a router may be long
        sock = socket.socket(fileno=launch.descriptor)
        scopes = CacheScopes(launch.secret)
        return await serve_clients(client, texts, launch.engine, launch.http, sock, scopes, is_ready)

    return run_loop(serve())


async def serve_clients(
    client: ClusterClient,
    texts: Texts,
    engine: EngineSettings,
    http: HttpSettings,
    sock: socket.socket,
    scopes: CacheScopes,
    ready: Callable[[Callable[[], None]], None],
    signals: Sequence[signal.Signals] = (),
) -> int:
    """Serve a cluster's clients until a stop, and return the exit code. ``ready`` is called when the cluster
    can be asked. It gets a function that stops the server, from any thread."""
    from manylora.server.app import create_app
    from manylora.server.lifecycle import serve

    client.start()
    await client.wait_ready()
    settings = server_settings(engine, http, client.info, sock)
    page = ClusterPage(client, engine.model.name, client.info)
    more = [cluster_operation(client, http.api_keys)]
    app = create_app(
        client, texts, settings, metrics=page.metrics, page=page.render, more=more, scopes=scopes
    )
    sock.listen()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.call_soon_threadsafe(app.state.lifecycle.stop)

    ready(stop)
    gc.collect()
    gc.freeze()
    code = await serve(app, sock, client, http.drain_timeout, signals)
    await client.close()
    return code


def run_frontend(args: argparse.Namespace, http: HttpSettings) -> int:
    """Serve until a signal, and return the exit code. Raises ConfigError where the cluster cannot be joined."""
    configure_logging()
    secret = read_secret(Path(args.secret_file))
    files = tls_files(args.cluster_tls_cert, args.cluster_tls_key, args.cluster_tls_ca)
    credentials = credentials_of(secret, files)
    router = _address(args.connect)
    with bound(http) as sock:
        joining, info = asyncio.run(_join(router, credentials))
        engine = joining.engine
        if args.model is not None:
            model = dataclasses.replace(engine.model, model=args.model, served_model_names=engine.model.names)
            engine = dataclasses.replace(engine, model=model)
        check_model(engine.model.model)
        if model_digest(resolve_model(engine.model.model)) != joining.model:
            raise ConfigError(f"the model in {engine.model.model} is not the cluster's: its files differ")
        texts = load_texts(engine.model)
        number = MOST_FRONTENDS + secrets.randbelow(2**31)  # smaller numbers are the supervisor's
        client = ClusterClient(
            info,
            router,
            credentials,
            Hello(messages.FRONTEND, number, 1, os.getpid(), VERSION, joining.model),
            http.max_waiting,
            joining.queue_timeout_s,
        )

        def is_ready(stop: Callable[[], None]) -> None:
            log.info("serving %s on %s", engine.model.name, address_of(sock))

        scopes = CacheScopes(secret)
        return run_loop(serve_clients(client, texts, engine, http, sock, scopes, is_ready, stop_signals()))


async def _join(router: tuple[str, int], credentials: Credentials) -> tuple[messages.Joining, EngineInfo]:
    """Ask the router until it can describe what the cluster serves. Raises ConfigError."""
    hello = Hello(messages.NEWCOMER, 0, 1, os.getpid(), VERSION, "")
    until_s = time.monotonic() + JOIN_S
    while True:
        try:
            link = await dial(router, credentials, hello, messages.Joining)
        except LinkRefused as error:
            raise ConfigError(f"the cluster does not want this front end: {error}") from error
        except LinkError as error:
            raise ConfigError(f"cannot join the cluster: {error}") from error
        joining: messages.Joining | None = await link.receive()
        link.abort()
        if joining is not None and joining.info is not None:
            return joining, joining.info
        if time.monotonic() > until_s:
            raise ConfigError(f"the cluster has had no replica for {JOIN_S:g} s")
        await asyncio.sleep(_AGAIN_S)


def _address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(f"--connect must be HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)
