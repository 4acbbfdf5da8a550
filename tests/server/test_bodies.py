"""What a large body may hold is counted before it is decoded, exactly for any strings; and what a body must be."""

from __future__ import annotations

import asyncio
import codecs
import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from manylora.server import requests
from manylora.types import InvalidRequest
from tests.server.conftest import BASE, make_app
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
    patch.setattr(requests, "_SMALL_BYTES", 0)
    for name, limit in zip(("MAX_STRINGS", "MAX_CONTAINERS", "MAX_VALUES"), limits, strict=True):
        patch.setattr(requests, name, limit)
    try:
        requests.check_contents(raw)
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
        assert len(json.dumps(body)) < requests.max_bytes(info) - requests._MIN_BYTES + 10_000
    requests.check_contents(json.dumps({"logit_bias": dict.fromkeys(map(str, range(300_000)), 1.5)}).encode())
    requests.check_contents(json.dumps({"prompt": [[5] * 1000] * 4096}).encode())


OK = {"model": BASE, "prompt": [5], "max_tokens": 2}


def posted(
    path: str = "/v1/completions", content: bytes | None = None, **headers: str | None
) -> httpx.Response:
    """With the type of JSON, unless another is given; None: no such header."""
    named = {"Content-Type": "application/json"} | {
        name.replace("_", "-"): text for name, text in headers.items()
    }
    kept = {name: text for name, text in named.items() if text is not None}
    sent = json.dumps(OK).encode() if content is None else content

    async def scenario() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(FakeEngine(), None, adapter_dir=Path("/nowhere")))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, content=sent, headers=kept)

    return asyncio.run(scenario())


@pytest.mark.parametrize("given", [
    "text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x", "application/jsonp", "text/json", "", None,
])  # fmt: skip
def test_a_body_of_another_type_is_refused(given: str | None) -> None:
    """Those that a browser sends to any site, whatever page asks, among them."""
    for route in ("completions", "chat/completions", "load_lora_adapter", "unload_lora_adapter", "loras"):
        answer = posted(f"/v1/{route}", Content_Type=given)
        assert answer.status_code == 415, route
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("UnsupportedMediaTypeError", 415)
        assert "application/json" in error["message"]


@pytest.mark.parametrize(
    "given", ["application/json; charset=utf-8", "Application/JSON", "application/json ;x=y"]
)
def test_parameters_of_the_type_mean_nothing(given: str) -> None:
    assert posted(Content_Type=given).status_code == 200


def test_a_body_that_is_not_there_is_no_json() -> None:
    assert posted(content=b"", Content_Type=None).status_code == 400


def test_a_compressed_body_is_refused_as_such() -> None:
    for coding in ("gzip", "deflate", "br", "zstd", "gzip, identity"):
        answer = posted(content=gzip.compress(b"{}"), Content_Encoding=coding)
        assert answer.status_code == 415
        assert coding in answer.json()["error"]["message"]
        assert answer.headers["accept-encoding"] == "identity"
    assert posted(Content_Encoding="identity").status_code == 200


def test_a_mark_of_utf_8_at_the_beginning_is_read_over() -> None:
    assert posted(content=codecs.BOM_UTF8 + json.dumps(OK).encode()).status_code == 200
    for raw in (codecs.BOM_UTF8, codecs.BOM_UTF8 * 2 + b"{}", json.dumps(OK).encode("utf-16")):
        assert posted(content=raw).status_code == 400
