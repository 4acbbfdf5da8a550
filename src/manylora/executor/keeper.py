"""Keeps adapters that have been read in the adapter store, beside the reads and the steps.

Owns the one thread that writes to the store, and when it does. It packs each adapter once more, from files that
the system has in memory by then: the pages that were read are the policy's, which may give them to others at once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from manylora.adapters.peft import AdapterSpec
from manylora.adapters.store import AdapterStore

_log = logging.getLogger(__name__)

_MOST_WAITING = 1024
_YIELD_S = 0.2
"""For so long reads are let past before each page: an engine that always reads still gets its adapters kept."""


class _Closing(Exception):
    """The keeper is being closed."""


class Keeper:
    """All methods may be called from any thread."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._waiting: dict[str, AdapterSpec] = {}
        self._num_reads = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="manylora-adapter-keep", daemon=True)
        self._thread.start()

    def keep(self, spec: AdapterSpec) -> None:
        """Write this adapter to the store, in a while. Where very many wait already, it is not kept."""
        with self._changed:
            if len(self._waiting) < _MOST_WAITING:
                self._waiting[spec.path] = spec
            self._changed.notify_all()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A request waits for an adapter meanwhile: what has time leaves it the cores and the disk."""
        with self._changed:
            self._num_reads += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_reads -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Break off what is being written, and end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._store.tidy(self._check)
            while True:
                self._write_one()
        except _Closing:
            pass

    def _write_one(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting)
            if self._closing:
                raise _Closing
            spec = self._waiting.pop(next(iter(self._waiting)))
        try:
            self._store.write(spec, self._check)
        except _Closing:
            raise
        except Exception:
            _log.exception("keeping the adapter in %s failed", spec.path)

    def _check(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or not self._num_reads, _YIELD_S)
            if self._closing:
                raise _Closing
