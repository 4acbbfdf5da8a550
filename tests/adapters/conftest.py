"""Fixtures of the tests of adapters' files."""

from __future__ import annotations

import pytest

from manylora.adapters import read_loops


@pytest.fixture(params=["by calls", "by loops"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters, packed ones too, are read by single calls, as before loops are compiled, and by loops."""
    read_loops.prepare()
    if request.param == "by calls":
        monkeypatch.setattr(read_loops, "are_ready", lambda: False)
