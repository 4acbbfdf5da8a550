"""Adapters' files from the router's machine into the cache of a replica's, by their digest, which alone counts.

A piece is asked for when the last one has come, so a copy of gigabytes never has more than one under way, and
neither the router's decisions nor tokens, which have other links, wait for it. Does not know what files hold.
"""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from manylora.cluster import messages
from manylora.cluster.adapter_cache import AdapterCache, CacheFull
from manylora.cluster.credentials import Credentials
from manylora.cluster.digests import ADAPTER_FILES, adapter_digest
from manylora.cluster.link import REDIAL_S, Hello, Link, LinkError, LinkRefused, redial
from manylora.protocol import AdapterError
from manylora.types import AdapterId

PATIENCE_S = 10.0
"""For a router that is gone: another one has taken its place by then."""

_from_router = msgspec.msgpack.Decoder(messages.ToPullerFromRouter)
_Answer = TypeVar("_Answer", messages.Files, messages.FilePiece)


class FileSource(NamedTuple):
    """Where files come from: the router, whichever it is at the moment."""

    address: tuple[str, int]
    credentials: Credentials
    hello: Hello


def pull(source: FileSource, cache: AdapterCache, listing: messages.Listing) -> Path:
    """The folder in the cache that has a version's files, and keeps them until ``cache.release``. Blocks: for a
    thread of its own. Raises AdapterError."""
    try:
        if listing.digest and (folder := cache.take(listing.id, listing.digest)) is not None:
            return folder
        return asyncio.run(_Pull(source, cache, listing.id).run(listing.digest))
    except CacheFull as error:
        raise AdapterError(f"adapter {listing.name!r} cannot be kept: {error}", status=503) from error
    except OSError as error:
        raise AdapterError(
            f"adapter {listing.name!r} cannot be kept in {cache.path}: {error.strerror}", status=503
        ) from error


class _Pull:
    """One version's way over links that may end."""

    def __init__(self, source: FileSource, cache: AdapterCache, adapter: AdapterId) -> None:
        self._source = source
        self._cache = cache
        self._id = adapter
        self._link: Link | None = None

    async def run(self, digest: str) -> Path:
        """Raises AdapterError, OSError and CacheFull."""
        try:
            files = await self._ask(messages.AskFiles(self._id), messages.Files)
            is_named = digest in ("", files.digest) and re.fullmatch("[0-9a-f]{64}", files.digest)
            if not is_named or len(files.sizes) != len(ADAPTER_FILES) or min(files.sizes) < 0:
                raise AdapterError("the router names other files than the registry has")
            if not digest and (folder := self._cache.take(self._id, files.digest)) is not None:
                return folder
            with self._cache.made(self._id, files.digest, sum(files.sizes)) as folder:
                for number, size in enumerate(files.sizes):
                    await self._copy(number, size, folder / ADAPTER_FILES[number])
                if adapter_digest(folder) != files.digest:
                    raise AdapterError("the files that came are not those that were loaded")
            taken = self._cache.take(self._id, files.digest)
            if taken is None:
                raise AdapterError(f"the files in {self._cache.path} change by themselves", status=503)
            return taken
        finally:
            if self._link is not None:
                self._link.abort()

    async def _copy(self, number: int, size: int, path: Path) -> None:
        with path.open("xb") as file:
            for offset in range(0, size, messages.PIECE_BYTES):
                num_bytes = min(messages.PIECE_BYTES, size - offset)
                ask = messages.AskPiece(self._id, number, offset, num_bytes)
                piece = await self._ask(ask, messages.FilePiece)
                if len(piece.data) != num_bytes:
                    raise AdapterError("the adapter's files have become shorter while they were copied")
                file.write(piece.data)

    async def _ask(self, message: messages.ToRouterFromPuller, kind: type[_Answer]) -> _Answer:
        """Of a router that takes the place of one that ends, too. Raises AdapterError."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            if self._link is None or not self._link.is_open:
                self._link = await self._dial(until_s)
            self._link.send(message)
            answer = await self._link.receive()
            if isinstance(answer, messages.NoFiles):
                raise AdapterError(answer.error.message, answer.error.status)
            if isinstance(answer, kind):
                return answer
            if answer is not None:
                raise AdapterError("the router has answered something else")
            if time.monotonic() > until_s:
                raise AdapterError("the router ends each link for files", status=503)
            await asyncio.sleep(REDIAL_S)

    async def _dial(self, until_s: float) -> Link:
        try:
            return await redial(*self._source, _from_router, most_s=until_s - time.monotonic())
        except LinkRefused as error:
            raise AdapterError(f"the router gives no files: {error}", status=503) from error
        except LinkError as error:
            raise AdapterError(f"the router cannot be reached: {error}", status=503) from error
