"""Where a record comes from: command, commit, machine, versions, seed, and what else used the machine.

Every program that writes a record opens a ``Provenance`` before its work and puts ``provenance()`` into what it
writes; docs/results/README.md has the form. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]
"""The repository, where the package is installed from one."""
SOURCES = ("src", "lab", "pyproject.toml")
"""What decides a result; other files may differ from the commit."""
_LIBRARIES = ("torch", "triton", "numpy", "numba", "flashinfer-python", "transformers", "peft", "vllm")
_GPU_QUERY = ("nvidia-smi", "--format=csv,noheader,nounits")


@dataclasses.dataclass(frozen=True, slots=True)
class _Load:
    """``busy_s``: of all cores since the machine's start, ``own_s``: of this process and its ended children."""

    at_s: float
    busy_s: float | None
    own_s: float
    average: float | None
    gpu_processes: int | None

    @classmethod
    def now(cls) -> _Load:
        times = os.times()
        own_s = times.user + times.system + times.children_user + times.children_system
        average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        return cls(time.monotonic(), _busy_s(), own_s, average, _gpu_processes())


class Provenance:
    """Begun before the work. ``seed``: what the inputs are drawn from; a text where there is more to say.
    ``commit``: given where git cannot tell it (a copy of the working tree); ``said``: what cannot be measured of
    other work on the machine."""

    def __init__(self, seed: int | str, commit: str | None = None, said: str | None = None) -> None:
        self.command = command_line()
        self.commit = commit or commit_of(ROOT)
        self._seed = seed
        self._said = said
        self._began = _Load.now()

    @classmethod
    def of(cls, args: argparse.Namespace, seed: int | str) -> Provenance:
        """A provenance with what ``add_flags`` read."""
        return cls(seed, args.commit, args.others)

    def provenance(self, *parts: str) -> list[dict[str, Any]]:
        """An entry for each part of the record (a path in it: ``runs/0``), or one of the whole; measured until
        now."""
        entry = {
            "command": self.command, "commit": self.commit, "machine": machine(), "versions": versions(),
            "seed": self._seed, "others": self._others(_Load.now()),
        }  # fmt: skip
        return [{"part": part, **entry} for part in parts] or [entry]

    def _others(self, end: _Load) -> dict[str, Any]:
        """Measured: the cores that others kept busy in the mean, the load when the work began and at its end (the
        work's own is in the latter), and processes that used a GPU when the work began."""
        began = self._began
        found: dict[str, Any] = {}
        if began.busy_s is not None and end.busy_s is not None:
            passed_s = max(end.at_s - began.at_s, 1e-3)
            others_s = (end.busy_s - began.busy_s) - (end.own_s - began.own_s)
            found["busy_cores"] = round(max(others_s, 0.0) / passed_s, 2)
        if began.average is not None:
            found["load_before"], found["load_after"] = began.average, end.average
        if began.gpu_processes is not None:
            found["gpu_processes_before"] = began.gpu_processes
        return {**found, **({"said": self._said} if self._said else {})}


UNKNOWN = "unknown"
"""What stands in place of a commit outside a repository. What was measured so is no record."""


def tells_code(commit: str) -> bool:
    """Whether the commit says which code ran."""
    return commit.isalnum() and commit != UNKNOWN


def add_flags(parser: argparse.ArgumentParser) -> None:
    """``--commit`` and ``--others``."""
    parser.add_argument("--commit", help="of the code that runs, where git cannot tell it here")
    parser.add_argument("--others", metavar="TEXT", help="what else uses the machine; its load is measured")


def command_line() -> str:
    """The command line as it was typed, but for folders outside this one: of absolute paths the last part."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    name = "" if spec is None else spec.name.removesuffix(".__main__")
    program = Path(sys.argv[0])
    if name == "manylora" or program.name == "manylora":
        words = ["manylora"]
    else:
        words = ["python", "-m", name] if name else ["python", _shortened(str(program))]
    return shlex.join([*words, *map(_shortened, sys.argv[1:])])


def _shortened(word: str) -> str:
    flag, equals, value = word.rpartition("=")
    if not value.startswith("/"):
        return word
    path = Path(value)
    inside = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(path.name)
    return f"{flag}{equals}{inside}"


def commit_of(root: Path) -> str:
    """The repository's commit, with a plus behind it where sources differ from it; ``UNKNOWN`` without one."""
    try:
        top = _output("git", "-C", str(root), "rev-parse", "--show-toplevel").strip()
        if Path(top).resolve() != root.resolve():
            return UNKNOWN
        commit = _output("git", "-C", str(root), "rev-parse", "HEAD").strip()
        changed = _output("git", "-C", str(root), "status", "--porcelain", "--", *SOURCES).strip()
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return commit + ("+" if changed else "")


def machine() -> dict[str, Any]:
    """CPU, the cores that this process may use, and GPUs."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {"cpu": _cpu(), "cores": usable}
    names = _gpu("--query-gpu=name")
    if names:
        found["gpu"] = ", ".join(names)
    return found


def versions() -> dict[str, str]:
    """The versions of Python, of the installed libraries that make the figures, and of CUDA's driver."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    cuda = _torch_cuda()
    if cuda is not None:
        found["cuda"] = cuda
    drivers = _gpu("--query-gpu=driver_version")
    if drivers:
        found["driver"] = drivers[0]
    return found


def _torch_cuda() -> str | None:
    """The CUDA that torch was built for. Its version file says so without torch being imported."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        told = re.search(
            r"^cuda\b[^=]*= ['\"]([\d.]+)['\"]", Path(spec.origin).with_name("version.py").read_text(), re.M
        )
    except OSError:
        return None
    return None if told is None else told[1]


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _busy_s() -> float | None:
    """The busy seconds of all cores together, user and system."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, interrupts, soft = map(int, fields[:7])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def _gpu_processes() -> int | None:
    lines = _gpu("--query-compute-apps=pid")
    return None if lines is None else len([line for line in lines if line != str(os.getpid())])


def _gpu(query: str) -> Sequence[str] | None:
    """The answer's lines; None without a driver."""
    try:
        return [line for line in _output(*_GPU_QUERY, query).splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError):
        return None


def _output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout
