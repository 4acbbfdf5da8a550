"""The adapter store: what it gives is what the adapter's own files give, or it gives nothing."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import random
import resource
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manylora.adapters import packedfile, packedidentity, read_loops, sourcestamp, store
from manylora.adapters.faults import FilesChanged
from manylora.adapters.jobs import NO_HELPERS, Helpers
from manylora.adapters.pack import layout_of, load_into
from manylora.adapters.pagecache import cached_pages
from manylora.adapters.peft import CONFIG_NAME, WEIGHTS_NAME
from manylora.adapters.store import AdapterStore, StoreCounts
from manylora.adapters.storefolder import StoreFolder
from manylora.kernels.shapes import AdapterGeometry, PageShape
from tests.adapters.tiny import edit_config, edit_tensors, geometry, inspect, make

pytestmark = pytest.mark.usefixtures("either_way")

PLENTY = 2**30


def nothing() -> None:
    """A check that never breaks off."""


class Kept:
    """A store in ``root/store``, for one geometry and type."""

    def __init__(
        self,
        root: Path,
        shape: AdapterGeometry | None = None,
        dtype: torch.dtype = torch.float32,
        size: int = PLENTY,
    ) -> None:
        self.shape = shape or geometry()
        self.dtype = dtype
        self.folder = root / "store"
        self.store = AdapterStore(StoreFolder(self.folder, size), self.shape, dtype)

    def write(self, adapter: Path, check: Callable[[], None] = nothing) -> None:
        self.store.write(inspect(adapter, self.shape), check)

    def own(self, adapter: Path) -> torch.Tensor:
        """The page images that the adapter's own files give: bits."""
        spec = inspect(adapter, self.shape)
        layout = layout_of(spec, self.shape)
        pages = self.memory(layout.num_pages)
        load_into(spec, layout, self.shape, self.dtype, list(pages), nothing)
        return pages.view(torch.uint8)

    def found(self, adapter: Path, helpers: Helpers = NO_HELPERS) -> torch.Tensor | None:
        """Those that the store gives, into pages in any order; None where it has none."""
        spec = inspect(adapter, self.shape)
        layout = layout_of(spec, self.shape)
        pages = list(reversed(self.memory(layout.num_pages).unbind()))
        if not self.store.read_into(spec, layout, pages, nothing, helpers):
            return None
        return torch.stack(pages).view(torch.uint8)

    def handed_over(self, adapter: Path, helpers: Helpers = NO_HELPERS) -> torch.Tensor | None:
        """The same by ``read``."""
        spec = inspect(adapter, self.shape)
        images: list[torch.Tensor] = []

        def take(number: int, image: torch.Tensor) -> None:
            assert number == len(images)
            assert image.dtype == self.dtype
            images.append(image.clone())

        is_hit = self.store.read(spec, layout_of(spec, self.shape), take, nothing, helpers)
        return torch.stack(images).view(torch.uint8) if is_hit else None

    def memory(self, num_pages: int) -> torch.Tensor:
        """Pages that begin where the system's do, and hold anything."""
        page = self.shape.page
        raw = np.frombuffer(mmap.mmap(-1, num_pages * page.page_bytes), np.uint8)
        raw[:] = 0xFF
        return torch.from_numpy(raw).view(self.dtype).view(num_pages, page.layers, -1)

    @property
    def files(self) -> list[Path]:
        """All that lies in the folder, but its lock."""
        return sorted(path for path in self.folder.iterdir() if path.name != "lock")

    @property
    def file(self) -> Path:
        (file,) = self.files
        return file


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of equal shapes and other weights."""
    root = tmp_path_factory.mktemp("adapters")
    make(root / "a", r=4)
    for number, name in enumerate("abcde", 1):
        if name != "a":
            shutil.copytree(root / "a", root / name)
        edit_tensors(root / name, lambda tensors, by=number: {key: by * t for key, t in tensors.items()})
    make(root / "small", r=1, target_modules=["q_proj"])
    return root


@pytest.fixture
def adapter(shipped: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(shipped / "a", tmp_path / "a"))


@pytest.fixture(params=[0, 3], ids=["alone", "threads"])
def helpers(request: pytest.FixtureRequest) -> Iterator[Helpers]:
    with ThreadPoolExecutor(max(1, request.param)) as threads:
        yield Helpers(threads, request.param)


def small_spans(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Read so many bytes at a time, about, by however few threads."""
    monkeypatch.setattr(store, "RUN_BYTES", num_bytes)
    monkeypatch.setattr(store, "_LEAST_BYTES", 1)


