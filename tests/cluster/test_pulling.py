"""Adapters' files over links: each machine has a cache of its own, and nothing is believed but a digest."""

from __future__ import annotations

import asyncio
import random
import resource
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from manylora._version import VERSION
from manylora.cluster import messages
from manylora.cluster.adapter_files import (
    ADAPTER_FILES,
    AdapterCache,
    CacheFull,
    FileSource,
    adapter_digest,
    pull,
)
from manylora.cluster.link import Credentials, Hello, Link, Listener, bind
from manylora.cluster.members import Members
from manylora.cluster.registry import AdapterLog, Rollout, serve_files
from manylora.config.declaring import ConfigError
from manylora.protocol.executor import AdapterError
from manylora.types import AdapterId

GOOD = Credentials(b"s" * 32)
NUM_BYTES = 3 * messages.PIECE_BYTES - 7
Serve = Callable[[Any], Awaitable[None]]


def made(folder: Path, seed: int, num_bytes: int = NUM_BYTES) -> Path:
    """An adapter's folder, as far as its digest sees."""
    folder.mkdir(parents=True)
    (folder / ADAPTER_FILES[0]).write_text(f'{{"r": {seed}}}')
    (folder / ADAPTER_FILES[1]).write_bytes(random.Random(seed).randbytes(num_bytes))
    return folder


class Altered:
    """A link whose pieces are changed on their way."""

    def __init__(self, link: Link, change: Callable[[bytes], bytes]) -> None:
        self.receive = link.receive
        self._link = link
        self._change = change

    def send(self, message: Any) -> None:
        if isinstance(message, messages.FilePiece):
            message = messages.FilePiece(self._change(message.data))
        self._link.send(message)


class Machines:
    """The router's, with two adapters of its start, and two others with caches of their own."""

    def __init__(self, root: Path, most_bytes: int | None = None) -> None:
        self.root = root
        self.folders = [made(root / "source" / str(number), number) for number in range(2)]
        self.log = AdapterLog(root / "registry.sqlite")
        self.registry = Rollout(self.log, Members(), lambda event: None, 1.0)
        self.registry.begin([(folder.name, str(folder)) for folder in self.folders])
        self.caches = [AdapterCache(root / name / "cache", most_bytes) for name in ("left", "right")]
        self.serve: Serve = lambda link: serve_files(link, self.registry)
        self.num_links = 0

    def listing(self, number: int = 0) -> messages.Listing:
        return list(self.log.current.values())[number]

    def pull(self, *asked: tuple[int, int]) -> list[Path]:
        """Of each machine and version; one after the other."""

        async def work() -> list[Path]:
            async def serve(link: Link) -> None:
                self.num_links += 1
                await self.serve(link)

            sock = bind()
            listener = Listener(
                sock,
                GOOD,
                1,
                60.0,
                {messages.PULLER: (messages.ToRouterFromPuller, serve)},
                lambda hello: None,
            )
            await listener.start()
            hello = Hello(messages.PULLER, 0, 1, 1, VERSION, "model")
            source = FileSource(listener.address, GOOD, hello)
            found = []
            for machine, number in asked:
                cache = self.caches[machine]
                found.append(await asyncio.to_thread(pull, source, cache, self.listing(number)))
            return found

        return asyncio.run(asyncio.wait_for(work(), 60.0))

    def held(self, machine: int) -> list[str]:
        """What lies in a cache."""
        return sorted(each.name for each in self.caches[machine].path.iterdir() if each.name != "lock")


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


def test_two_machines_get_the_files(machines: Machines) -> None:
    found = machines.pull((0, 0), (1, 0), (0, 1))
    for folder, source in zip(found, [machines.folders[number] for number in (0, 0, 1)], strict=True):
        assert folder.name == adapter_digest(folder) == adapter_digest(source)
        assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
        assert sorted(each.name for each in folder.iterdir()) == sorted(ADAPTER_FILES)
    assert found[0].parent != found[1].parent
    digests = [adapter_digest(folder) for folder in machines.folders]
    assert [machines.listing(number).digest for number in range(2)] == digests  # the registry knows them now
    again = AdapterLog(machines.root / "registry.sqlite")
    assert [each.digest for each in again.current.values()] == digests


def test_what_is_there_is_not_asked_for_again(machines: Machines) -> None:
    machines.pull((0, 0))
    shutil.rmtree(machines.folders[0])
    machines.caches[0] = AdapterCache(machines.caches[0].path, None)  # another process
    machines.pull((0, 0))
    assert machines.num_links == 1
    with pytest.raises(AdapterError, match="No such file") as error:
        machines.pull((1, 0))
    assert error.value.status == 404
    assert machines.held(1) == []


def test_files_that_are_gone_from_the_start(machines: Machines) -> None:
    shutil.rmtree(machines.folders[0])
    with pytest.raises(AdapterError, match="cannot be read"):
        machines.pull((0, 0))
    machines.pull((0, 1))


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (flipped, "not those that were loaded"),
        (lambda data: data[:-1], "shorter"),
        (lambda data: b"", "shorter"),
    ],
    ids=["flipped", "truncated", "empty"],
)
def test_files_that_change_on_their_way(
    machines: Machines, change: Callable[[bytes], bytes], words: str
) -> None:
    honest = machines.serve
    machines.serve = lambda link: serve_files(Altered(link, change), machines.registry)  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match=words):
        machines.pull((0, 0))
    assert machines.held(0) == []
    machines.serve = honest
    machines.pull((0, 0))


