"""Supplies weights to a decoder under construction, from a safetensors checkpoint or as random numbers.

Owns the files, the names on disk, the dtypes and the place of each tensor. Does not know what the tensors are
for. Never reads pickle files, because they can run code.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import NamedTuple, Protocol

import torch

from manylora.models.fields import Fields
from manylora.models.spec import ModelError
from manylora.tensorfile import StoredTensor, TensorFileError, fill, read_header

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_BLOCK_BYTES = 2**23
"""Bytes of a checkpoint that are read at a time (8 MiB), unless one row is longer."""


class Part(NamedTuple):
    """A tensor of a checkpoint, as the config implies it, and its wanted part: rows, columns or all of it."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    rows: range | None = None
    columns: range | None = None

    @property
    def wanted_shape(self) -> tuple[int, ...]:
        """The shape of the wanted part."""
        shape = list(self.shape)
        if self.rows is not None:
            shape[0] = len(self.rows)
        if self.columns is not None:
            shape[1] = len(self.columns)
        return tuple(shape)


class Weights(Protocol):
    """A source of tensors for a decoder under construction, which takes each part once."""

    def take(self, *parts: Part) -> torch.Tensor:
        """Return the parts stacked along their first dimension, as one new contiguous tensor."""


class PlannedWeights:
    """A record of the parts that a decoder would take. Its tensors have shapes and no memory."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def take(self, *parts: Part) -> torch.Tensor:
        self.parts.extend(parts)
        return _empty(parts, torch.float32, torch.device("meta"))


_DUMMY_ELEMENTS = 2**22
"""The most elements of a block of random weights, unless one row is longer. Each block has its own seed."""


class DummyWeights:
    """Random weights of sensible scale, the same in every run on a kind of device.

    They are drawn in blocks of whole rows. A block's seed is made of the tensor's name and the block's
    number, so a part of a tensor has the same numbers as in the whole. At most one block is held beside the
    tensor.
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
            place.fill_(1.0)  # a norm's weight
            return
        deviation = 0.02 if place.dim() == 1 else part.shape[-1] ** -0.5
        wanted = range(part.shape[0]) if part.rows is None else part.rows
        rows = max(1, _DUMMY_ELEMENTS // math.prod(part.shape[1:]))
        for number in range(wanted.start // rows, -(-wanted.stop // rows)):
            first = number * rows
            end = min(first + rows, part.shape[0])
            # A seed of 32 bits, because a CPU's generator ignores higher bits.
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
    """The safetensors files of a model folder.

    Raises ModelError, with a one-line message, when the folder has none or one of them is damaged or missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors: dict[str, tuple[Path, StoredTensor]] = {}
        self._aliases: dict[str, str] = {}
        for path in _safetensors_files(folder):
            try:
                header = read_header(path, "model")
            except TensorFileError as error:
                raise ModelError(f"{path}: damaged or cut short, not a safetensors file ({error})") from error
            self._tensors |= {name: (path, stored) for name, stored in header.items()}

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._tensors

    def _stored_name(self, name: str) -> str:
        """Return a tensor's name on disk. Checkpoints saved from the body alone lack the leading "model."."""
        name = self._aliases.get(name, name)
        return name if name in self._tensors else name.removeprefix("model.")

    def alias(self, name: str, stored: str) -> None:
        """Make ``name`` another name of the tensor ``stored``."""
        self._aliases[name] = stored

    def blocks(self, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the wanted part of a tensor, as stored, some rows at a time: (index of the first row, rows).

        The index counts from the first wanted row. Rows are valid until the next ones are read. The file is
        not mapped, so parts that are not wanted take no memory. Raises ModelError where the tensor is
        missing, unreadable or of an unsupported dtype.
        """
        path, stored = self._find(part.name)
        if stored.dtype not in _DTYPES:
            raise ModelError(
                f"{self.folder}: tensor {part.name} is stored as {stored.dtype}; "
                "quantized checkpoints are not supported"
            )
        dtype, rows = _DTYPES[stored.dtype], range(stored.shape[0]) if part.rows is None else part.rows
        row_bytes = math.prod(stored.shape[1:]) * dtype.itemsize
        most = max(1, _BLOCK_BYTES // max(row_bytes, 1))
        buffer = bytearray(min(most, len(rows)) * row_bytes)
        try:
            with open(path, "rb", buffering=0) as file:
                for first in range(rows.start, rows.stop if buffer else rows.start, most):
                    count = min(most, rows.stop - first)
                    target = memoryview(buffer)[: count * row_bytes]
                    if not fill(file.fileno(), target, stored.begin + first * row_bytes):
                        raise ModelError(f"{path}: cut short while it was read")
                    block = torch.frombuffer(target, dtype=dtype).view(count, *stored.shape[1:])
                    if part.columns is not None:
                        block = block[:, part.columns.start : part.columns.stop]
                    yield first - rows.start, block
        except OSError as error:
            raise ModelError(f"{self.folder}: tensor {part.name} cannot be read ({error})") from error

    def _find(self, name: str) -> tuple[Path, StoredTensor]:
        stored = self._stored_name(name)
        if stored not in self._tensors:
            raise ModelError(f"{self.folder}: tensor {name} is missing from the checkpoint")
        return self._tensors[stored]

    def check(self, parts: Iterable[Part]) -> None:
        """Raise ModelError unless every part's tensor is stored, in the shape that config.json implies."""
        for part in parts:
            shape = self._find(part.name)[1].shape
            if shape != part.shape:
                raise ModelError(
                    f"{self.folder}: tensor {part.name} has shape {list(shape)}, "
                    f"config.json implies {list(part.shape)}"
                )


class CheckpointWeights:
    """The tensors of a checked checkpoint, copied one by one into their fused places on the device.

    ``progress(done_bytes, total_bytes)`` is called after each part; it counts bytes on the device.
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
            for first, rows in self._checkpoint.blocks(part):
                place[first : first + len(rows)].copy_(rows)
            self._done_bytes += place.numel() * place.element_size()
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)
        return tensor


def planned_bytes(parts: Iterable[Part], dtype: torch.dtype) -> int:
    """Return the bytes that the parts take in this dtype."""
    return sum(math.prod(part.wanted_shape) for part in parts) * dtype.itemsize


def _empty(parts: tuple[Part, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    rows = sum(part.wanted_shape[0] for part in parts)
    return torch.empty((rows, *parts[0].wanted_shape[1:]), dtype=dtype, device=device)


def _places(tensor: torch.Tensor, parts: Iterable[Part]) -> Iterator[tuple[Part, torch.Tensor]]:
    """Yield each part with its view of the tensor that holds all parts."""
    start = 0
    for part in parts:
        end = start + part.wanted_shape[0]
        yield part, tensor[start:end]
        start = end


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