def test_a_file_is_cut_evenly_and_each_piece_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)
    for _ in range(200):
        layers, num_pages = chance.randrange(1, 9), chance.randrange(1, 12)
        page = PageShape(layers, chance.choice([4, 16]), 2, 8, 2)
        monkeypatch.setattr(packedfile, "_PIECE_BYTES", chance.randrange(1, 2 * page.page_bytes))
        shape = packedfile.PackedShape(b"me", num_pages, page)
        count = chance.randrange(1, 2 * shape.num_pieces)
        spans = shape.spans(count)
        assert len(spans) == min(count, shape.num_pieces)
        sizes = [sum(len(run.numbers) for run in span) for span in spans]
        assert max(sizes) - min(sizes) <= 1
        runs = [run for span in spans for run in span]
        places = [shape.place(run.page, run.begin) for run in runs]
        ends = [at + run.end - run.begin for at, run in zip(places, runs)]
        assert places == [shape.place(0, 0), *ends[:-1]], "end to end"
        assert ends[-1] == shape.file_bytes
        pieces = {piece.number: (piece.page, piece.begin, piece.end) for piece in shape.pieces}
        found = [pieces[number] for run in runs for number in run.numbers]
        assert sorted(found) == sorted(pieces.values())
        for run in runs:
            covered = [pieces[number] for number in run.numbers]
            assert (run.page, run.begin) == covered[0][:2]
            assert (run.page, run.end) == (covered[-1][0], covered[-1][2])


@pytest.mark.parametrize("most", [100, 3000, 10**6])
def test_the_system_may_read_less_than_it_is_asked_for(
    most: int, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path)
    kept.write(shipped / "a")
    preadv = os.preadv

    def less(file: int, buffers: Any, begin: int) -> int:
        left, given = most, []
        for buffer in buffers:
            given.append(buffer[:left])
            left -= len(given[-1])
        return preadv(file, [buffer for buffer in given if len(buffer)], begin)

    monkeypatch.setattr(os, "preadv", less)
    found = kept.found(shipped / "a")
    assert found is not None
    assert torch.equal(found, kept.own(shipped / "a"))


