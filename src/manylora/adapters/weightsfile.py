"""The weights file of an adapter that has been inspected, opened to be read.

Owns the proof that what is read is what was inspected: the files' stamps before and after, and the tensors that
the inspection names. Knows nothing of pages. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from manylora.adapters.faults import FilesChanged, WrongInspection
from manylora.adapters.peft import IGNORED_TENSORS, AdapterSpec, Side, adapter_files
from manylora.adapters.tensorfile import StoredTensor, read_header, sampled_digest, stamp_of
from manylora.kernels.shapes import AdapterGeometry
from manylora.protocol import AdapterError


class AdapterWeights:
    """The open file and what its header says of the adapter's tensors, by projection, layer and side."""

    def __init__(
        self, spec: AdapterSpec, geometry: AdapterGeometry, header: dict[str, StoredTensor], file: FileIO
    ) -> None:
        """Raises WrongInspection where the header does not hold just the tensors that ``spec`` speaks of."""
        self.file = file
        self._tensors: dict[tuple[int, int, Side], tuple[str, StoredTensor]] = {}
        sides: tuple[Side, Side] = ("A", "B")
        for index, (projection, ranks) in enumerate(zip(geometry.wholes, spec.ranks, strict=True)):
            for layer, rank in enumerate(ranks):
                for side in sides if rank else ():
                    name = spec.tensor_name(layer, projection, side)
                    stored = header.get(name)
                    shape = (rank, projection.in_features) if side == "A" else (projection.out_features, rank)
                    if stored is None or stored.shape != shape:
                        raise WrongInspection(f"tensor {name} is no longer what inspecting the adapter found")
                    self._tensors[index, layer, side] = name, stored
        if len(self._tensors) != sum(not name.endswith(IGNORED_TENSORS) for name in header):
            raise WrongInspection("the adapter holds tensors that inspecting it did not find")

    def tensor(self, index: int, layer: int, side: Side) -> tuple[str, StoredTensor]:
        """Its name and where it lies; KeyError where the projection is not adapted in this layer."""
        return self._tensors[index, layer, side]

    def tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        """All of them."""
        yield from self._tensors.values()


@contextmanager
def open_weights(spec: AdapterSpec, geometry: AdapterGeometry) -> Iterator[AdapterWeights]:
    """Raises FilesChanged, on leaving too: bytes replaced while they were read are not the version that was
    inspected. Raises WrongInspection, and AdapterError for a file that cannot be read."""
    config_path, weights_path = unchanged_files(spec)
    header = read_header(weights_path)
    _compare(spec, config_path, weights_path, header)
    try:
        file = open(weights_path, "rb", buffering=0)  # noqa: SIM115  (closed below; what follows has its own errors)
    except OSError as error:
        raise AdapterError(f"cannot read {weights_path.name}: {error.strerror or error}") from error
    with file:
        yield AdapterWeights(spec, geometry, header, file)
    unchanged_files(spec)
    _compare(spec, config_path, weights_path, header)


def _compare(spec: AdapterSpec, config: Path, weights: Path, header: dict[str, StoredTensor]) -> None:
    """Raises FilesChanged where others lie there, though of the same sizes and times."""
    if spec.digest and sampled_digest(config, weights, header) != spec.digest:
        raise FilesChanged("the adapter's files have changed since it was added; add it again")


def unchanged_files(spec: AdapterSpec) -> tuple[Path, Path]:
    """The adapter's configuration and weights. Raises FilesChanged where they are not what was inspected."""
    try:
        config_path, weights_path = adapter_files(Path(spec.path))
        stamps = stamp_of(config_path), stamp_of(weights_path)
    except AdapterError as error:
        raise FilesChanged(f"{error}; it was there when the adapter was added") from error
    for path, stamp, inspected in zip((config_path, weights_path), stamps, (spec.config, spec.weights)):
        if stamp != inspected:
            raise FilesChanged(f"{path.name} has changed since the adapter was added; add it again")
    return config_path, weights_path
