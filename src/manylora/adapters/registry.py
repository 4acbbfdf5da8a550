"""Remembers what inspecting adapters gave, so that starting with thousands of them reads no header twice.

A cache and nothing more: what is served is decided elsewhere, and whatever is wrong with the database, the
answer is the same as without it, only slower. One SQLite file, shared by threads and processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from manylora.adapters.peft import AdapterSpec, adapter_files, check_rank, inspect_adapter
from manylora.adapters.sourcestamp import stamp_source
from manylora.adapters.tensorfile import FileStamp, stamp_of
from manylora.adapters.textcheck import TextCheck, text_files
from manylora.kernels.shapes import AdapterGeometry
from manylora.protocol import AdapterError

FORMAT_VERSION = 4
"""Part of every key: raise it when AdapterSpec or what inspection accepts changes."""

_BUSY_TIMEOUT_S, _BUSY_POLL_S = 2.0, 0.01
_TABLE = f"specs_{FORMAT_VERSION}"
_CREATE = f"""CREATE TABLE IF NOT EXISTS {_TABLE} (
    path BLOB NOT NULL, model TEXT NOT NULL, stamps TEXT NOT NULL, spec TEXT NOT NULL,
    PRIMARY KEY (path, model)) WITHOUT ROWID"""

_log = logging.getLogger(__name__)


def default_path() -> Path | None:
    """The database in the user's cache directory; None where there is no such directory."""
    try:
        if configured := os.environ.get("XDG_CACHE_HOME"):
            root = Path(configured)
        elif sys.platform == "win32":
            root = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            root = Path.home() / "Library" / "Caches"
        else:
            root = Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "manylora" / "adapters.sqlite" if root.is_absolute() else None


