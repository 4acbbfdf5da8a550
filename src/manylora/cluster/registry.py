"""Keeps the registry of adapters: its log, its roll-out to the cluster, and the files of listed adapters.

The log is a sequence of revisions in SQLite. Only the router writes it; every change is a revision, and a
later router opens the same file. Every replica serves the listed versions, and every front end knows them. A
version is listed when each linked replica serves it. The same revision ends the version that it replaces. A
version is gone when no request names it any more and each replica has freed it or is gone itself. This module
does not know what the files hold.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from manylora.cluster import messages
from manylora.cluster.adapter_files import ADAPTER_FILES, adapter_digest
from manylora.cluster.children import Tasks
from manylora.cluster.link import Link
from manylora.cluster.members import Members, ReplicaMember
from manylora.cluster.messages import Listing
from manylora.config.declaring import ConfigError
from manylora.protocol.executor import AdapterError
from manylora.protocol.routing import Listed, RouterEvent, Unlisted
from manylora.types import BASE, AdapterId, RequestError

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""The time between two checks of whether a replica should be asked again."""

_FIELDS = ("revision", "id", "name", "path", "digest", "rank", "num_pages", "created_s", "state")
_TABLE = """
CREATE TABLE IF NOT EXISTS log (
    revision INTEGER, id INTEGER, name TEXT, path TEXT, digest TEXT, rank INTEGER, num_pages INTEGER,
    created_s INTEGER, state TEXT, PRIMARY KEY (revision, id)
)
"""


