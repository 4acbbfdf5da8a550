"""Takes the address or path of a server, and gives it back at the end. Knows no HTTP."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from manylora.config.declaring import ConfigError
from manylora.config.sections import HttpSettings


@contextlib.contextmanager
def bound(http: HttpSettings) -> Iterator[socket.socket]:
    """Bind the server's address, and close it at the end. Raises ConfigError."""
    sock = bind(http)
    made = None if http.uds is None else os.stat(http.uds)
    try:
        yield sock
    finally:
        sock.close()
        with contextlib.suppress(OSError):  # another server may have taken the path since
            if made is not None and os.path.samestat(made, os.stat(str(http.uds))):
                os.unlink(str(http.uds))


def address_of(sock: socket.socket) -> str:
    """Return the address at which clients reach a server, for people."""
    name = sock.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host, port = name[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def bind(http: HttpSettings) -> socket.socket:
    """Bind the server's address. A path is listened on at once, a TCP address not yet. Raises ConfigError."""
    try:
        if http.uds is not None:
            return _bind_path(http.uds)
        family, kind, proto, _, address = socket.getaddrinfo(
            http.host.strip("[]"), http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        # On Linux this lets a new server take an old one's port at once, but never share that of a live one.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, ValueError) as error:  # ValueError: no valid host name or path
        raise cannot_listen(http, error) from error
    return sock


def _bind_path(path: str) -> socket.socket:
    """Bind a path that no server listens on. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        # A killed server left the socket. Any other file is not ours to remove.
        if Path(path).is_socket() and probe.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(path)
    os.chmod(path, 0o600)
    sock.listen()  # now, so that another server sees the path as taken; clients wait
    return sock


def cannot_listen(http: HttpSettings, error: Exception) -> ConfigError:
    """Describe the error to the user."""
    reason = getattr(error, "strerror", None) or error
    return ConfigError(f"cannot listen on {http.uds or f'{http.host}:{http.port}'}: {reason}")
