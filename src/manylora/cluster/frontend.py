"""A front end's process: HTTP and text before a cluster."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence

from manylora._version import VERSION
from manylora.cluster import children, messages
from manylora.cluster.client import ClusterClient
from manylora.cluster.credentials import credentials_of
from manylora.cluster.exposition import ClusterPage, cluster_operation
from manylora.cluster.link import Hello
from manylora.config import ConfigError, EngineSettings, HttpSettings
from manylora.engine.scopes import CacheScopes
from manylora.engine.wire import Failed
from manylora.main import connection_limits, load_texts, run_loop, server_settings
from manylora.text.texts import Texts

log = logging.getLogger(__name__)

ORPHAN_S = 5.0
"""After the supervisor's end open requests have so long."""


def run(launch: children.Launch, starter: children.Starter) -> int:
    """Until it is told to stop."""
    try:
        credentials = credentials_of(launch.secret, launch.cluster.tls)
        texts = load_texts(launch.engine.model)
    except ConfigError as error:
        starter.say(Failed(str(error), is_user_error=True))
        return children.REFUSED

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
        starter.say(messages.ChildReady())

    def orphaned() -> None:
        stop()
        children.end_after(ORPHAN_S)

    async def serve() -> int:
        starter.watch(lambda: stop(), orphaned)  # it may wait long for a router
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
    """Serve a cluster's clients until told to stop; the exit code. ``ready`` gets, when the cluster can be asked,
    what tells it to stop, from any thread."""
    from manylora.server.app import create_app
    from manylora.server.lifecycle import serve

    client.start()
    await client.wait_ready()
    settings = server_settings(engine, http, connection_limits(http, client.info), sock)
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
