"""``manylora warmup --export`` and ``--import``: caches come over whole or not at all, to machines of one kind."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import tarfile
import zlib
from pathlib import Path

import pytest

from manylora.cli import main
from manylora.kernels.caches import cache_folders, machine_kind
from manylora.warmup import carrying

pytest.importorskip("triton")


def lies_in(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """The caches lie here from now on; Triton's."""
    folders = {"triton": folder / "triton", "flashinfer": folder / "flashinfer"}
    monkeypatch.setattr(carrying, "cache_folders", lambda: folders)
    return folders["triton"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel as Triton keeps it, another that is being written, and a module of FlashInfer's."""
    folder = lies_in(monkeypatch, tmp_path / "one")
    kernel = folder / "HASH"
    (kernel / "tmp.pid_3_x").mkdir(parents=True)
    (kernel / "tmp.pid_3_x" / "add.ptx").write_text("half")
    (kernel / "add.cubin").write_bytes(os.urandom(3000))
    (kernel / "add.json").write_text("{}")
    os.utime(kernel / "add.json", (1234567.25, 1234567.25))
    children = {name: str(kernel / name) for name in ("add.cubin", "add.json")}
    (kernel / "__grp__add.json").write_text(json.dumps({"child_paths": children}))
    (kernel / "link").symlink_to("/etc/passwd")
    module = folder.parent / "flashinfer" / "0.6" / "90" / "prefill.so"
    module.parent.mkdir(parents=True)
    module.write_bytes(b"so")
    module.chmod(0o755)
    return folder


def error(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Of a command that changes nothing, the one line."""
    capsys.readouterr()
    assert main(["warmup", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


def test_there_and_back(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernels.tgz"
    assert main(["warmup", "--export", str(file)]) == 0
    assert "exported 4 files" in capsys.readouterr().out
    assert [found.name for found in tmp_path.iterdir() if found.name != "one"] == ["kernels.tgz"]
    other = lies_in(monkeypatch, tmp_path / "two")
    assert main(["warmup", "--import", str(file)]) == 0
    assert "imported 4 files" in capsys.readouterr().out
    kernel = other / "HASH"
    assert sorted(found.name for found in kernel.iterdir()) == ["__grp__add.json", "add.cubin", "add.json"]
    assert (kernel / "add.cubin").read_bytes() == (cache / "HASH" / "add.cubin").read_bytes()
    assert (kernel / "add.json").stat().st_mtime == 1234567.25
    paths = json.loads((kernel / "__grp__add.json").read_text())["child_paths"]
    assert paths == {name: str(kernel / name) for name in ("add.cubin", "add.json")}, "where it is now"
    assert (other.parent / "flashinfer/0.6/90/prefill.so").stat().st_mode & 0o777 == 0o700
    (kernel / "add.json").write_text('{"own": 1}')
    assert main(["warmup", "--import", str(file)]) == 0
    assert "imported 0 files" in capsys.readouterr().out
    assert (kernel / "add.json").read_text() == '{"own": 1}', "what there is stays"


def test_other_kinds_of_machines(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernels.tgz"
    assert main(["warmup", "--export", str(file)]) == 0
    other = lies_in(monkeypatch, tmp_path / "two")
    for name in machine_kind():
        monkeypatch.setattr(carrying, "machine_kind", lambda name=name: {**machine_kind(), name: "another"})
        line = error(capsys, "--import", str(file))
        assert name in line
        assert "another here" in line
    assert not other.exists()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    share: float,
) -> None:
    file = tmp_path / "kernels.tgz"
    assert main(["warmup", "--export", str(file)]) == 0
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    other = lies_in(monkeypatch, tmp_path / "two")
    assert str(file) in error(capsys, "--import", str(file))
    assert not other.exists()


def test_flipped_bytes(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernels.tgz"
    assert main(["warmup", "--export", str(file)]) == 0
    whole = file.read_bytes()
    other = lies_in(monkeypatch, tmp_path / "two")
    for place in range(20, len(whole) - 4, 97):
        flipped = whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :]
        file.write_bytes(flipped)
        with contextlib.suppress(OSError, EOFError, zlib.error):
            if gzip.decompress(flipped) == gzip.decompress(whole):
                continue  # another way to say the same, such as another distance within zeros
        error(capsys, "--import", str(file))
        assert not other.exists()


@pytest.mark.parametrize(
    "name", ["/etc/cron.d/x", "triton/../../x", "triton", "numba/x", "triton/a/__grp__x", "triton/link"]
)
def test_members_that_no_export_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    other, file = lies_in(monkeypatch, tmp_path / "two"), tmp_path / "kernels.tgz"
    head = json.dumps({"format": 1, "kind": machine_kind()}).encode()
    with tarfile.open(file, "w:gz") as archive:
        for member, content in ((carrying._HEAD, head), (name, b"[]")):
            described = tarfile.TarInfo(member)
            described.size = len(content)
            if member.endswith("link"):
                described.type, described.linkname, described.size = tarfile.SYMTYPE, "/etc/passwd", 0
            archive.addfile(described, io.BytesIO(content))
    error(capsys, "--import", str(file))
    assert not other.exists()


def test_what_cannot_be(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "MODEL" in error(capsys)
    assert "folder" in error(capsys, "--export", str(tmp_path))
    assert "nowhere" in error(capsys, "--export", str(tmp_path / "nowhere" / "file"))
    assert "none.tgz" in error(capsys, "--import", str(tmp_path / "none.tgz"))
    (tmp_path / "text").write_text("text")
    assert "not an export" in error(capsys, "--import", str(tmp_path / "text"))
    assert "not an export" in error(
        capsys, "--import", str(tmp_path / "text"), "--export", str(tmp_path / "new")
    )
    assert "/nowhere/at/all" in error(
        capsys, "/nowhere/at/all", "--device", "cpu", "--export", str(tmp_path / "new")
    )
    assert sorted(found.name for found in tmp_path.iterdir()) == ["one", "text"]


def test_where_compilers_keep_theirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from triton import knobs

    assert cache_folders()["triton"] == Path(knobs.cache.dir)
    assert machine_kind()["machine"] == os.uname().machine
