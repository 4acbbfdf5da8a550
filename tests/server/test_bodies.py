"""What a large body may hold is counted before it is decoded, exactly, whatever its strings say."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from manylora.server import bodies
from manylora.types import InvalidRequest
from tests.server.fakes import FakeEngine

TEXT = st.text(st.sampled_from('"\\[]{},: aé\n\x00'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=30,
)


def count(value: Any) -> tuple[int, int, int]:
    """Strings (keys among them), lists and objects, and commas."""
    if isinstance(value, str):
        return 1, 0, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = list(value) if isinstance(value, list) else [*value, *value.values()]
    sums = [sum(column) for column in zip(*map(count, inner), strict=True)] if inner else [0, 0, 0]
    return sums[0], sums[1] + 1, sums[2] + max(len(value) - 1, 0)


def is_refused(raw: bytes, limits: tuple[int, int, int], patch: pytest.MonkeyPatch) -> bool:
    patch.setattr(bodies, "_SMALL_BYTES", 0)
    for name, limit in zip(("MAX_STRINGS", "MAX_CONTAINERS", "MAX_VALUES"), limits, strict=True):
        patch.setattr(bodies, name, limit)
    try:
        bodies.check_contents(raw)
    except InvalidRequest:
        return True
    return False


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=VALUES, ensure_ascii=st.booleans(), indent=st.sampled_from([None, 1]))
def test_counts_are_exact(value: Any, ensure_ascii: bool, indent: int | None) -> None:
    raw = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent).encode()
    limits = count(value)
    with pytest.MonkeyPatch.context() as patch:
        assert not is_refused(raw, limits, patch)
        for position in range(3):
            fewer = list(limits)
            fewer[position] -= 1
            assert is_refused(raw, (fewer[0], fewer[1], fewer[2]), patch)


def test_the_default_limit_holds_the_longest_prompts() -> None:
    """As ids, as text with every character escaped, in many messages; with a bias for every token."""
    info = FakeEngine().info
    bias = {str(token): -99.99999999999999 for token in range(info.vocab_size)}
    for prompt in ([info.vocab_size - 1] * info.max_model_len, "\ud83d" * 8 * info.max_model_len):
        body = {"model": "base", "prompt": prompt, "logit_bias": bias}
        assert len(json.dumps(body)) < bodies.max_bytes(info) - bodies._MIN_BYTES + 10_000
    bodies.check_contents(json.dumps({"logit_bias": dict.fromkeys(map(str, range(300_000)), 1.5)}).encode())
    bodies.check_contents(json.dumps({"prompt": [[5] * 1000] * 4096}).encode())
