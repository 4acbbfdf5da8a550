"""The address of a server, and the path of one on a Unix socket."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import httpx
import pytest

from manylora.config.declaring import ConfigError
from manylora.config.sections import HttpSettings
from manylora.listening import address_of, bound
from manylora.text.tokenizer import Tokenizer
from tests.server.conftest import RunningServer, make_app
from tests.server.fakes import FakeEngine


def test_a_server_on_a_path(engine: FakeEngine, tokenizer: Tokenizer, tmp_path: Path) -> None:
    http = HttpSettings(uds=str(tmp_path / "server.sock"))
    with bound(http) as sock, RunningServer(make_app(engine, tokenizer), engine, sock=sock):
        assert address_of(sock) == f"unix:{http.uds}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=http.uds), base_url="http://any") as client:
            assert client.get("/health").status_code == 200
            answer = client.post(
                "/v1/completions", json={"model": "org/base", "prompt": [5], "max_tokens": 2}
            )
        assert answer.status_code == 200
    assert list(tmp_path.iterdir()) == []


def test_a_path_is_its_owners_alone_and_one_servers(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    before = os.umask(0)
    try:
        with bound(HttpSettings(uds=str(path))):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            # It has not been listened on, as while its model loads.
            with pytest.raises(ConfigError, match="in use"), bound(HttpSettings(uds=str(path))):
                pass
            assert path.is_socket()
    finally:
        os.umask(before)


def test_what_a_killed_server_has_left_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with bound(HttpSettings(uds=str(path))):
        # Another one that has taken the path keeps it.
        path.unlink()
        path.write_text("a file")
    assert path.read_text() == "a file"
    with pytest.raises(ConfigError, match=r"server.sock: .*in use"), bound(HttpSettings(uds=str(path))):
        pass
    assert path.read_text() == "a file"


@pytest.mark.parametrize("path", ["no/such/folder/s", "x" * 200, "a\0b"])
def test_a_path_that_cannot_be_is_one_line(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"), bound(HttpSettings(uds=path)):
        pass


def test_addresses_are_shown_as_clients_write_them() -> None:
    with bound(HttpSettings(port=0)) as sock:
        assert address_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