def test_files_that_change_at_their_source(machines: Machines) -> None:
    machines.pull((0, 0))
    weights = machines.folders[0] / ADAPTER_FILES[1]
    weights.write_bytes(flipped(weights.read_bytes()))
    with pytest.raises(AdapterError, match="not those that were loaded"):
        machines.pull((1, 0))
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(AdapterError, match="not those that were loaded"):
        machines.pull((1, 0))
    assert machines.held(1) == []


def test_a_byte_that_flips_in_the_cache(machines: Machines) -> None:
    """It is found when the files are taken next, and they are copied again."""
    (folder,) = machines.pull((0, 0))
    weights = folder / ADAPTER_FILES[1]
    weights.write_bytes(flipped(weights.read_bytes()))
    machines.caches[0] = AdapterCache(folder.parent, None)
    assert machines.pull((0, 0)) == [folder]
    assert adapter_digest(folder) == folder.name
    assert machines.num_links == 2


def test_a_disk_that_is_full(machines: Machines) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (messages.PIECE_BYTES, before[1]))
    try:
        with pytest.raises(AdapterError, match=r"cannot be kept in .*: File too large") as error:
            machines.pull((0, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.status == 503
    assert machines.held(0) == []
    machines.pull((0, 0))


def test_routers_that_die_meanwhile(machines: Machines) -> None:
    """Each gives one piece; the next goes on there."""

    async def die(link: Link) -> None:
        class Once:
            def __init__(self) -> None:
                self.is_spent = False

            async def receive(self) -> Any:
                return None if self.is_spent else await link.receive()

            def send(self, message: Any) -> None:
                self.is_spent = True
                link.send(message)

        await serve_files(Once(), machines.registry)  # type: ignore[arg-type]

    machines.serve = die
    (folder,) = machines.pull((0, 0))
    assert adapter_digest(folder) == adapter_digest(machines.folders[0])
    assert machines.num_links == 1 + 1 + 3


def test_asking_for_what_is_not_there(machines: Machines) -> None:
    """Nothing but these files, in pieces that are bounded; the link goes on."""
    known = machines.listing(0).id
    asked: list[messages.ToRouterFromPuller] = [messages.AskFiles(999)]
    asked += [
        messages.AskPiece(*each)
        for each in ((999, 0, 0, 1), (known, 2, 0, 1), (known, 0, -1, 1), (known, 0, 0, -5))
    ]
    asked += [messages.AskPiece(known, 1, 2**62, 10), messages.AskPiece(known, 1, 0, 2**40)]
    answers: list[Any] = []

    class Asking:
        async def receive(self) -> Any:
            return asked[len(answers)] if len(answers) < len(asked) else None

        def send(self, message: Any) -> None:
            answers.append(message)

    asyncio.run(serve_files(Asking(), machines.registry))  # type: ignore[arg-type]
    assert [type(each) for each in answers[:5]] == [messages.NoFiles] * 5
    assert [len(each.data) for each in answers[5:]] == [0, messages.PIECE_BYTES]


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    machines = Machines(tmp_path, most_bytes=NUM_BYTES + 1000)
    machines.pull((0, 0))
    with pytest.raises(AdapterError, match="may take") as error:
        machines.pull((0, 1))
    assert error.value.status == 503
    machines.caches[0].release(machines.listing(0).id)
    (folder,) = machines.pull((0, 1))
    assert machines.held(0) == [folder.name]


def test_a_folder_that_others_can_read(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="yours alone"):
        AdapterCache(tmp_path / "cache", None)


@pytest.mark.parametrize("seed", range(5))
def test_two_processes_in_one_folder(seed: int, tmp_path: Path) -> None:
    """However they take and give up: what one of them has is whole, all together are within bounds, and nothing is
    left of what did not end well."""
    chance = random.Random(seed)
    sources = [made(tmp_path / "source" / str(number), number, 100 * number) for number in range(6)]
    digests = [adapter_digest(source) for source in sources]
    most_bytes = 900
    caches = [AdapterCache(tmp_path / "cache", most_bytes) for _ in range(2)]
    taken: list[dict[AdapterId, int]] = [{}, {}]
    for version in range(1, 150):
        which = chance.randrange(2)
        cache, mine = caches[which], taken[which]
        if mine and chance.random() < 0.5:
            gone = chance.choice(list(mine))
            cache.release(gone)
            del mine[gone]
        else:
            number = chance.randrange(len(sources))
            if cache.take(version, digests[number]) is not None or try_to_make(
                cache, version, sources[number], digests[number], chance.random() < 0.2
            ):
                mine[version] = number
        entries = [each for each in (tmp_path / "cache").iterdir() if each.name != "lock"]
        assert {digests[number] for each in taken for number in each.values()} <= {
            each.name for each in entries
        }
        assert all(adapter_digest(each) == each.name for each in entries)
        assert sum(file.stat().st_size for each in entries for file in each.iterdir()) <= most_bytes


def try_to_make(cache: AdapterCache, version: AdapterId, source: Path, digest: str, fails: bool) -> bool:
    """Whether the version has its files now."""
    num_bytes = sum(each.stat().st_size for each in source.iterdir())
    try:
        with cache.made(version, digest, num_bytes) as folder:
            for name in ADAPTER_FILES:
                shutil.copy(source / name, folder / name)
            if fails:
                raise OSError
    except (CacheFull, OSError):
        return False
    return True


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("link", "adapter_files"):
        monkeypatch.setattr(f"manylora.cluster.{module}.REDIAL_S", 0.001)
