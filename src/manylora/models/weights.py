"""Supplies of weights for a decoder under construction: a safetensors checkpoint, or random numbers.

Owns files, names on disk, dtypes and where each tensor lands. Does not know what the tensors are for. Nothing
here reads pickle files: they can run code.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from manylora.models.fields import Fields
from manylora.models.spec import ModelError
from manylora.models.storedrows import StoredRows

_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Part(NamedTuple):
    """One tensor of a checkpoint, as the config implies it, and what is wanted of it: rows, or columns, or all."""

    name: str
    shape: tuple[int, ...]
    """The whole tensor's."""
    rows: range | None = None
    columns: range | None = None

    @property
    def wanted_shape(self) -> tuple[int, ...]:
        """Of what is wanted."""
        shape = list(self.shape)
        if self.rows is not None:
            shape[0] = len(self.rows)
        if self.columns is not None:
            shape[1] = len(self.columns)
        return tuple(shape)

    @property
    def is_whole(self) -> bool:
        return self.wanted_shape == self.shape


class Weights(Protocol):
    """Where a decoder under construction takes its tensors from, each part once."""

    def take(self, *parts: Part) -> torch.Tensor:
        """The parts stacked along their first dimension, as one new contiguous tensor."""


class PlannedWeights:
    """Records what a decoder would take; its tensors have shapes and no memory."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def take(self, *parts: Part) -> torch.Tensor:
        self.parts.extend(parts)
        return _empty(parts, torch.float32, torch.device("meta"))


_DUMMY_ELEMENTS = 2**22
"""A block of random weights: drawn at once, from a seed of its own."""


class DummyWeights:
    """Random weights of sensible scale, the same in every run on a kind of device.

    Drawn in blocks of whole rows, each by the tensor's name and the block's number, so that a part of a
    tensor holds the numbers of the whole one and no more than a block is held beside it.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self._device = device
        self._dtype = dtype
        self._seed = seed
        self._random = torch.Generator(device=device)

    def take(self, *parts: Part) -> torch.Tensor:
        tensor = _empty(parts, self._dtype, self._device)
        for part, place in _places(tensor, parts):
            self._fill(part, place)
        return tensor

    def _fill(self, part: Part, place: torch.Tensor) -> None:
        if place.dim() == 1 and part.name.endswith(".weight"):
            place.fill_(1.0)  # a norm's
            return
        deviation = 0.02 if place.dim() == 1 else part.shape[-1] ** -0.5
        wanted = range(part.shape[0]) if part.rows is None else part.rows
        rows = max(1, _DUMMY_ELEMENTS // math.prod(part.shape[1:]))
        for number in range(wanted.start // rows, -(-wanted.stop // rows)):
            first = number * rows
            end = min(first + rows, part.shape[0])
            # 32 bits: of more, a CPU's generator takes no notice.
            self._random.manual_seed(zlib.crc32(f"{self._seed} {part.name} {number}".encode()))
            begin, stop = max(first, wanted.start), min(end, wanted.stop)
            target = place[begin - wanted.start : stop - wanted.start]
            if (begin, stop) == (first, end) and part.columns is None:
                target.normal_(0.0, deviation, generator=self._random)
                continue
            block = torch.empty((end - first, *part.shape[1:]), dtype=self._dtype, device=self._device)
            block.normal_(0.0, deviation, generator=self._random)
            kept = block[begin - first : stop - first]
            target.copy_(kept if part.columns is None else kept[:, part.columns.start : part.columns.stop])


class Checkpoint:
    """The open, memory-mapped safetensors files of a model folder. Use as a context manager.

    Raises ModelError, in one line, when the folder has none or one of them is damaged or missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        self._aliases: dict[str, str] = {}
        self._stack = contextlib.ExitStack()
        try:
            for path in _safetensors_files(folder):
                file = self._stack.enter_context(_open(path))
                self._files.update(dict.fromkeys(file.keys(), file))
                self._paths.update(dict.fromkeys(file.keys(), path))
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._files

    def _stored_name(self, name: str) -> str:
        """Checkpoints saved from the body alone lack the leading "model."."""
        name = self._aliases.get(name, name)
        return name if name in self._files else name.removeprefix("model.")

    def alias(self, name: str, stored: str) -> None:
        """From now on ``name`` means the tensor ``stored``."""
        self._aliases[name] = stored

    def read(self, name: str) -> torch.Tensor:
        """The tensor as stored, in CPU memory that may be the mapped file itself."""
        stored = self._known(name)
        try:
            tensor: torch.Tensor = self._files[stored].get_tensor(stored)
        except SafetensorError as error:
            raise ModelError(f"{self.folder}: tensor {name} cannot be read ({error})") from error
        self._check_dtype(name, tensor.dtype)
        return tensor

    def blocks(self, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
        """What is wanted of a tensor, as stored, some rows at a time: (the first one's number among them, rows),
        which are valid until the next. Read from the file, which is not mapped: what is not wanted takes no
        memory.
        """
        stored = self._known(part.name)
        try:
            source = StoredRows(self._paths[stored], stored)
            self._check_dtype(part.name, source.dtype)
            yield from source.blocks(part.rows, part.columns)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{self.folder}: tensor {part.name} cannot be read ({error})") from error

    def _known(self, name: str) -> str:
        stored = self._stored_name(name)
        if stored not in self._files:
            raise ModelError(f"{self.folder}: tensor {name} is missing from the checkpoint")
        return stored

    def _check_dtype(self, name: str, dtype: torch.dtype) -> None:
        if dtype not in _FLOATING:
            raise ModelError(
                f"{self.folder}: tensor {name} is stored as {str(dtype).removeprefix('torch.')}; "
                "quantized checkpoints are not supported"
            )

    def check(self, parts: Iterable[Part]) -> None:
        """Raise ModelError unless every part is there in the shape that config.json implies."""
        for part in parts:
            stored = self._stored_name(part.name)
            if stored not in self._files:
                raise ModelError(f"{self.folder}: tensor {part.name} is missing from the checkpoint")
            shape = tuple(self._files[stored].get_slice(stored).get_shape())
            if shape != part.shape:
                raise ModelError(
                    f"{self.folder}: tensor {part.name} has shape {list(shape)}, "
                    f"config.json implies {list(part.shape)}"
                )


class CheckpointWeights:
    """Tensors of a checked checkpoint, copied one by one into their fused places on the device.

    ``progress(done_bytes, total_bytes)`` counts bytes as they will lie on the device.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        total_bytes: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._progress = progress

    def take(self, *parts: Part) -> torch.Tensor:
        tensor = _empty(parts, self._dtype, self._device)
        for part, place in _places(tensor, parts):
            if part.is_whole:
                place.copy_(self._checkpoint.read(part.name))
            else:
                for first, rows in self._checkpoint.blocks(part):
                    place[first : first + len(rows)].copy_(rows)
            self._done_bytes += place.numel() * place.element_size()
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)
        return tensor


def planned_bytes(parts: Iterable[Part], dtype: torch.dtype) -> int:
    """Bytes that the parts take in this dtype."""
    return sum(math.prod(part.wanted_shape) for part in parts) * dtype.itemsize


def _empty(parts: tuple[Part, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    rows = sum(part.wanted_shape[0] for part in parts)
    return torch.empty((rows, *parts[0].wanted_shape[1:]), dtype=dtype, device=device)


def _places(tensor: torch.Tensor, parts: Iterable[Part]) -> Iterator[tuple[Part, torch.Tensor]]:
    """Each part and where it goes in the tensor of all."""
    start = 0
    for part in parts:
        end = start + part.wanted_shape[0]
        yield part, tensor[start:end]
        start = end


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: damaged or cut short, not a safetensors file ({error})") from error


def _safetensors_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        return _shards(index)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ModelError(
            f"{folder}: only pickle weights (.bin, .pt); they can run code when read and are refused: "
            "convert the model to safetensors"
        )
    raise ModelError(
        f"{folder}: no weights, neither model.safetensors nor model.safetensors.index.json is there"
    )


def _shards(index: Path) -> list[Path]:
    names = (Fields.of_file(index).object_or_none("weight_map") or Fields({}, str(index))).strings()
    if not names:
        raise ModelError(f"{index}: names no tensors (weight_map)")
    paths = []
    for name in sorted(set(names.values())):
        if PurePath(name).name != name:
            raise ModelError(f"{index}: names a file outside its folder: {name!r}")
        path = index.parent / name
        if not path.is_file():
            raise ModelError(f"{index.parent}: {name} is missing, {index.name} names it")
        paths.append(path)
    return paths
