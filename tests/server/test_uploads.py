"""Which bodies are refused where too much of them is on its way."""

from __future__ import annotations

from typing import Any

from manylora.server.connection import Uploads
from manylora.server.errors import ApiError


class Upload:
    def __init__(self) -> None:
        self.refusals: list[ApiError] = []

    def refuse(self, error: ApiError) -> None:
        self.refusals.append(error)


def test_the_slowest_goes_when_there_are_too_many_bytes() -> None:
    uploads: Any = Uploads(1000)
    slow, fast, new = Upload(), Upload(), Upload()
    uploads.add(slow, 500, now_s=0.0)
    uploads.add(fast, 400, now_s=90.0)
    assert not slow.refusals
    uploads.add(new, 200, now_s=100.0)
    assert [error.status for error in slow.refusals] == [503]
    uploads.end(slow)  # again, as its connection does when it ends
    uploads.add(new, 400, now_s=101.0)
    assert not fast.refusals + new.refusals
    uploads.add(new, 1, now_s=102.0)
    assert len(fast.refusals) == 1
    assert not new.refusals


def test_whole_bodies_leave_their_room() -> None:
    uploads: Any = Uploads(1000)
    others = [Upload() for _ in range(100)]
    for number, each in enumerate(others):
        uploads.add(each, 600, now_s=float(number))
        uploads.add(each, 400, now_s=float(number))
        uploads.end(each)
    assert not any(each.refusals for each in others)
    alone = Upload()
    uploads.add(alone, 1001, now_s=0.0)
    assert len(alone.refusals) == 1
