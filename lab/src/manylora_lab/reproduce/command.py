"""``manylora reproduce``: one command for each table and figure of the papers."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from pathlib import Path

from manylora.config.declaring import ConfigError
from manylora_lab.bench.provenance import Provenance
from manylora_lab.reproduce.experiment import CLEAR, Device, Scale, Setup, show_progress
from manylora_lab.reproduce.registry import EXPERIMENTS, experiment
from manylora_lab.reproduce.report import Headline


def reproduce(
    name: str,
    out: Path,
    scale: Scale,
    device: Device | None = None,
    seed: int = 0,
    workers: int = 0,
    *,
    hardware: str | None = None,
    store: Path | None = None,
    is_run: bool = True,
) -> None:
    """Run the experiment, write ``NAME.json`` and ``NAME.png``, print the headline; the last three as ``Setup``
    has them. Raises ConfigError."""
    found = experiment(name)
    if device is not None and device not in found.devices:
        raise ConfigError(f"{name} runs on {' or '.join(found.devices)}, not on {device}")
    chosen = device or found.devices[0]
    if chosen == "cuda" and not _has_cuda():
        raise ConfigError(f"{name} needs a CUDA device, and there is none")
    if hardware not in (None, *found.hardwares):
        known = " or ".join(found.hardwares)
        raise ConfigError(f"{name} has no choice of hardware" if not known else f"--hardware must be {known}")
    if not found.hardwares and (not is_run or (store and not found.is_stored)):
        kept = "only finished cases: leave out" if found.is_stored else "nothing: leave out --store and"
        raise ConfigError(f"{name} keeps {kept} --report-only")
    if found.hardwares and store is None and scale == "full":
        store = out / f"{name}-{hardware or found.hardwares[0]}.cells.jsonl"  # hours of work
    _require_output(out, name)
    began = time.monotonic()
    setup = Setup(
        scale, chosen, seed, workers, hardware, store, is_run, lambda line: show_progress(f"{name}: {line}")
    )
    recording = Provenance(seed)
    report = found.run(setup)
    try:
        written = report.write(out, recording.provenance())
        found.draw(report, written.with_suffix(".png"))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from None
    clear = CLEAR if sys.stderr.isatty() else ""
    print(f"{clear}{name}: {found.title} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
    for figure in report.headline:
        print(f"  {_shown(figure)}")
    print(f"  {written}")


def print_list() -> None:
    """All names, a line each."""
    width = max(map(len, EXPERIMENTS))
    for name, each in EXPERIMENTS.items():
        print(f"{name:<{width}}  {each.title}")


def _shown(figure: Headline) -> str:
    ours = "-" if figure.ours is None else f"{figure.ours:.4g}"
    others = []
    if figure.paper is not None:
        others.append(f"paper: {figure.paper:.4g}{', recalled' if figure.is_recalled else ''}")
    if figure.artifact is not None:
        others.append(f"artifact: {figure.artifact:.4g}")
    return f"{figure.metric}: {ours}" + (f" ({'; '.join(others)})" if others else "")


def _require_output(out: Path, name: str) -> None:
    """Raises ConfigError where the report or its picture could not be written: before hours of work, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the picture needs matplotlib: pip install manylora-lab[plot]")
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
        for path in (out / f"{name}.json", out / f"{name}.png"):
            if path.exists():
                path.open("ab").close()
    except OSError as error:
        where = error.filename or out
        raise ConfigError(f"{where} cannot be written: {error.strerror or error}") from None


def _has_cuda() -> bool:
    # Only a run on a GPU needs torch, which takes seconds to import.
    from manylora.devices.cuda import cuda_is_available

    return cuda_is_available()
