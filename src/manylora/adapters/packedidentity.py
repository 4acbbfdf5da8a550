"""What a packed file says of itself: of which adapter it is, of which files, and for which pools.

Files are compared by it, byte for byte. Does not know where in a file it stands.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import torch

from manylora.adapters.pack import PACKING_VERSION
from manylora.adapters.peft import AdapterSpec, adapter_files
from manylora.adapters.sourcestamp import SourceStamp, stamp_source
from manylora.kernels.shapes import AdapterGeometry
from manylora.protocol import AdapterError


def identity_of(
    spec: AdapterSpec, num_pages: int, stamps: tuple[SourceStamp, SourceStamp], packing: str
) -> bytes:
    """``stamps``: of the configuration and the weights; ``packing``: a ``packing_fingerprint``."""
    said = {
        "path": spec.path,
        "digest": spec.digest,
        "config": dataclasses.astuple(stamps[0]),
        "weights": dataclasses.astuple(stamps[1]),
        "packing": packing,
        "prefix": [spec.key_prefix, spec.layer_prefix, spec.key_infix],
        "ranks": spec.ranks,
        "scales": spec.scales,
        "pages": num_pages,
    }
    return json.dumps(said).encode()


def packing_fingerprint(geometry: AdapterGeometry, dtype: torch.dtype) -> str:
    """All that page images depend on besides the adapter and the number of its pages."""
    described = [
        PACKING_VERSION,
        str(dtype),
        sys.byteorder,
        dataclasses.astuple(geometry.page),
        geometry.cell_elements,
        geometry.itemsize,
        [dataclasses.astuple(projection) for projection in geometry.projections],
        [[group.name for group in groups] for groups in geometry.layers],
    ]
    if geometry.cuts:  # whole adapters need no more words: what was kept of them stays valid
        described.append([str((cut.a_columns, cut.b_rows)) for cut in geometry.cuts])
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()


def is_outdated(identity: bytes) -> bool:
    """Whether the files that it names are gone, or others now."""
    try:
        said = json.loads(identity)
        paths = adapter_files(Path(said["path"]))
        return any(
            list(dataclasses.astuple(stamp_source(path))) != said[key]
            for path, key in zip(paths, ("config", "weights"))
        )
    except (AdapterError, OSError, ValueError, TypeError, LookupError, RecursionError):
        return True
