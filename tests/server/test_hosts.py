"""What browsers may not do for pages of other sites, and by which names the server may be called."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from manylora.config.sections import HttpSettings
from manylora.listening import bind
from manylora.server.middleware import allowed_hosts
from manylora.text.tokenizer import Tokenizer
from tests.server.conftest import BASE, client_of, make_app
from tests.server.fakes import FakeEngine

LOCAL = ("localhost", "127.0.0.1", "::1", "127.0.0.1")


def default_of(host: str, family: socket.AddressFamily = socket.AF_INET) -> tuple[str, ...]:
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        return allowed_hosts((), host, sock)


def test_by_default_a_server_of_the_loopback_has_its_names() -> None:
    assert default_of("127.0.0.1") == LOCAL
    assert default_of("127.0.0.2")[-1] == "127.0.0.2"
    assert default_of("0.0.0.0") == ("*",)
    assert default_of("::", socket.AF_INET6) == ("*",)


@pytest.mark.parametrize("host", ["[::1]", "::1"])
def test_an_address_of_version_six_may_stand_in_brackets(host: str) -> None:
    with bind(HttpSettings(host=host, port=0)) as sock:
        assert sock.getsockname()[0] == "::1"
        assert set(allowed_hosts((), host, sock)) == set(LOCAL)


def test_hosts_of_other_names_are_refused(tokenizer: Tokenizer) -> None:
    """All routes: an answer to a page that has given its name this machine's address is one that it can read."""
    given = allowed_hosts(("localhost,[::1]", "*.Good.example"), "x", socket.socket(socket.AF_UNIX))
    app = make_app(FakeEngine(), tokenizer, allowed_hosts=given)

    async def scenario() -> None:
        async with client_of(app) as client:
            for host in ("localhost", "LOCALHOST:8000", "[::1]", "[::1]:1", "a.good.example:8"):
                assert (await client.get("/v1/models", headers={"host": host})).status_code == 200, host
            for host in (
                "evil.example",
                "evil.example:8000",
                "good.example",
                "localhost.evil.example",
                "::1",
                "",
            ):
                for path in ("/v1/models", "/health", "/nothing"):
                    answer = await client.get(path, headers={"host": host})
                    assert answer.status_code == 403, host
                    assert "--allowed-hosts" in answer.json()["error"]["message"]

    asyncio.run(scenario())


def test_pages_of_other_origins_manage_no_adapters(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = FakeEngine()
    app = make_app(engine, tokenizer, adapter_dir=tmp_path)
    (tmp_path / "a").mkdir()
    calls = [
        ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a"}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}),
        ("POST", "/v1/loras", {"lora_name": "a", "source": {"uri": "a"}}),
        ("DELETE", "/v1/loras/a", None),
    ]

    async def scenario() -> None:
        async with client_of(app) as client:
            for origin in ("http://evil.example", "null", "http://test:81", "http://test.evil.example"):
                for method, path, body in calls:
                    answer = await client.request(method, path, json=body, headers={"origin": origin})
                    assert answer.status_code == 403, (origin, path)
                    assert answer.json()["error"]["type"] == "PermissionDeniedError"
            assert not engine.loads
            for method, path, body in calls:
                own = {"origin": "http://test"}
                assert (await client.request(method, path, json=body, headers=own)).status_code == 200, path
            generation = {"model": BASE, "prompt": [5]}
            answer = await client.post(
                "/v1/completions", json=generation, headers={"origin": "http://evil.example"}
            )
            assert answer.status_code == 200

    asyncio.run(scenario())
