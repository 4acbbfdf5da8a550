"""The benchmark of cold starts, as a toy on the CPU: its records' form."""

from __future__ import annotations

import json
from pathlib import Path

from manylora_lab.benchmarks import cold_starts


def test_adapters_in_host_memory_by_what_brings_them_and_by_room(tmp_path: Path) -> None:
    out = tmp_path / "cold.json"
    cold_starts.main(
        ["--toy", "--parts", "brought,room", "--ranks", "16", "--out", str(out), "--commit", "abc"]
    )
    found = json.loads(out.read_text())
    assert {"command", "commit", "device", "torch", "provenance"} <= set(found)
    assert found["left_out"] == []
    kinds = ("host", "warm, another", "warm, the same")
    assert {(row["by"], row["kind"]) for row in found["brought"]} == {
        (way, kind) for way in cold_starts.BROUGHT_BY for kind in kinds
    }
    held = (cold_starts.HELD, cold_starts.TOY_MANY_HELD)
    rows = {(row["held"], row["kind"]): row for row in found["room"]}
    assert set(rows) == {(count, kind) for count in held for kind in ("host", "warm")}
    for (_, kind), row in rows.items():
        assert 0 < row["least_ms"] <= row["ms"] <= row["most_ms"]
        assert row["evictions"] > 0
        if kind == "warm":
            assert row["count"] == cold_starts.ROOM_WARM
    assert rows[cold_starts.HELD, "host"]["count"] == 4, "each comes from the host"