@pytest.mark.parametrize("page_tokens", [4, 16], ids=["buffered", "aligned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_same_bytes_as_from_the_adapters_own_files(
    shipped: Path,
    tmp_path: Path,
    helpers: Helpers,
    dtype: torch.dtype,
    page_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = geometry(itemsize=dtype.itemsize, page_tokens=page_tokens)
    monkeypatch.setattr(packedfile, "_PIECE_BYTES", 2 * shape.page.slab_bytes)
    monkeypatch.setattr(store, "_WINDOW_BYTES", 2 * shape.page.page_bytes)
    small_spans(monkeypatch, shape.page.page_bytes // 2)
    kept = Kept(tmp_path, shape, dtype)
    assert kept.found(shipped / "a") is None
    for name in "ab":
        kept.write(shipped / name)
        kept.write(shipped / name)  # it is there
    for name in "ba":
        own = kept.own(shipped / name)
        assert len(own) > 2, "several windows"
        for given in (kept.found(shipped / name, helpers), kept.handed_over(shipped / name, helpers)):
            assert given is not None
            assert torch.equal(given, own)
    size = sum(file.stat().st_size for file in kept.files)
    assert kept.store.counts() == StoreCounts(4, 1, size)
    assert len(kept.files) == 2
    assert {stat.S_IMODE(file.stat().st_mode) for file in kept.folder.iterdir()} == {0o600}
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("cached", "fails", "expected"),
    [
        ("all", False, {"buffered"}),
        ("some", False, {"buffered", "direct"}),
        ("nothing", False, {"direct"}),
        ("nothing", True, {"buffered"}),
        ("unknown", False, {"buffered"}),
    ],
    ids=["cached", "half", "cold", "no direct reads", "nothing tells"],
)
def test_what_the_page_cache_does_not_have_is_read_directly(
    cached: str,
    fails: bool,
    expected: set[str],
    shipped: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Kept(tmp_path, geometry(page_tokens=16))
    small_spans(monkeypatch, kept.shape.page.page_bytes)
    kept.write(shipped / "a")
    try:
        os.close(os.open(kept.file, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("no direct reads here")
    own = kept.own(shipped / "a")
    reads: set[str] = set()
    preadv, read_pieces = os.preadv, read_loops.read_pieces

    def noted(file: int, buffers: Any, begin: int) -> int:
        is_direct = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
        if is_direct and fails:
            raise OSError(errno.EINVAL, "no")
        reads.add("direct" if is_direct else "buffered")
        return preadv(file, buffers, begin)

    def told(file: int) -> np.ndarray | None:
        found = np.ones(-(-os.fstat(file).st_size // mmap.PAGESIZE), bool)
        found[len(found) // 2 if cached == "some" else 0 :] = cached == "all"
        return None if cached == "unknown" else found

    def by_loops(file: int, *rest: Any) -> bool:
        assert not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
        reads.add("buffered")
        return read_pieces(file, *rest)

    monkeypatch.setattr(os, "preadv", noted)
    monkeypatch.setattr(read_loops, "read_pieces", by_loops)
    monkeypatch.setattr(packedfile, "cached_pages", told)
    found = kept.found(shipped / "a")
    assert found is not None
    assert torch.equal(found, own)
    assert reads == expected


def test_a_file_that_was_dropped_from_the_page_cache(shipped: Path, tmp_path: Path) -> None:
    kept = Kept(tmp_path, geometry(page_tokens=16))
    kept.write(shipped / "a")
    with open(kept.file, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        held = cached_pages(file.fileno())
        assert held is None or len(held) == -(-kept.file.stat().st_size // mmap.PAGESIZE)
    found = kept.found(shipped / "a")
    assert found is not None
    assert torch.equal(found, kept.own(shipped / "a"))
    data = kept.file.read_bytes()
    with open(kept.file, "rb") as file:
        held = cached_pages(file.fileno())
    assert held is None or held.all(), f"{len(data)} bytes have just been read"


# ---------------------------------------------------------------- files that are not what they should be


def put(file: Path, data: bytes) -> None:
    """A private file with this in it."""
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as opened:
        opened.write(data)


def assert_missed(kept: Kept, adapter: Path) -> None:
    """Nothing is given, what was wrong is gone, and the next time around it is given again."""
    own = kept.own(adapter)
    assert kept.found(adapter) is None
    assert kept.files == []
    kept.write(adapter)
    found = kept.found(adapter)
    assert found is not None
    assert torch.equal(found, own)


def test_cut_short_or_too_long(shipped: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(tmp_path)
    kept.write(shipped / "a")
    file, data = kept.file, kept.file.read_bytes()
    header = len(data) % kept.shape.page.page_bytes or packedfile.BLOCK_BYTES
    places = {0, 1, 19, 20, 21, 4095, 4096, header - 1, header, header + 1, len(data) // 2, len(data) - 1}
    for size in sorted(places):
        put(file, data[:size])
        assert kept.found(shipped / "a") is None, size
    put(file, data + b"\0")
    assert_missed(kept, shipped / "a")
    assert sum("is not used" in record.message for record in caplog.records) == 1, "it is said once"


def test_cut_short_while_it_is_read(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path)
    small_spans(monkeypatch, kept.shape.page.page_bytes)
    kept.write(shipped / "a")
    spec = inspect(shipped / "a")
    layout = layout_of(spec, kept.shape)
    num_checks = iter(range(1000))

    def cut() -> None:
        if next(num_checks) == 3:
            os.truncate(kept.file, packedfile.BLOCK_BYTES + kept.shape.page.page_bytes)

    assert not kept.store.read_into(spec, layout, list(kept.memory(layout.num_pages)), cut)


def flips(kept: Kept, adapter: Path, places: list[int], seed: int) -> None:
    file, data = kept.file, kept.file.read_bytes()
    chance = random.Random(seed)
    spec = inspect(adapter)
    layout = layout_of(spec, kept.shape)
    pages = list(kept.memory(layout.num_pages))
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= chance.randint(1, 255)
        put(file, bytes(flipped))
        assert not kept.store.read_into(spec, layout, pages, nothing), place
    put(file, data)
    assert kept.store.read_into(spec, layout, pages, nothing)


def test_a_flipped_byte(shipped: Path, tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.write(shipped / "a")
    size = kept.file.stat().st_size
    flips(kept, shipped / "a", [*range(24), *random.Random(3).sample(range(size), 100)], 1)


@pytest.mark.long
def test_every_flipped_byte(shipped: Path, tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.write(shipped / "small")
    flips(kept, shipped / "small", list(range(kept.file.stat().st_size)), 2)


@pytest.mark.parametrize("other", ["adapter", "ranks", "layers", "page", "dtype", "packing", "format"])
def test_a_file_of_something_else(
    other: str, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renamed to what this adapter's file would be called."""
    kept = Kept(tmp_path / "mine")
    kept.write(shipped / "a")
    place = kept.file
    shape = {"layers": geometry(layers=3, page_tokens=4), "page": geometry(page_tokens=16)}.get(other)
    dtype = torch.float32
    if other == "dtype":
        shape, dtype = geometry(itemsize=2, page_tokens=16), torch.float16
    if other == "packing":
        monkeypatch.setattr(packedidentity, "PACKING_VERSION", 99)
    if other == "format":
        monkeypatch.setattr(packedfile, "FORMAT_VERSION", 99)
    written = Kept(tmp_path / "theirs", shape, dtype)
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        if other == "format":
            patch.setattr(packedfile, "FORMAT_VERSION", 99)
        written.write(shipped / {"adapter": "b", "ranks": "small"}.get(other, "a"))
    shutil.copy(written.file, place)
    assert_missed(kept, shipped / "a")


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
@pytest.mark.parametrize("in_place", [False, True], ids=["renamed", "in place"])
def test_a_source_replaced_by_one_of_its_size_and_time(
    name: str, in_place: bool, adapter: Path, shipped: Path, tmp_path: Path
) -> None:
    kept = Kept(tmp_path)
    kept.write(adapter)
    before = kept.own(adapter)
    path = adapter / name
    status = os.stat(path)
    data = (shipped / "b" / name).read_bytes()
    time.sleep(sourcestamp._FINE_S)  # in place the file system's clock alone tells
    other = path if in_place else tmp_path / "other"
    other.write_bytes(data)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)
    assert (os.stat(path).st_size, os.stat(path).st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert torch.equal(kept.own(adapter), before) == (name == CONFIG_NAME)
    assert_missed(kept, adapter)


def test_what_was_kept_of_files_that_took_others_place_is_not_for_the_adapter_added_before(
    adapter: Path, shipped: Path, tmp_path: Path
) -> None:
    """Two names for one folder, whose weights were replaced between by some of their size and time."""
    kept = Kept(tmp_path)
    old, path = inspect(adapter), adapter / WEIGHTS_NAME
    status = os.stat(path)
    path.write_bytes((shipped / "b" / WEIGHTS_NAME).read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    kept.write(adapter)
    assert kept.found(adapter) is not None
    layout = layout_of(old, kept.shape)
    assert not kept.store.read_into(old, layout, list(kept.memory(layout.num_pages)), nothing)


def test_where_a_file_system_tells_no_inodes_the_headers_do(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def of_such(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
        found = real(path, *arguments, **named)
        if os.path.dirname(os.fspath(path)) != str(adapter):
            return found
        told = {"st_mtime_ns": found.st_mtime_ns, "st_ctime_ns": 0}
        return os.stat_result((found.st_mode, 0, 0, 1, 0, 0, found.st_size, 0, 0, 0), told)

    monkeypatch.setattr(os, "stat", of_such)
    kept = Kept(tmp_path)
    kept.write(adapter)
    assert kept.found(adapter) is not None
    status = real(adapter / WEIGHTS_NAME)
    edit_tensors(adapter, lambda tensors: {key: t * 2 for key, t in tensors.items()})
    os.utime(adapter / WEIGHTS_NAME, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert_missed(kept, adapter)


def test_adapters_that_have_changed_or_gone_are_refused_as_without_a_store(
    adapter: Path, tmp_path: Path
) -> None:
    kept = Kept(tmp_path)
    spec = inspect(adapter)
    layout = layout_of(spec, kept.shape)
    for change in ("changed", "gone"):
        kept.store.write(inspect(adapter), nothing)
        assert len(kept.files) == 1
        if change == "changed":
            edit_config(adapter, lora_alpha=80)
        else:
            shutil.rmtree(adapter)
        with pytest.raises(FilesChanged):
            kept.store.read_into(spec, layout, list(kept.memory(layout.num_pages)), nothing)
        assert kept.files == [], "nothing is kept of what is gone"
    kept.store.write(spec, nothing)
    assert kept.files == []


@pytest.mark.parametrize("wrong", ["link", "dangling", "folder", "pipe", "public", "unreadable"])
def test_what_is_no_private_file_is_not_followed(
    wrong: str, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path)
    kept.write(shipped / "a")
    file, elsewhere = kept.file, tmp_path / "elsewhere"
    if wrong in ("link", "dangling"):
        file.rename(elsewhere)
        file.symlink_to(elsewhere if wrong == "link" else tmp_path / "nothing")
    elif wrong == "folder":
        file.unlink()
        file.mkdir()
    elif wrong == "pipe":
        file.unlink()
        os.mkfifo(file, 0o600)
    elif wrong == "public":
        file.chmod(0o644)
    else:
        refuse(monkeypatch, lambda name, flags: name == file.name and not flags & os.O_CREAT, errno.EACCES)
    before = elsewhere.read_bytes() if wrong == "link" else b""
    assert kept.found(shipped / "a") is None
    assert kept.store.counts()[:2] == (0, 1)
    monkeypatch.undo()
    kept.write(shipped / "a")
    if wrong != "folder":  # which is not ours to remove
        assert kept.found(shipped / "a") is not None
        assert not file.is_symlink()
    if wrong == "link":
        assert elsewhere.read_bytes() == before


def refuse(
    monkeypatch: pytest.MonkeyPatch, which: Callable[[str, int], bool], number: int, call: str = "open"
) -> None:
    """Make the system refuse to open some files."""
    real = getattr(os, call)

    def refused(path: Any, flags: int = 0, *arguments: Any, **named: Any) -> Any:
        if named.get("dir_fd") is not None and which(os.fspath(path), flags):
            raise OSError(number, os.strerror(number))
        return real(path, flags, *arguments, **named)

    monkeypatch.setattr(os, call, refused)


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=errno.errorcode.get)
def test_a_disk_that_takes_no_more(
    call: str,
    number: int,
    shipped: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(packedfile, "_SYNC_BYTES", 1)
    kept = Kept(tmp_path)
    kept.write(shipped / "a")
    before = kept.file.read_bytes()
    calls = iter(range(1000))
    real = getattr(os, call)

    def failing(*arguments: Any, **named: Any) -> Any:
        if call != "pwrite" or next(calls) >= 2:
            raise OSError(number, os.strerror(number))
        return real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        for name in "bcd":
            kept.write(shipped / name)
    assert kept.file.read_bytes() == before, "nothing of what failed is left, others are unharmed"
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert os.strerror(number) in warnings[0]
    assert kept.found(shipped / "b") is None
    kept.write(shipped / "b")  # there is room again
    assert kept.found(shipped / "b") is not None


def test_a_limit_on_the_size_of_files_is_a_full_disk_too(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, before[1]))
    try:
        kept.write(shipped / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert kept.files == []


def test_a_disk_that_others_have_filled_is_said_once(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        return [record.message for record in caplog.records if record.levelno >= logging.WARNING]

    kept = Kept(tmp_path)
    real = os.fstatvfs

    def full(file: int) -> os.statvfs_result:
        values = list(real(file))
        values[4] = 0
        return os.statvfs_result(values)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstatvfs", full)
        for name in "abc":
            kept.write(shipped / name)
    assert kept.files == []
    assert len(warnings()) == 1
    assert "do not fit into an adapter store of 0" in warnings()[0]
    kept.write(shipped / "a")
    assert kept.found(shipped / "a") is not None
    monkeypatch.setattr(os, "fstatvfs", full)
    for name in "bc":
        kept.write(shipped / name)
    assert len(warnings()) == 2, "it had room meanwhile"


class Enough(Exception):
    """A check breaks off."""


@pytest.mark.parametrize("at", [0, 1, 5])
def test_broken_off(at: int, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path)
    small_spans(monkeypatch, kept.shape.page.page_bytes)
    left = iter(range(at))

    def check() -> None:
        if next(left, None) is None:
            raise Enough

    with pytest.raises(Enough):
        kept.write(shipped / "a", check)
    assert kept.files == []
    kept.write(shipped / "a")
    spec = inspect(shipped / "a")
    layout = layout_of(spec, kept.shape)
    left = iter(range(at))
    with pytest.raises(Enough):
        kept.store.read_into(spec, layout, list(kept.memory(layout.num_pages)), check)
    assert kept.found(shipped / "a") is not None, "the file is fine"


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_an_adapter_that_goes_while_it_is_written(
    change: str, adapter: Path, shipped: Path, tmp_path: Path
) -> None:
    kept = Kept(tmp_path)
    spec = inspect(adapter)
    checks = iter(range(1000))

    def check() -> None:
        if next(checks) == 3:
            shutil.rmtree(adapter)
            if change == "replaced":
                shutil.copytree(shipped / "b", adapter)  # files of the same sizes and times

    kept.store.write(spec, check)
    assert kept.files == []
    assert next(checks) > 3


def test_files_that_have_just_changed_are_kept_when_another_change_would_show(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path)
    slept: list[float] = []
    now = (adapter / CONFIG_NAME).stat().st_ctime
    clock = [now + 0.001]
    monkeypatch.setattr(time, "time", lambda: clock[0])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds + 1e-3

    monkeypatch.setattr(time, "sleep", sleep)

    kept.write(adapter)
    assert len(kept.files) == 1
    assert 0 < sum(slept) < 1
    monkeypatch.undo()
    kept.file.unlink()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    kept.write(adapter)
    assert kept.files == [], "what is from the future is not waited for"


def test_the_least_recently_used_give_way(shipped: Path, tmp_path: Path) -> None:
    probe = Kept(tmp_path / "probe")
    probe.write(shipped / "a")
    size = probe.file.stat().st_size
    kept = Kept(tmp_path, size=3 * size + 100)
    for age, name in enumerate("abc"):
        kept.write(shipped / name)
        newest = max(kept.files, key=lambda file: file.stat().st_mtime_ns)
        os.utime(newest, ns=(0, (age + 1) * 10**9))
    assert kept.found(shipped / "a") is not None, "and used now"
    assert kept.store.counts().num_bytes == 3 * size
    for name, gone in (("d", "b"), ("e", "c")):
        kept.write(shipped / name)
        assert len(kept.files) == 3
        assert kept.found(shipped / gone) is None
        assert kept.found(shipped / "a") is not None
        assert kept.store.counts().num_bytes == 3 * size
    kept.store.close()
    smaller = Kept(tmp_path, size=size)
    assert smaller.store.counts().num_bytes == 3 * size
    smaller.store.tidy(nothing)
    assert len(smaller.files) == 1
    assert smaller.store.counts().num_bytes == size
    smaller.store.close()
    too_small = Kept(tmp_path / "small", size=size - 1)
    too_small.write(shipped / "a")
    assert too_small.files == []


def test_what_cannot_be_used_any_more_goes(shipped: Path, tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    for name in "abcd":
        shutil.copytree(shipped / name, tmp_path / name)
        kept.write(tmp_path / name)
    other = Kept(tmp_path, geometry(page_tokens=16))
    other.write(tmp_path / "a")
    for junk in (b"", b"junk", b"MLorPack" + b"\xff" * 64):
        put(kept.folder / f"{len(junk)}.packed", junk)
    put(kept.folder / "notes.txt", b"not the store's")
    (kept.folder / "folder.packed").mkdir()
    assert len(kept.files) == 10
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "c" / WEIGHTS_NAME).write_bytes((shipped / "d" / WEIGHTS_NAME).read_bytes())
    kept.store.tidy(nothing)
    assert len(kept.files) == 5
    small = Kept(tmp_path, size=kept.store.counts().num_bytes - 1)
    small.store.tidy(nothing)
    assert len(small.files) == 4, "what is too much goes, and what the store has not made stays"
    kept.write(tmp_path / "a")
    kept.write(tmp_path / "d")
    other.write(tmp_path / "a")
    for store_, name in ((kept, "a"), (kept, "d"), (other, "a")):
        assert store_.found(tmp_path / name) is not None


def test_several_servers_on_one_store(shipped: Path, tmp_path: Path) -> None:
    """Each with what it would have for itself: another's files are taken where they fit, and never torn."""
    probe = Kept(tmp_path / "probe")
    probe.write(shipped / "a")
    limit = 2 * probe.file.stat().st_size + 100
    own = {name: probe.own(shipped / name) for name in "abcd"}
    done = threading.Event()
    hits = [0, 0]

    def serve(number: int) -> None:
        kept = Kept(tmp_path, size=limit)
        for name in random.Random(number).choices("abcd", k=40):
            found = kept.found(shipped / name)
            if found is None:
                kept.write(shipped / name)
            else:
                hits[number] += 1
                assert torch.equal(found, own[name])
        kept.store.close()

    def watch() -> int:
        """The most that all files, whole or not, have taken together."""
        most = 0
        while not done.is_set():
            with watched._locked(nothing):
                most = max(most, sum(entry.num_bytes for entry in watched._entries()))
            time.sleep(0.001)
        return most

    watched = StoreFolder(tmp_path / "store", limit)
    with ThreadPoolExecutor(3) as threads:
        watching = threads.submit(watch)
        serving = [threads.submit(serve, number) for number in range(2)]
        try:
            for server in serving:
                server.result(60)
        finally:
            done.set()
        assert 0 < watching.result(60) <= limit
    assert all(hits)
    left = Kept(tmp_path, size=limit)
    assert sum(file.stat().st_size for file in left.files) <= limit
    assert all(file.name.endswith(".packed") for file in left.files)
