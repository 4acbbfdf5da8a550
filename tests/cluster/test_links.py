"""Links: strangers, liars and the slow are shut out, frames are bounded, and what is good goes through."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import ssl
import struct
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manylora._version import VERSION
from manylora.cluster import link, messages
from manylora.cluster.link import (
    Credentials,
    Hello,
    Link,
    LinkError,
    LinkRefused,
    Listener,
    bind,
    credentials_of,
    dial,
    why_strange,
)
from manylora.config.cluster import ClusterOptions
from manylora.config.declaring import ConfigError
from manylora.engine.wire import EMPTY, frame
from tests.cluster.cable import Cable
from tests.cluster.certificates import authority, certificate, expired, run

SECRET = b"s" * 32
PLAIN = Credentials(SECRET)


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two, of which the first is believed."""
    folder = tmp_path_factory.mktemp("certificates")
    return authority(folder / "ours"), authority(folder / "theirs")


@pytest.fixture(scope="module")
def encrypted(authorities: tuple[Path, Path]) -> Credentials:
    return credentials_of(SECRET, certificate(authorities[0]), "127.0.0.1")


@pytest.fixture(params=["plain", "encrypted"])
def good(request: pytest.FixtureRequest) -> Credentials:
    """What good peers have."""
    found: Credentials = PLAIN if request.param == "plain" else request.getfixturevalue("encrypted")
    return found


def hello(**changes: Any) -> Hello:
    return msgspec.structs.replace(Hello(messages.SUPERVISOR, 0, 1, 1, VERSION, "model"), **changes)


def asked(number: int) -> messages.Exited:
    """A question; EndSlot of the same number answers it."""
    return messages.Exited(number, 1, "", is_crash=False)


class Echo:
    """A listener that answers each question, and notes what it has seen."""

    def __init__(self, good: Credentials = PLAIN, silence_s: float = 60.0) -> None:
        self.good = good
        self.num_met = 0
        self.links: list[Link] = []
        self.listener = Listener(
            bind(),
            good,
            7,
            silence_s,
            {messages.SUPERVISOR: (messages.ToRouterFromSupervisor, self._serve)},
            lambda said: why_strange(said, "model"),
        )

    async def _serve(self, met: Link) -> None:
        self.num_met += 1
        self.links.append(met)
        while (message := await met.receive()) is not None:
            met.send(messages.EndSlot(message.replica))

    async def is_well(self) -> bool:
        """Whether a good peer is served."""
        found = await dial(self.listener.address, self.good, hello(), messages.ToSupervisorFromRouter)
        found.send(asked(3))
        answer = await asyncio.wait_for(found.receive(), 30.0)
        found.abort()
        return bool(answer == messages.EndSlot(3))


def running(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60.0))


async def is_closed(address: tuple[str, int], data: bytes, tls: ssl.SSLContext | None = None) -> bool:
    """Whether a peer that says this is shut out, at once or when its time is over."""
    try:
        reader, writer = await asyncio.open_connection(*address, ssl=tls)
    except OSError:
        return True
    writer.write(data)
    try:
        while await asyncio.wait_for(reader.read(65536), 30.0):
            pass
        return True
    except TimeoutError:
        return False
    except OSError:
        return True
    finally:
        writer.transport.abort()


def test_what_is_said_comes_through(good: Credentials) -> None:
    async def work() -> None:
        echo = Echo(good)
        await echo.listener.start()
        found = await dial(echo.listener.address, good, hello(), messages.ToSupervisorFromRouter)
        assert found.epoch == 7
        for number in range(100):
            found.send(asked(number))
        for number in range(100):
            assert await found.receive() == messages.EndSlot(number)
        found.close()
        assert await found.receive() is None

    running(work())


@pytest.mark.parametrize(
    ("secret", "changes", "error", "words"),
    [
        (b"t" * 32, {}, LinkError, "does not know"),
        (SECRET, {"version": "0.0.0"}, LinkRefused, "runs 0.0.0"),
        (SECRET, {"model": "other"}, LinkRefused, "files differ"),
        (SECRET, {"role": "king"}, LinkRefused, "no role"),
    ],
)
def test_a_peer_that_is_not_wanted(
    good: Credentials, secret: bytes, changes: Any, error: type, words: str
) -> None:
    async def work() -> None:
        echo = Echo(good)
        await echo.listener.start()
        mine = dataclasses.replace(good, secret=secret)
        with pytest.raises(error, match=words):
            await dial(echo.listener.address, mine, hello(**changes), messages.ToSupervisorFromRouter)
        assert echo.num_met == 0
        assert await echo.is_well()

    running(work())


