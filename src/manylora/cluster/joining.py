"""``manylora frontend``: a front end that joins a cluster by its link, and that no supervisor has started.

It is told by the router what the cluster serves, and reads the model's tokenizer from its own disk. After that it
is a front end as any other; what it had open when it dies, replicas drop.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from manylora._version import VERSION
from manylora.cluster import messages
from manylora.cluster.adapter_files import model_digest
from manylora.cluster.client import ClusterClient
from manylora.cluster.folder import read_secret
from manylora.cluster.frontend import serve_clients
from manylora.cluster.link import Credentials, Hello, LinkError, LinkRefused, credentials_of, dial
from manylora.config import ConfigError, HttpSettings
from manylora.config.cluster import MOST_FRONTENDS, tls_files
from manylora.engine.scopes import CacheScopes
from manylora.listening import address_of, bound
from manylora.main import check_model, configure_logging, load_texts, run_loop
from manylora.models.source import resolve_model
from manylora.signals import stop_signals
from manylora.types import EngineInfo

log = logging.getLogger("manylora")

JOIN_S = 30.0
"""A cluster that is starting has so long to come up."""
_AGAIN_S = 0.2

_decoder = msgspec.msgpack.Decoder(messages.Joining)


def run_frontend(args: argparse.Namespace, http: HttpSettings) -> int:
    """Serve until told to stop; the exit code. Raises ConfigError where the cluster cannot be joined."""
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
        number = MOST_FRONTENDS + secrets.randbelow(2**31)  # those below are the supervisor's
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
        return run_loop(
            serve_clients(client, texts, engine, http, sock, scopes, is_ready, stop_signals())
        )


async def _join(router: tuple[str, int], credentials: Credentials) -> tuple[messages.Joining, EngineInfo]:
    """What the cluster serves, once it does. Raises ConfigError."""
    hello = Hello(messages.NEWCOMER, 0, 1, os.getpid(), VERSION, "")
    until_s = time.monotonic() + JOIN_S
    while True:
        try:
            link = await dial(router, credentials, hello, _decoder)
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
    """HOST:PORT. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(f"--connect must be HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)
