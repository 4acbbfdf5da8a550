"""Adapters' files for replicas that do not have them: the router's side, which reads them where they lie.

Does not know what files hold.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from manylora.cluster import messages
from manylora.cluster.adapter_files import ADAPTER_FILES
from manylora.cluster.link import Link
from manylora.cluster.rollout import Rollout
from manylora.protocol import AdapterError
from manylora.types import RequestError


async def serve_files(link: Link, registry: Rollout) -> None:
    """The router's side of a link, until it ends."""
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
