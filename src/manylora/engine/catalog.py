"""Names of adapters and their versions.

Owns name -> version. Reusing a removed name creates a new version, so stale cached data is never used. Versions
are numbered here, or elsewhere for several engines at once; a number is never reused. A version keeps its label
until it is freed. Does not know residency; the policy does.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable

from manylora.protocol import commands, events
from manylora.protocol.executor import AdapterChecked, AdapterError, Executor
from manylora.types import BASE, AdapterCard, AdapterId


class Catalog:
    """A thread-safe catalog. The caller's thread loads an adapter's headers.

    ``notify`` puts events for the policy into the loop's inbox. It is called under the catalog's lock, before a
    name is published and as it is given up, so that a version's removal never overtakes its addition.
    ``adapter_pages_limit``: how many of the device pool's ``num_pages`` one adapter may take.

    ``lookup``, ``card`` and ``label``, which the loop calls for every request, take no lock, so that it never
    waits for another thread: one look into a dict relies on the GIL.
    """

    def __init__(
        self,
        executor: Executor,
        notify: Callable[[events.AdapterAdded | events.AdapterRemoved], None],
        num_pages: int,
        adapter_pages_limit: int,
    ) -> None:
        self._executor = executor
        self._notify = notify
        self._num_pages = num_pages
        self.most_pages = adapter_pages_limit
        """The most pages that one adapter may take."""
        self._lock = threading.Lock()
        self._cards: dict[str, AdapterCard] = {}
        self._served: dict[AdapterId, AdapterCard] = {}  # the same by version
        self._labels: dict[AdapterId, str] = {BASE: "base"}
        self._pending: set[str] = set()
        self._used: set[AdapterId] = {BASE}  # versions, since the start
        self._last_id: AdapterId = BASE
        self._checking: dict[AdapterId, concurrent.futures.Future[AdapterChecked]] = {}
        self._leaving: dict[AdapterId, concurrent.futures.Future[None]] = {}

    def lookup(self, name: str) -> AdapterId | None:
        """Return the version that a name stands for now."""
        card = self._cards.get(name)
        return None if card is None else card.id

    def cards(self) -> tuple[AdapterCard, ...]:
        with self._lock:
            return tuple(self._cards.values())

    def card(self, adapter: AdapterId) -> AdapterCard | None:
        """Return a served version's card."""
        return self._served.get(adapter)

    def label(self, adapter: AdapterId) -> str:
        """Return a version for people to read, such as "german@3", on one line; known until it is freed."""
        return self._labels.get(adapter, f"@{adapter}")

    def add(self, name: str, path: str, verify: bool, version: AdapterId | None = None) -> AdapterCard:
        """Check the adapter, give it a version, and notify the policy. Raise AdapterError.

        ``version``: from outside, where others number versions; of several versions of one name the newest has
        it here.
        """
        with self._lock:
            if version is None and (name in self._cards or name in self._pending):
                raise AdapterError(f"an adapter named {name!r} is already loaded")
            adapter = self._number(version)
            self._pending.add(name)
        try:
            found = self._check(commands.InspectAdapter(adapter, path))
            try:
                if found.num_pages > self.most_pages:
                    raise AdapterError(
                        f"the adapter takes {found.num_pages} pages and the device pool has {self._num_pages}, of "
                        f"which adapters may take {self.most_pages}: raise --device-pool"
                    )
                if verify:  # last: the weights of an adapter that no pool holds may be endless
                    self._check(commands.VerifyAdapter(adapter))
            except Exception:
                self._executor.obey(commands.ForgetAdapter(adapter))
                raise
            card = AdapterCard(name, path, adapter, found.rank, found.num_pages, int(time.time()))
            with self._lock:
                self._labels[adapter] = f"{name if name.isprintable() else ascii(name)}@{adapter}"
                self._served[adapter] = card  # before the loop may ask for it
                self._notify(events.AdapterAdded(adapter, found.num_pages))
                self._cards[name] = card
            return card
        except Exception:
            self._used.discard(adapter)  # the policy never heard of it
            raise
        finally:
            with self._lock:
                self._pending.discard(name)

    def _number(self, version: AdapterId | None) -> AdapterId:
        """Return a new version number; the caller holds the lock."""
        if version is None:
            version = self._last_id + 1
        if version in self._used or version < 0:
            raise AdapterError(f"{version} is, or was, the version of another adapter", status=409)
        self._used.add(version)
        self._last_id = max(self._last_id, version)
        return version

    def _check(self, command: commands.InspectAdapter | commands.VerifyAdapter) -> AdapterChecked:
        """Let the executor check the adapter; raise AdapterError if it cannot be served."""
        future = self._checking[command.adapter] = concurrent.futures.Future()
        self._executor.obey(command)
        found = future.result()
        if not found.ok:
            raise AdapterError(found.error, found.status)
        return found

    def checked(self, found: AdapterChecked) -> None:
        """Take the executor's answer to a check. From any thread."""
        future = self._checking.pop(found.adapter, None)
        if future is not None:
            future.set_result(found)

    def remove(self, name: str, version: AdapterId | None = None) -> concurrent.futures.Future[None]:
        """Remove a name, or a version where others number these, and notify the policy.

        The future is done when ``freed`` is called for the version.
        """
        with self._lock:
            card = self._cards.get(name) if version is None else self._served.get(version)
            if card is None:
                raise AdapterError(f"no adapter named {name!r} is loaded", status=404)
            if self._cards.get(card.name) is card:
                del self._cards[card.name]
            del self._served[card.id]
            future = self._leaving[card.id] = concurrent.futures.Future()
            future.set_running_or_notify_cancel()  # The removal happens, even if no caller waits for it.
            self._notify(events.AdapterRemoved(card.id))
            return future

    def freed(self, adapter: AdapterId) -> None:
        """Forget a version of which the policy holds nothing any more."""
        self._executor.obey(commands.ForgetAdapter(adapter))
        with self._lock:
            self._labels.pop(adapter, None)
            future = self._leaving.pop(adapter, None)
        if future is not None:
            future.set_result(None)

    def fail_waiting(self, reason: Exception) -> None:
        """Fail every removal and check that waits, as the engine has ended."""
        with self._lock:
            leaving, self._leaving = list(self._leaving.values()), {}
        for future in leaving:
            future.set_exception(reason)
        for adapter in list(self._checking):
            checking = self._checking.pop(adapter, None)
            if checking is not None:
                checking.set_exception(reason)
