"""The comparison with PEFT on a CPU: every system runs, and those that compute the same give the same tokens."""

from __future__ import annotations

import pytest
from manylora_lab.benchmarks import cpu_vs_peft


def test_every_system_runs_and_copies_take_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("REQUESTS", 6), ("GENERATE", 4), ("ADAPTERS", 2)):
        monkeypatch.setattr(cpu_vs_peft, name, value)
    found = cpu_vs_peft.measure(1)
    assert next(iter(found["tokens_per_s"])) == "PEFT, one mixed batch", "what is compared with comes first"
    assert len(found["tokens_per_s"]) == 6
    assert all(rate > 0 for rate in found["tokens_per_s"].values())
    agreed, total = found["requests_equal_to_peft"]
    assert agreed >= total - 1, "but for near ties"
    merged, shared = (found["weight_bytes"][name] for name in ("merged copies", "one base and all adapters"))
    assert merged > 2 * shared, "three models against one with two adapters"


def test_a_merged_copy_answers_as_its_adapter_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_vs_peft, "GENERATE", 4)
    folder = sorted((cpu_vs_peft.DEMO / "adapters").iterdir())[0]
    adapters = {"one": str(folder)}
    prompts = [[5 + 7 * i + j for j in range(cpu_vs_peft.PROMPT)] for i in range(4)]
    models: list[str | None] = ["one", None, "one", None]
    merged = cpu_vs_peft.MergedCopies(adapters).run(prompts, models)
    expected = cpu_vs_peft.Peft(adapters).per_adapter(prompts, models)
    assert sum(a == b for a, b in zip(merged, expected)) >= 3, "but for a near tie"
