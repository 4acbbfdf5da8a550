"""Caches the results of inspecting adapters, so that starting with thousands of adapters reads no header
twice.

It is only a cache: whatever is wrong with the database, adapters are inspected as if there were none. The
cache is one SQLite file, shared by threads and processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sqlite3
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from manylora.adapters.files import adapter_files
from manylora.adapters.peft import AdapterSpec, TextCheck, check_rank, inspect_adapter, text_files
from manylora.kernels.shapes import AdapterGeometry
from manylora.protocol.executor import AdapterError

FORMAT_VERSION = 5
"""A part of every key. Raise it when AdapterSpec changes or when inspection accepts something else."""

_BUSY_TIMEOUT_S = 2.0
_TABLE = f"specs_{FORMAT_VERSION}"
_CREATE = f"""CREATE TABLE IF NOT EXISTS {_TABLE} (
    path BLOB NOT NULL, model TEXT NOT NULL, stamps TEXT NOT NULL, spec TEXT NOT NULL,
    PRIMARY KEY (path, model)) WITHOUT ROWID"""

_log = logging.getLogger(__name__)


def default_path() -> Path | None:
    """Return the path of the database in the user's cache directory; None where there is no such
    directory."""
    try:
        if configured := os.environ.get("XDG_CACHE_HOME"):
            root = Path(configured)
        else:
            root = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    except RuntimeError:
        return None
    return root / "manylora" / "adapters.sqlite" if root.is_absolute() else None


class Registry:
    """A cache through which adapters are inspected for one model. Thread-safe; ``close`` is idempotent."""

    def __init__(
        self,
        geometry: AdapterGeometry,
        layer_prefix: str,
        path: Path | None = None,
        texts: TextCheck | None = None,
    ) -> None:
        """Open the cache. ``path``: the database file, by default in the user's cache directory. ``texts``:
        as for ``inspect_adapter``."""
        self._geometry = geometry
        self._layer_prefix = layer_prefix
        self._texts = texts
        self._model = fingerprint(geometry, layer_prefix)
        if texts is not None:
            self._model += ":" + _stamps([*text_files(texts.model), *text_files(texts.tokenizer)])
        self._path = path or default_path()
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        if self._path is not None:
            self._open(self._path)

    def inspect(self, path: Path, max_rank: int | None = None) -> AdapterSpec:
        """Inspect an adapter like ``inspect_adapter``, without reading the files again while they stay the
        same. Raises AdapterError."""
        key = os.fsencode(os.path.abspath(path)), self._model
        files = [*adapter_files(path), *text_files(path)]
        stamps = _stamps(files)
        spec = self._get(key, stamps)
        if spec is None:
            spec = inspect_adapter(path, self._geometry, self._layer_prefix, None, self._texts)
            if _stamps(files) == stamps:  # else the files were replaced during inspection
                self._put(key, stamps, spec)
        check_rank(spec, max_rank)
        return spec

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _open(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # an existing database in a read-only folder can still be read
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Autocommit: every statement is its own transaction, so no lock outlives it.
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            with contextlib.suppress(sqlite3.OperationalError):  # another process is changing the mode
                self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute(_CREATE)
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)

    def _get(self, key: tuple[bytes, str], stamps: str) -> AdapterSpec | None:
        query = f"SELECT spec FROM {_TABLE} WHERE path = ? AND model = ? AND stamps = ?"
        rows = self._run(query, (*key, stamps))
        try:
            return AdapterSpec.from_json(rows[0][0]) if rows else None
        except ValueError:
            return None

    def _put(self, key: tuple[bytes, str], stamps: str, spec: AdapterSpec) -> None:
        self._run(f"INSERT OR REPLACE INTO {_TABLE} VALUES (?, ?, ?, ?)", (*key, stamps, spec.to_json()))

    def _run(self, query: str, values: tuple[bytes | str, ...]) -> list[tuple[str]]:
        """Run a query and return its rows. After an error the database is not used any more, and the rows are
        empty."""
        with self._lock:
            if self._connection is None:
                return []
            try:
                return self._connection.execute(query, values).fetchall()
            except sqlite3.Error as error:
                self._give_up(error)
                return []

    def _give_up(self, error: Exception) -> None:
        _log.warning("the adapter cache %s is not usable (%s); going on without it", self._path, error)
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _stamps(files: Iterable[Path]) -> str:
    """Return a string that differs where a file was replaced, even by a file of the same size and time. It
    leaves out the device number, which may change when the machine restarts. Raises AdapterError."""
    try:
        found = [os.stat(file) for file in files]
    except OSError as error:
        raise AdapterError(f"the adapter cannot be looked at: {error.strerror or error}") from error
    return ":".join(f"{each.st_ino}:{each.st_size}:{each.st_mtime_ns}:{each.st_ctime_ns}" for each in found)


def fingerprint(geometry: AdapterGeometry, layer_prefix: str) -> str:
    """Return a digest of all that inspection depends on besides the adapter: layers, projections, names,
    format."""
    projections = [(p.module, p.in_features, p.out_features) for p in geometry.projections]
    described = [FORMAT_VERSION, layer_prefix.rstrip("."), geometry.page.layers, projections]
    if len(set(geometry.layers)) > 1:  # left out for equal layers, so that their older caches stay valid
        described.append([[group.name for group in groups] for groups in geometry.layers])
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()
