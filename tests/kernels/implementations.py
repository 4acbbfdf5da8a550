"""Which implementation runs where: the CPU path, Triton interpreted (no GPU), Triton on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from manylora.kernels.ops import Ops

CPU = torch.device("cpu")
SLOW = "the interpreter is slow, and float32 takes the same paths"


@dataclasses.dataclass(frozen=True)
class Subject:
    """An implementation under test on a device in one dtype. ``small``: the interpreter, which is slow."""

    kind: str
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.kind == "gpu" else "cpu")

    @property
    def small(self) -> bool:
        return self.kind == "interpreted"

    def poison(self) -> None:
        """Leave NaN in the memory that the device's allocator hands out next: an output or a partial result
        that is not wholly written then shows."""
        if self.kind == "gpu":
            blocks = [torch.full((n,), float("nan"), device=self.device) for n in [1 << 17] * 16 + [1 << 24]]
            del blocks

    def ops(self) -> Ops:
        if self.kind == "cpu":
            from manylora.kernels.cpu import CpuOps

            return CpuOps()
        if self.kind == "interpreted" and torch.cuda.is_available():
            pytest.skip("with a GPU the compiled kernels are tested instead")
        pytest.importorskip("triton")
        from manylora.kernels.triton.operations import TritonOps

        return TritonOps()


GPU_MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
# The interpreter's tl.dot is wrong on bfloat16, so bfloat16 is for the CPU path and real GPUs.
SUBJECTS = [
    *(
        pytest.param(Subject("cpu", dtype), id=f"cpu-{str(dtype)[6:]}")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ),
    pytest.param(Subject("interpreted", torch.float32), id="interpreted-float32"),
    pytest.param(Subject("interpreted", torch.float16), id="interpreted-float16"),
    pytest.param(Subject("gpu", torch.float32), id="gpu-float32", marks=GPU_MARKS),
    pytest.param(Subject("gpu", torch.bfloat16), id="gpu-bfloat16", marks=GPU_MARKS),
]
FLOAT64 = pytest.param(Subject("cpu", torch.float64), id="cpu-float64")