def test_a_listener_that_lies_is_found_out() -> None:
    """One that does not know the secret gets nothing but a hello."""

    async def work() -> None:
        async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(frame({"nonce": b"n" * 32, "proof": b"p" * 32}))

        server = await asyncio.start_server(lie, "127.0.0.1", 0)
        with pytest.raises(LinkError, match="does not know the cluster's secret"):
            await dial(server.sockets[0].getsockname(), PLAIN, hello(), messages.ToSupervisorFromRouter)

    running(work())


def test_random_bytes_huge_lengths_and_half_frames(
    good: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said plainly, and by a peer with a certificate that does not know the secret."""
    monkeypatch.setattr(link, "HANDSHAKE_S", 0.3)

    async def work() -> None:
        echo = Echo(good)
        await echo.listener.start()
        chance = random.Random(1)
        said = [chance.randbytes(chance.randrange(1, 2000)) for _ in range(40)]
        said += [struct.pack("<I", 2**32 - 1), struct.pack("<I", link.HANDSHAKE_BYTES + 1) + b"x" * 100]
        said += [frame(hello())[:-3], frame(hello()), frame([1, 2]), b"", b"GET / HTTP/1.1\r\n\r\n"]
        said += [b"", EMPTY, EMPTY * 1000]
        for tls in {None, good.dialling}:
            closed = (is_closed(echo.listener.address, data, tls) for data in said)
            assert all(await asyncio.gather(*closed))
        assert echo.num_met == 0
        monkeypatch.setattr(link, "HANDSHAKE_S", 30.0)
        assert await echo.is_well()

    running(work())


def test_what_one_peer_said_is_of_no_use_to_another() -> None:
    """A recorded handshake answers another nonce."""

    async def work() -> None:
        echo = Echo()
        await echo.listener.start()
        recorded = bytearray()

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(*echo.listener.address)

            async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter, notes: bool) -> None:
                while data := await source.read(4096):
                    if notes:
                        recorded.extend(data)
                    to.write(data)

            await asyncio.gather(copy(reader, back, True), copy(there, writer, False))

        server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
        found = await dial(server.sockets[0].getsockname(), PLAIN, hello(), messages.ToSupervisorFromRouter)
        found.send(asked(1))
        assert await found.receive() == messages.EndSlot(1)
        met = echo.num_met
        assert await is_closed(echo.listener.address, bytes(recorded))
        assert echo.num_met == met

    running(work())


def test_a_frame_over_the_bound_ends_the_link(good: Credentials) -> None:
    async def work() -> None:
        echo = Echo(good)
        await echo.listener.start()
        found = await dial(echo.listener.address, good, hello(), messages.ToSupervisorFromRouter)
        found._writer.write(struct.pack("<I", link.MAX_FRAME_BYTES + 1))
        assert await asyncio.wait_for(found.receive(), 30.0) is None
        assert await echo.is_well()

    running(work())


def test_a_peer_that_does_not_read_loses_the_link(good: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_UNSENT_BYTES", 2**20)

    async def work() -> None:
        echo = Echo(good)
        await echo.listener.start()
        await dial(echo.listener.address, good, hello(), messages.ToSupervisorFromRouter)
        while not echo.links:
            await asyncio.sleep(0.01)
        large = messages.StartReplicas(list(range(20_000)))
        for _ in range(1000):
            echo.links[0].send(large)
        assert not echo.links[0].is_open
        assert await echo.is_well()

    running(work())


def test_many_strangers_do_not_shut_out_the_others(
    good: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "HANDSHAKE_S", 0.5)

    async def work() -> None:
        echo = Echo(good)
        await echo.listener.start()
        strangers = [await asyncio.open_connection(*echo.listener.address) for _ in range(100)]
        await asyncio.sleep(0.7)
        monkeypatch.setattr(link, "HANDSHAKE_S", 30.0)
        while True:  # until the time of the strangers is over
            with contextlib.suppress(LinkError):
                assert await echo.is_well()
                break
            await asyncio.sleep(0.05)
        for _, writer in strangers:
            writer.close()

    running(work())


def test_who_has_no_certificate_of_ours_is_shut_out(
    authorities: tuple[Path, Path], encrypted: Credentials
) -> None:
    """A peer of another authority, one that speaks no TLS, one that has no certificate; at either end."""

    async def work() -> None:
        other = credentials_of(SECRET, certificate(authorities[1]), "127.0.0.1")
        naked = ssl.create_default_context(cafile=str(authorities[0] / "ca.crt"))
        believing = ssl.create_default_context(cafile=str(authorities[0] / "ca.crt"))
        believing.load_cert_chain(*certificate(authorities[1])[:2])
        echo, theirs, plain = Echo(encrypted), Echo(other), Echo()
        for each in (echo, theirs, plain):
            await each.listener.start()
        cases = [
            (echo, other, "certificate"),
            (theirs, encrypted, "certificate"),
            (echo, dataclasses.replace(encrypted, dialling=believing), "may use TLS"),
            (echo, dataclasses.replace(encrypted, dialling=naked), "may use TLS"),
            (echo, PLAIN, "may use TLS"),
            (plain, encrypted, None),
        ]
        for listening, mine, words in cases:
            with pytest.raises(LinkError, match=words):
                await dial(listening.listener.address, mine, hello(), messages.ToSupervisorFromRouter)
            assert listening.num_met == 0
        assert await echo.is_well()
        assert await plain.is_well()

    running(work())


def test_certificates_that_are_no_good(authorities: tuple[Path, Path], tmp_path: Path) -> None:
    ours, theirs = authorities
    good, others = certificate(ours), certificate(theirs)
    locked, open_to_all, nothing = tmp_path / "locked.key", tmp_path / "open.key", tmp_path / "nothing.crt"
    run(tmp_path, f"openssl ec -in {good.key} -out locked.key -aes256 -passout pass:word")
    locked.chmod(0o600)
    open_to_all.write_bytes(Path(good.key).read_bytes())
    open_to_all.chmod(0o640)
    nothing.write_text("nothing")
    cases = [
        (good._replace(key=str(open_to_all)), "can be read by others"),
        (good._replace(key=str(locked)), "must not need a password"),
        (good._replace(key=others.key), "are no pair: key values mismatch"),
        (good._replace(key=str(tmp_path / "none")), "cannot read --cluster-tls-key"),
        (good._replace(cert=str(nothing)), "are no pair"),
        (good._replace(ca=str(nothing)), "has no certificates"),
        (good._replace(ca=others.ca), "is no good: .* certificate"),
        (certificate(ours, "127.0.0.3"), "certificate is not valid for '127.0.0.1'"),
        (expired(ours), "certificate has expired"),
    ]
    for files, words in cases:
        with pytest.raises(ConfigError, match=words):
            credentials_of(SECRET, files, "127.0.0.1")
    assert credentials_of(SECRET, certificate(ours, "127.0.0.3")).dialling  # a front end listens to no links
    with pytest.raises(ConfigError, match="go together"):
        ClusterOptions(replicas=2, cluster_tls_cert=good.cert)


def test_a_link_that_is_cut_ends_at_both_sides(good: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "BEAT_S", 0.02)

    async def work() -> None:
        echo = Echo(good, silence_s=0.4)
        await echo.listener.start()
        cable = Cable(echo.listener.address)
        found = await dial(await cable.start(), good, hello(), messages.ToSupervisorFromRouter)
        other = await dial(echo.listener.address, good, hello(), messages.ToSupervisorFromRouter)
        await asyncio.sleep(1.0)  # nothing is said for longer than a silence lasts
        for each in (found, other):
            each.send(asked(1))
            assert await each.receive() == messages.EndSlot(1)
        cable.is_cut = True
        assert await found.receive() is None
        while echo.links[0].is_open:
            await asyncio.sleep(0.01)
        other.send(asked(2))
        assert await other.receive() == messages.EndSlot(2)

    running(work())
