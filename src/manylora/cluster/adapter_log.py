"""The cluster's registry of adapters: one log of revisions, in SQLite, written by the router alone.

Owns which versions of which names there are; every change is a revision, and the log is all that there is of it.
Another router opens the same file. Does not know which replica has what.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from manylora.cluster.messages import Listing
from manylora.config import ConfigError
from manylora.protocol import AdapterError
from manylora.types import BASE, AdapterId

_FIELDS = ("revision", "id", "name", "path", "digest", "rank", "num_pages", "created_s", "state")
_TABLE = """
CREATE TABLE IF NOT EXISTS log (
    revision INTEGER, id INTEGER, name TEXT, path TEXT, digest TEXT, rank INTEGER, num_pages INTEGER,
    created_s INTEGER, state TEXT, PRIMARY KEY (revision, id)
)
"""


class AdapterLog:
    """Used by one thread. ``current``: what is listed or leaving, by version, in the order in which it came."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where the file cannot be used."""
        self.current: dict[AdapterId, Listing] = {}
        self.revision = 0
        self._last_id = BASE
        try:
            path.touch(0o600)  # what SQLite writes beside it has its mode
            self._file = sqlite3.connect(path, isolation_level=None)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute(_TABLE)
            for row in self._file.execute(f"SELECT {', '.join(_FIELDS)} FROM log ORDER BY revision, id"):
                self._apply(Listing(*row))
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"cannot use the registry {path}: {error}") from error

    def new_id(self) -> AdapterId:
        """A version that was never there, whatever becomes of this one."""
        self._last_id += 1
        return self._last_id

    def find(self, name: str) -> Listing | None:
        """The version that the name stands for now."""
        found = (each for each in self.current.values() if each.name == name and each.state == "listed")
        return next(found, None)

    def append(self, *listings: Listing) -> list[Listing]:
        """One revision more, of all these; as they are in it. Raises AdapterError where it cannot be written: then
        nothing has changed."""
        revision = self.revision + 1
        numbered = [msgspec.structs.replace(each, revision=revision) for each in listings]
        marks = ", ".join("?" * len(_FIELDS))
        try:
            with self._transaction():
                for each in numbered:
                    self._file.execute(f"INSERT INTO log VALUES ({marks})", msgspec.structs.astuple(each))
        except sqlite3.Error as error:
            raise AdapterError(f"the registry cannot be written: {error}", status=503) from error
        for each in numbered:
            self._apply(each)
        return numbered

    def restore(self, listings: list[Listing], last_id: AdapterId) -> None:
        """Have what another router had listed, where its file is lost; no later version is given a number of that
        one's. Raises AdapterError."""
        if not self.revision and listings:
            self.append(*listings)
        self._last_id = max(self._last_id, last_id)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._file.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._file.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._file.execute("ROLLBACK")
            raise

    def _apply(self, listing: Listing) -> None:
        self.revision = max(self.revision, listing.revision)
        self._last_id = max(self._last_id, listing.id)
        if listing.state == "gone":
            self.current.pop(listing.id, None)
        else:
            self.current[listing.id] = listing

    def close(self) -> None:
        """Give the file up."""
        self._file.close()
