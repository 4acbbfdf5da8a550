"""What a process of a cluster proves itself by: the cluster's secret, and a certificate where links are encrypted.

Owns which certificates are good. Does not know what goes over links.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import ssl
from pathlib import Path

from manylora.config import ConfigError
from manylora.config.cluster import TLS_OPTIONS, TlsFiles


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """``dialling``, ``listening``: TLS of the two sides; None: links are not encrypted."""

    secret: bytes
    dialling: ssl.SSLContext | None = None
    listening: ssl.SSLContext | None = None


def credentials_of(secret: bytes, files: TlsFiles | None, host: str | None = None) -> Credentials:
    """With the certificate of this machine, which must be good on both sides of a link, and for ``host`` where the
    process listens there. Raises ConfigError."""
    if files is None:
        return Credentials(secret)
    for option, path in zip(TLS_OPTIONS, files, strict=True):
        try:
            with Path(path).open("rb") as file:
                about = os.fstat(file.fileno())
        except OSError as error:
            raise ConfigError(f"cannot read {option} {path}: {error.strerror}") from error
        if path == files.key and (about.st_uid != os.getuid() or about.st_mode & 0o077):
            raise ConfigError(f"{option} {path} can be read by others: chmod 600 it, and make it yours")
    dialling = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    listening = _context(ssl.PROTOCOL_TLS_SERVER, files)
    dialling.check_hostname = host is not None
    try:
        _meet_itself(dialling, listening, host)
    except ssl.SSLError as error:
        raise ConfigError(f"--cluster-tls-cert {files.cert} is no good: {why_broken(error)}") from error
    dialling.check_hostname = True
    return Credentials(secret, dialling, listening)


def why_broken(error: ssl.SSLError) -> str:
    """In a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message.rstrip(".")
    return (error.reason or str(error)).lower().replace("_", " ")


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    """Raises ConfigError."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(files.ca)
    except ssl.SSLError as error:
        raise ConfigError(f"--cluster-tls-ca {files.ca} has no certificates") from error

    def refuse() -> str:
        raise ConfigError(f"--cluster-tls-key {files.key} must not need a password")

    try:
        context.load_cert_chain(files.cert, files.key, refuse)
    except ssl.SSLError as error:
        reason = why_broken(error)
        raise ConfigError(
            f"--cluster-tls-cert {files.cert} and --cluster-tls-key {files.key} are no pair: {reason}"
        ) from error
    return context


def _meet_itself(dialling: ssl.SSLContext, listening: ssl.SSLContext, host: str | None) -> None:
    """A handshake in memory: what others will check of the certificate is checked now. Raises SSLError."""
    to_dialler, to_listener = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialler = dialling.wrap_bio(to_dialler, to_listener, server_hostname=host)
    listener = listening.wrap_bio(to_listener, to_dialler, server_side=True)
    for side in (dialler, listener, dialler, listener):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