class Registry:
    """Inspects adapters for one model through the cache. Thread-safe; ``close`` is idempotent."""

    def __init__(
        self,
        geometry: AdapterGeometry,
        layer_prefix: str,
        path: Path | None = None,
        texts: TextCheck | None = None,
    ) -> None:
        """``path``: the database file, by default in the user's cache directory. ``texts``: see
        ``inspect_adapter``."""
        self._geometry = geometry
        self._layer_prefix = layer_prefix
        self._texts = texts
        self._model = fingerprint(geometry, layer_prefix)
        if texts is not None:
            self._model += ":" + _all_stamps([*text_files(texts.model), *text_files(texts.tokenizer)])
        self._path = path or default_path()
        self._lock = threading.Lock()
        self._warned = False
        self._writable = False
        self._connection: sqlite3.Connection | None = None
        with self._lock:
            self._open()

    def inspect(self, path: Path, max_rank: int | None = None, *, anew: bool = False) -> AdapterSpec:
        """Does what ``inspect_adapter`` does, without reading the files again while their stamps stay the same.

        ``anew``: what is remembered has proved wrong, and is replaced. Raises AdapterError.
        """
        folder = os.path.abspath(path)
        files = adapter_files(Path(path))
        config, weights = map(stamp_of, files)
        stamps = _all_stamps([*files, *text_files(Path(path))])
        spec = None
        if not anew:
            with self._lock:
                spec = self._find(folder, stamps)
        if spec is None or not self._is_possible(spec, folder, config, weights):
            spec = inspect_adapter(Path(path), self._geometry, self._layer_prefix, None, self._texts)
            # Inspection takes its own stamps: a file replaced since ours must not be kept under them.
            if (spec.config, spec.weights) == (config, weights):
                with self._lock:
                    self._keep(folder, stamps, spec)
        check_rank(spec, max_rank)
        return spec

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _find(self, folder: str, stamps: str) -> AdapterSpec | None:
        if self._connection is None:
            return None
        query = f"SELECT stamps, spec FROM {_TABLE} WHERE path = ? AND model = ?"
        try:
            row = self._connection.execute(query, (os.fsencode(folder), self._model)).fetchone()
        except sqlite3.Error as error:
            self._give_up_or_rebuild(error)
            return None
        if row is None or row[0] != stamps:
            return None
        try:
            return AdapterSpec.from_json(row[1])
        except ValueError:
            return None

    def _is_possible(self, spec: AdapterSpec, folder: str, config: FileStamp, weights: FileStamp) -> bool:
        """Whether inspecting this folder may have given this: a row may be damaged, or written by others."""
        layers, projections = self._geometry.page.layers, self._geometry.projections
        rows = (*spec.ranks, *spec.scales)
        return (
            (spec.path, spec.config, spec.weights) == (folder, config, weights)
            and spec.layer_prefix == self._layer_prefix.rstrip(".")
            and len(spec.ranks) == len(spec.scales) == len(projections)
            and all(len(row) == layers for row in rows)
            and all(0 <= rank <= weights.size_bytes for row in spec.ranks for rank in row)
            and all(math.isfinite(scale) for row in spec.scales for scale in row)
            and spec.rank == max(max(row) for row in spec.ranks) > 0
            and spec.modules == tuple(p.module for p, row in zip(projections, spec.ranks) if any(row))
        )

    def _keep(self, folder: str, stamps: str, spec: AdapterSpec) -> None:
        if self._connection is None or not self._writable:
            return
        row = (os.fsencode(folder), self._model, stamps, spec.to_json())
        try:
            self._connection.execute(f"INSERT OR REPLACE INTO {_TABLE} VALUES (?, ?, ?, ?)", row)
        except sqlite3.OperationalError as error:
            # Locked, full or read-only. Do not wait for it again with the next of thousands of adapters.
            self._writable = False
            self._warn(error)
        except sqlite3.Error as error:
            self._give_up_or_rebuild(error)

    def _open(self) -> None:
        try:
            self._connect()
        except (OSError, sqlite3.Error) as error:
            self._give_up_or_rebuild(error)

    def _connect(self) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            pass  # An existing database in a read-only place can still be read.
        # Autocommit: every statement is its own transaction, so no lock outlives it.
        connection = sqlite3.connect(
            self._path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        self._connection = connection
        try:
            _change_to_wal(connection)
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(_CREATE)
            self._writable = True
        except sqlite3.OperationalError as error:
            self._writable = False
            self._warn(error)

    def _give_up_or_rebuild(self, error: Exception) -> None:
        """A damaged database is deleted and made anew; one that cannot be used is let alone."""
        self._warn(error)
        damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
        if self._writable and getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:
            damaged = True  # our table is there, for it would have been made, yet has not our columns
        self._disconnect()
        if not damaged or self._path is None:
            return
        try:
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)
            self._connect()
        except (OSError, sqlite3.Error):
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            try:
                self._connection.close()
            except sqlite3.Error:
                pass
        self._connection = None
        self._writable = False

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            _log.warning("the adapter cache %s is not usable (%s); going on without it", self._path, error)
        self._warned = True


def _change_to_wal(connection: sqlite3.Connection) -> None:
    """Wait for others that use the database: to this change SQLite does not apply a connection's timeout."""
    until_s = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() >= until_s:
                raise
        time.sleep(_BUSY_POLL_S)


def _all_stamps(files: Iterable[Path]) -> str:
    """What differs where a file was replaced, even by one of its size and time. Not the device: its number may be
    another after each start of a machine. Raises AdapterError."""
    try:
        stamps = [stamp_source(file) for file in files]
    except OSError as error:
        raise AdapterError(f"the adapter cannot be looked at: {error.strerror or error}") from error
    return ":".join(str(value) for stamp in stamps for value in dataclasses.astuple(stamp)[1:])


def fingerprint(geometry: AdapterGeometry, layer_prefix: str) -> str:
    """All that an inspection's result depends on besides the adapter: layers, projections, names, format."""
    projections = [(p.module, p.in_features, p.out_features) for p in geometry.projections]
    described = [FORMAT_VERSION, layer_prefix.rstrip("."), geometry.page.layers, projections]
    if len(set(geometry.layers)) > 1:  # equal layers need no more words: their caches stay valid
        described.append([[group.name for group in groups] for groups in geometry.layers])
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()
