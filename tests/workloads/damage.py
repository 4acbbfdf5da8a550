"""Samples with one line changed, and what every loader must say of them."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from manylora.config.declaring import ConfigError

SAMPLES = Path(__file__).parent / "samples"


class Loaded(Protocol):
    """Anything a loader gives."""

    @property
    def notes(self) -> tuple[str, ...]: ...


Result = TypeVar("Result", bound=Loaded)


def with_line(folder: Path, name: str, number: int, text: str) -> Path:
    """The sample with line ``number``, from 1, replaced."""
    lines = (SAMPLES / name).read_text().splitlines()
    lines[number - 1] = text
    path = folder / Path(name).name
    path.write_text("\n".join(lines) + "\n")
    return path


def zipped(folder: Path, name: str) -> Path:
    """The sample, gzipped, under a name that does not say so."""
    path = folder / Path(name).name
    path.write_bytes(gzip.compress((SAMPLES / name).read_bytes()))
    return path


def refuses(load: Callable[[bool], Result], path: Path, line: int, expected: str, found: str) -> Result:
    """Without skipping: one line with file, line, what was expected and found. With: what is left, counted."""
    with pytest.raises(ConfigError) as caught:
        load(False)
    message = str(caught.value)
    assert message.startswith(f"{path}, line {line}: expected "), message
    assert expected in message, message
    assert found in message.split("found", 1)[1], message
    assert "\n" not in message
    left = load(True)
    assert f"{path.name}: 1 malformed lines left out" in left.notes
    return left