class Rollout:
    """The registry as replicas and front ends receive it. Used on the router's event loop.

    ``log``: the versions and their states. ``report``: sends an event to the router itself.
    """

    def __init__(
        self, adapter_log: AdapterLog, members: Members, report: Callable[[RouterEvent], None], wait_s: float
    ) -> None:
        """Start with the state in the log. ``wait_s``: how long a load waits for a replica where there is
        none."""
        self.log = adapter_log
        self._members = members
        self._report = report
        self._wait_s = wait_s
        self._busy: set[str] = set()
        self._uses: collections.Counter[AdapterId] = collections.Counter()
        self._change = asyncio.Event()
        self._tasks = Tasks()

    def begin(self, named: list[tuple[str, str]]) -> None:
        """List the adapters that the start names, beside those that an earlier cluster left in this folder. A
        name with a new path gets a new version."""
        known = {each.name: each for each in self.log.current.values() if each.state == "listed"}
        changed = []
        for name, path in named:
            before = known.get(name)
            if before is not None and before.path == path:
                continue
            if before is not None:
                changed.append(msgspec.structs.replace(before, state="gone"))
            changed.append(Listing(0, self.log.new_id(), name, path, "", 0, 0, int(time.time()), "listed"))
        stale = [each for each in self.log.current.values() if each.state != "listed"]
        changed += [msgspec.structs.replace(each, state="gone") for each in stale]
        if changed:
            self.log.append(*changed)

    def take_over(self) -> None:
        """Finish the changes that the earlier router of this log had begun. Its unfinished loads are given up."""
        half = [each for each in self.log.current.values() if each.state == "loading"]
        if half:
            self._append(*(msgspec.structs.replace(each, state="gone") for each in half))
        for each in self.log.current.values():
            if each.rank:
                self._report(Listed(each.id, each.rank, each.num_pages, each.revision))
            if each.state == "leaving":
                self._tasks.spawn(self._retire(each))

    # ------------------------------------------------------------ members

    def whole(self) -> messages.Revisions:
        """Return the whole registry as one message."""
        return messages.Revisions(self.log.revision, list(self.log.current.values()), is_whole=True)

    def greet(self, replica: ReplicaMember, has: list[AdapterId]) -> None:
        """Have a new replica serve the listed versions, and drop all others."""
        for adapter in has:
            if adapter not in self.log.current:
                replica.drop(adapter)
        for listing in self.log.current.values():
            replica.ask(listing, verify=False)
        self.pulse()

    def settle(self, replica: ReplicaMember, *, is_last: bool) -> None:
        """Note the rank and the pages of adapters from the answers of a replica that has answered for all of
        them. Where it ``is_last``, no other replica is still to start: an adapter that none has served is
        skipped."""
        learnt, bad = [], []
        for adapter, answer in replica.answers.items():
            listing = self.log.current.get(adapter)
            if listing is None or listing.state != "listed" or listing.rank:
                continue
            if answer.card is not None:
                card = answer.card
                learnt.append(msgspec.structs.replace(listing, rank=card.rank, num_pages=card.num_pages))
            elif is_last:
                why = replica.why_not(adapter)
                log.warning("adapter %r in %s is skipped: %s", listing.name, listing.path, why)
                bad.append(msgspec.structs.replace(listing, state="gone"))
        if learnt or bad:
            self._append(*learnt, *bad)
            for each in learnt:
                self._report(Listed(each.id, each.rank, each.num_pages, self.log.revision))

    def receive(self, replica: ReplicaMember, message: messages.AdapterReady | messages.AdapterGone) -> None:
        """Note that a replica serves a version, cannot serve it, or has freed it."""
        if isinstance(message, messages.AdapterGone):
            replica.forget(message.id)
        else:
            replica.receive_answer(message)
        self.pulse()

    def lacking(self, replica: ReplicaMember) -> list[Listing]:
        """Find the listed versions that the replica has reported as not available to it."""
        found = (self.log.current.get(adapter) for adapter in replica.pauses)
        return [each for each in found if each is not None and each.state in ("listed", "leaving")]

    def lacks(self, replica: ReplicaMember) -> tuple[AdapterId, ...]:
        """Return the versions that requests may name and that the replica cannot serve. Newly found ones are
        written to the process's log."""
        found = self.lacking(replica)
        for listing in found:
            if listing.id not in replica.reported:
                why = replica.why_not(listing.id)
                log.warning("replica %d is without adapter %r: %s", replica.id, listing.name, why)
        replica.reported = {listing.id for listing in found}
        return tuple(sorted(replica.reported))

    async def retry(self) -> None:
        """Ask replicas again and again for the versions that they lack, since files may arrive late."""
        while True:
            await asyncio.sleep(RETRY_S)
            for replica in self._members.replicas.values():
                for listing in self.lacking(replica):
                    if listing.state == "listed":
                        replica.ask_again(listing)

    async def digested(self, adapter: AdapterId) -> Listing:
        """Return a version with its digest. Adapters of the start have no digest until one is asked for.
        Raises AdapterError."""
        listing = self._of(adapter)
        if not listing.digest:
            digest = await asyncio.to_thread(adapter_digest, Path(listing.path))
            listing = self._of(adapter)  # another call may have changed it in the meantime
            if not digest:
                raise AdapterError(f"the files in {listing.path} cannot be read", status=404)
            if not listing.digest:
                listing = msgspec.structs.replace(listing, digest=digest)
                self._append(listing)
        return listing

    def _of(self, adapter: AdapterId) -> Listing:
        listing = self.log.current.get(adapter)
        if listing is None:
            raise AdapterError("the adapter is not there any more", status=404)
        return listing

    def pulse(self) -> None:
        """Wake all coroutines that wait for a change."""
        self._change.set()
        self._change = asyncio.Event()

    # ------------------------------------------------------------ requests

    def use(self, adapter: AdapterId) -> None:
        """Note that a live request names the version."""
        self._uses[adapter] += 1

    def unuse(self, adapter: AdapterId) -> None:
        """Note that one live request fewer names the version."""
        self._uses[adapter] -= 1
        if not self._uses[adapter]:
            del self._uses[adapter]
            self.pulse()

    # ------------------------------------------------------------ loads

    async def load(self, name: str, path: str, *, replaces: bool) -> Listing:
        """Have every replica serve the adapter, then send it to every front end. Raises AdapterError."""
        before = self.log.find(name)
        if name in self._busy or (before is not None and not replaces):
            raise AdapterError(f"an adapter named {name!r} is already loaded, or is just being")
        self._busy.add(name)
        try:
            digest = await asyncio.to_thread(adapter_digest, Path(path))
            found = Listing(0, self.log.new_id(), name, path, digest, 0, 0, int(time.time()), "loading")
            self._append(found)
            try:
                listing = await self._load_everywhere(found)
                before = self.log.find(name)
                ends = [] if before is None else [msgspec.structs.replace(before, state="leaving")]
                # The router must know it first: a front end may name it once it has the revision.
                self._report(Listed(listing.id, listing.rank, listing.num_pages, self.log.revision + 1))
                self._append(listing, *ends)
            except BaseException:
                self._give_up(found)
                raise
            await self._known_everywhere()
            for each in ends:
                self._report(Unlisted(each.id, self.log.revision))
                self._tasks.spawn(self._retire(each))
            return listing
        finally:
            self._busy.discard(name)

    def _give_up(self, found: Listing) -> None:
        self._report(Unlisted(found.id, self.log.revision))
        for replica in self._members.replicas.values():
            if found.id in replica.asked:
                replica.drop(found.id)
        with contextlib.suppress(AdapterError):  # the log cannot be written: the next router ends it
            self._append(msgspec.structs.replace(found, state="gone"))

    async def _load_everywhere(self, found: Listing) -> Listing:
        for replica in self._members.replicas.values():
            if replica.up is not None:
                replica.ask(found, verify=True)

        def answers() -> list[messages.AdapterReady | None]:
            replicas = self._members.replicas.values()
            return [each.answers.get(found.id) for each in replicas if found.id in each.asked]

        try:
            async with asyncio.timeout(None) as limit:
                loop = asyncio.get_running_loop()
                while not answers() or None in answers():
                    limit.reschedule(None if answers() else loop.time() + self._wait_s)
                    await self._change.wait()
        except TimeoutError as error:
            raise AdapterError("no replica is there to serve the adapter", status=503) from error
        cards = []
        for answer in answers():
            assert answer is not None
            if answer.card is None:
                why = answer.error or RequestError(500, "the adapter cannot be served")
                raise AdapterError(why.message, why.status)
            cards.append(answer.card)
        return msgspec.structs.replace(
            found, rank=cards[0].rank, num_pages=cards[0].num_pages, state="listed"
        )

    async def unload(self, name: str) -> None:
        """Refuse new requests for the adapter everywhere, and return when no replica has it any more. Raises
        AdapterError."""
        before = self.log.find(name)
        if before is None:
            raise AdapterError(f"no adapter named {name!r} is loaded", status=404)
        leaving = msgspec.structs.replace(before, state="leaving")
        self._append(leaving)
        await self._known_everywhere()
        self._report(Unlisted(leaving.id, self.log.revision))
        await self._retire(leaving)

    async def _retire(self, leaving: Listing) -> None:
        """Wait for the requests that name the version, then have each replica free it."""
        while self._uses[leaving.id]:
            await self._change.wait()
        asked: set[ReplicaMember] = set()
        while holders := [each for each in self._members.replicas.values() if leaving.id in each.asked]:
            for replica in holders:
                if replica not in asked:  # a replica may have joined in the meantime
                    asked.add(replica)
                    replica.drop(leaving.id)
            await self._change.wait()
        if leaving.id in self.log.current:
            self._append(msgspec.structs.replace(leaving, state="gone"))

    async def _known_everywhere(self) -> None:
        revision = self.log.revision
        while any(each.revision < revision for each in self._members.frontends.values()):
            await self._change.wait()

    def _append(self, *listings: Listing) -> None:
        appended = self.log.append(*listings)
        news = messages.Revisions(self.log.revision, appended)
        self._members.send_to_frontends(news)
        self._members.send_to_supervisor(news)


