"""Records a request's deltas on their way to the client."""

from __future__ import annotations

from collections.abc import AsyncIterator

from manylora.metrics.requests import RequestRecorder
from manylora.text.generate import TextDelta, TextStream


class RecordedStream:
    """A request's deltas, each recorded as it is read. Closing it ends the record."""

    def __init__(self, stream: TextStream, recorder: RequestRecorder) -> None:
        self._stream = stream
        self._recorder = recorder

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        return self

    async def __anext__(self) -> TextDelta:
        delta = await self._stream.__anext__()
        self._recorder.observe(delta)
        return delta

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent."""
        self._recorder.close()
        await self._stream.aclose()
