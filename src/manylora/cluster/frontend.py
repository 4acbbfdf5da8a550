"""A front end's process: HTTP and text before a cluster."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from pathlib import Path

from manylora._version import VERSION
from manylora.cluster import children, messages
from manylora.cluster.client import ClusterClient
from manylora.cluster.exposition import ClusterPage, cluster_route
from manylora.cluster.folder import read_secret
from manylora.cluster.link import Hello
from manylora.config import ConfigError
from manylora.engine.wire import Failed
from manylora.main import connection_limits, load_tokenizer, run_loop, server_settings

log = logging.getLogger(__name__)

ORPHAN_S = 5.0
"""After the supervisor's end open requests have so long."""


def run(launch: children.Launch, starter: children.Starter) -> int:
    """Until it is told to stop."""
    try:
        secret = read_secret(Path(launch.secret))
        tokenizer = load_tokenizer(launch.engine.model.model)
    except ConfigError as error:
        starter.say(Failed(str(error), is_user_error=True))
        return children.REFUSED

    async def serve() -> int:
        from manylora.server.app import create_app
        from manylora.server.lifecycle import serve

        assert launch.info is not None
        hello = Hello(messages.FRONTEND, launch.id, launch.epoch, os.getpid(), VERSION, launch.model)
        client = ClusterClient(
            launch.info,
            launch.router,
            secret,
            hello,
            launch.http.max_waiting,
            launch.cluster.queue_timeout,
        )
        client.start()
        await client.wait_ready()
        settings = server_settings(launch.engine, launch.http, connection_limits(launch.http, launch.info))
        page = ClusterPage(client, launch.engine.model.name, launch.info)
        routes = cluster_route(client, launch.http.api_keys)
        app = create_app(client, tokenizer, settings, metrics=page.metrics, page=page.render, routes=routes)
        sock = socket.socket(fileno=launch.descriptor)
        sock.listen()
        loop = asyncio.get_running_loop()

        def stop() -> None:
            loop.call_soon_threadsafe(app.state.lifecycle.stop)

        def orphaned() -> None:
            stop()
            children.end_after(ORPHAN_S)

        starter.watch(stop, orphaned)
        starter.say(messages.ChildReady())
        gc.collect()
        gc.freeze()
        code = await serve(app, sock, client, launch.http.drain_timeout, ())
        await client.close()
        return code

    return run_loop(serve())