class AdapterLog:
    """The log of revisions. Used by one thread. ``current``: every version that is not gone, oldest first."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it, and read all revisions. Raises ConfigError where it cannot be used."""
        self.current: dict[AdapterId, Listing] = {}
        self.revision = 0
        self._last_id = BASE
        try:
            path.touch(0o600)  # the files that SQLite adds get its mode
            self._file = sqlite3.connect(path, isolation_level=None)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute(_TABLE)
            for row in self._file.execute(f"SELECT {', '.join(_FIELDS)} FROM log ORDER BY revision, id"):
                self._apply(Listing(*row))
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"cannot use the registry {path}: {error}") from error

    def new_id(self) -> AdapterId:
        """Return a version number that no earlier version has had."""
        self._last_id += 1
        return self._last_id

    def find(self, name: str) -> Listing | None:
        """Return the listed version of this name, or None."""
        found = (each for each in self.current.values() if each.name == name and each.state == "listed")
        return next(found, None)

    def append(self, *listings: Listing) -> list[Listing]:
        """Write one revision of these listings, and return them with its number. Raises AdapterError where it
        cannot be written; the log is then unchanged."""
        revision = self.revision + 1
        numbered = [msgspec.structs.replace(each, revision=revision) for each in listings]
        marks = ", ".join("?" * len(_FIELDS))
        try:
            with self._file:
                self._file.execute("BEGIN IMMEDIATE")
                rows = map(msgspec.structs.astuple, numbered)
                self._file.executemany(f"INSERT INTO log VALUES ({marks})", rows)
        except sqlite3.Error as error:
            raise AdapterError(f"the registry cannot be written: {error}", status=503) from error
        for each in numbered:
            self._apply(each)
        return numbered

    def restore(self, listings: list[Listing], last_id: AdapterId) -> None:
        """Restore an earlier router's listings where its file is lost. ``last_id``: the highest number it
        gave; no later version gets one of its numbers. Raises AdapterError."""
        if not self.revision and listings:
            self.append(*listings)
        self._last_id = max(self._last_id, last_id)

    def _apply(self, listing: Listing) -> None:
        self.revision = max(self.revision, listing.revision)
        self._last_id = max(self._last_id, listing.id)
        if listing.state == "gone":
            self.current.pop(listing.id, None)
        else:
            self.current[listing.id] = listing

    def close(self) -> None:
        """Close the file."""
        self._file.close()


async def serve_files(link: Link, registry: Rollout) -> None:
    """Answer a replica that copies adapters' files, until the link ends."""
    while (message := await link.receive()) is not None:
        answer: messages.ToPullerFromRouter
        try:
            listing = await registry.digested(message.id)
            folder = Path(listing.path)
            if isinstance(message, messages.AskFiles):
                answer = messages.Files(listing.digest, await asyncio.to_thread(_sizes, folder))
            else:
                path = folder / ADAPTER_FILES[message.file]
                num_bytes = min(message.num_bytes, messages.PIECE_BYTES)
                answer = messages.FilePiece(await asyncio.to_thread(_read, path, message.offset, num_bytes))
        except AdapterError as error:
            answer = messages.NoFiles(RequestError(error.status, str(error)))
        except (OSError, IndexError, ValueError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            answer = messages.NoFiles(RequestError(404, f"the adapter's files cannot be read: {reason}"))
        link.send(answer)


def _sizes(folder: Path) -> list[int]:
    return [(folder / name).stat().st_size for name in ADAPTER_FILES]


def _read(path: Path, offset: int, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), num_bytes, offset)
