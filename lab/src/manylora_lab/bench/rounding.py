"""How far a correct kernel's result may lie from the exact one, element by element, by rounding alone.

Every operation is a chain of products, sums and a few functions. With the unit roundoff u of the accumulator and n
terms, a computed sum of products misses the exact one by at most gamma_n = n u / (1 - n u) times the same sum of
absolute values, in whatever order it was taken (Higham, Accuracy and Stability of Numerical Algorithms, 3.1), also
where tensor cores cut off instead of rounding, since they add several products at a time. A result that is stored
adds the unit roundoff of its type, relative to itself. Exact values are float64, as the reference computes them.

Products accumulate in float32 (in float64 for float64). What an operation computes from inexact inputs carries
their errors along, so bounds of chains are compositions: ``silu_mul(linear(...).rounded(dtype), dtype)``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from manylora.kernels.ops import AttentionRows, HeadNorm, Rotary, Scores
from manylora.kernels.shapes import PageShape
from manylora_lab.bench.reference import ReferenceOps

_REFERENCE = ReferenceOps()
_STEEPEST_SILU = 1.1
"""The largest slope of x * sigmoid(x) is 1.0998."""
_FUNCTION = 8
"""Units of the accumulator by which a device's exp, division or reciprocal root may be off (CUDA's approximations:
two)."""


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def accumulator(dtype: torch.dtype) -> float:
    """The unit roundoff of the sums that a kernel takes of such elements."""
    return unit(torch.float64 if dtype == torch.float64 else torch.float32)


def gamma(terms: int, roundoff: float) -> float:
    """The relative error of so many roundings, each to the roundoff."""
    return terms * roundoff / (1 - terms * roundoff)


@dataclasses.dataclass(frozen=True, slots=True)
class Bounded:
    """``exact``: what would come out without rounding; ``error``: how far off each element may be; float64."""

    exact: torch.Tensor
    error: torch.Tensor

    @classmethod
    def given(cls, x: torch.Tensor) -> Bounded:
        """An input, which is what it is."""
        return cls(x.double(), torch.zeros_like(x, dtype=torch.float64))

    @property
    def largest(self) -> torch.Tensor:
        """The largest absolute value that each computed element may have."""
        return self.exact.abs() + self.error

    def rounded(self, dtype: torch.dtype) -> Bounded:
        """Stored in the type; the smallest numbers may be flushed to zero."""
        finfo = torch.finfo(dtype)
        # float16 keeps its subnormal numbers on every device; the range of the others makes them harmless.
        least = finfo.tiny * (finfo.eps if dtype == torch.float16 else 1)
        return Bounded(self.exact, self.error + unit(dtype) * self.largest + least)

    def plus(self, other: Bounded) -> Bounded:
        """The sum, not yet rounded."""
        return Bounded(self.exact + other.exact, self.error + other.error)

    def put(self, rows: slice, columns: slice, other: Bounded) -> None:
        """Put other values in place of what is there."""
        self.exact[rows, columns], self.error[rows, columns] = other.exact, other.error

    def part(self, rows: slice) -> Bounded:
        """Some of the rows."""
        return Bounded(self.exact[rows], self.error[rows])

    def excess(self, out: torch.Tensor) -> float:
        """The largest error of an element over what it may be: at most 1 for a right result. Infinite where an
        element is no number, or differs where nothing may be rounded. Raises ValueError for another shape."""
        if out.shape != self.exact.shape:
            raise ValueError(f"shape {tuple(out.shape)} where {tuple(self.exact.shape)} is due")
        if not out.numel():
            return 0.0
        off = (out.double() - self.exact).abs()
        same = (out.double() == self.exact) | (off == 0)
        worst = torch.where(same, 0.0, off / self.error).nan_to_num(math.inf, math.inf).max()
        return float(worst)


def product(x: Bounded, matrix: torch.Tensor, dtype: torch.dtype) -> Bounded:
    """``x @ matrix``, summed by the type's accumulator; not yet rounded."""
    wide = matrix.double()
    relative = gamma(len(matrix), accumulator(dtype))
    return Bounded(x.exact @ wide, (x.error + relative * x.largest) @ wide.abs())


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Bounded:
    """The product of exact inputs; not yet rounded."""
    y = product(Bounded.given(x), weight.T, x.dtype)
    if bias is None:
        return y
    total = y.plus(Bounded.given(bias))
    return Bounded(total.exact, total.error + accumulator(x.dtype) * total.largest)


def lora(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    parts: Sequence[slice] = (slice(None),),
) -> Bounded:
    """What one adapter adds to one projection of its tokens, as stored; ``a`` [rank, in], ``b`` [rank, out].
    ``parts``: inputs that are shrunk each by themselves and added up.

    What shrinking gives, the sum of its parts and that times the scale may each have been stored before
    expanding."""
    dtype = x.dtype
    first, *others = (product(Bounded.given(x[:, one]), a[:, one].T, dtype).rounded(dtype) for one in parts)
    shrunk = first
    for other in others:
        shrunk = shrunk.plus(other).rounded(dtype)
    scaled = Bounded(shrunk.exact * scale, shrunk.error * abs(scale)).rounded(dtype)
    return product(scaled, b, dtype).rounded(dtype)


def silu_mul(gate_up: Bounded, dtype: torch.dtype) -> Bounded:
    """The product, not yet rounded; the activation may have been, before the product."""
    exact = _REFERENCE.gate_mul(gate_up.exact)
    (gate, up), (gate_off, up_off) = gate_up.exact.chunk(2, -1), gate_up.error.chunk(2, -1)
    active, active_off = torch.nn.functional.silu(gate).abs(), _STEEPEST_SILU * gate_off
    # An exponential's argument is rounded, too.
    relative = (_FUNCTION + 2 * gate.abs()) * accumulator(dtype) + unit(dtype)
    rounding = relative * (active + active_off) + torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    return Bounded(exact, (active_off + rounding) * (up.abs() + up_off) + active * up_off)


def rms_norm(x: Bounded, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> Bounded:
    """The weighted values, not yet rounded; the normal values have been, before the weight."""
    exact = _REFERENCE.rms_norm(x.exact, weight.double(), eps)
    square = x.exact.square().mean(-1, keepdim=True)
    off = (2 * x.exact.abs() * x.error + x.error.square()).mean(-1, keepdim=True)
    off = off + gamma(x.exact.shape[-1] + 2, accumulator(dtype)) * (square + off)
    root = (square + eps).rsqrt()
    most = ((square - off).clamp(min=0) + eps).rsqrt()
    normal_off = most * x.error + x.exact.abs() * (most - root)
    largest = root * x.exact.abs() + normal_off
    normal_off = normal_off + (_FUNCTION * accumulator(dtype) + unit(dtype)) * largest
    return Bounded(exact, (normal_off + accumulator(dtype) * largest) * weight.double().abs())


def added(first: torch.Tensor, *others: torch.Tensor) -> Bounded:
    """Inputs that are added one after the other, each sum stored."""
    total = Bounded.given(first)
    for other in others:
        total = total.plus(Bounded.given(other)).rounded(first.dtype)
    return total


def rotated(x: Bounded, rotary: Rotary, positions: torch.Tensor, dtype: torch.dtype) -> Bounded:
    """``[T, heads, D]``; not yet rounded."""
    cos, sin = (t[positions].double()[:, None] for t in (rotary.cos, rotary.sin))
    left, right = x.exact.chunk(2, -1)
    exact = torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    def turned(of: torch.Tensor) -> torch.Tensor:
        low, high = of.abs().chunk(2, -1)
        return torch.cat((low * cos.abs() + high * sin.abs(), high * cos.abs() + low * sin.abs()), -1)

    return Bounded(exact, turned(x.error) + gamma(3, accumulator(dtype)) * turned(x.largest))


def rotate_and_store(
    qkv: tuple[Bounded, Bounded, Bounded],
    pool: torch.Tensor,
    layer: int,
    rotary: Rotary,
    positions: torch.Tensor,
    slots: torch.Tensor,
    norm: HeadNorm | None,
) -> tuple[Bounded, Bounded]:
    """(turned q, the whole pool), both stored. Where nothing is written the pool may not differ at all."""
    dtype = pool.dtype
    q, k, v = qkv
    if norm is not None:
        q = rms_norm(q, norm.query, norm.eps, dtype).rounded(dtype)
        k = rms_norm(k, norm.key, norm.eps, dtype).rounded(dtype)
    q, k = (rotated(x, rotary, positions, dtype).rounded(dtype) for x in (q, k))
    exact, error = pool.double(), torch.zeros_like(pool, dtype=torch.float64)
    _REFERENCE.write_kv(exact, layer, k.exact, v.exact, slots)
    _REFERENCE.write_kv(error, layer, k.error, v.error, slots)
    return q, Bounded(exact, error)


def attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    rows: AttentionRows,
    page: PageShape,
    scores: Scores,
) -> Bounded:
    """The attention, not yet rounded; weights have been, before they meet the values."""
    dtype, roundoff = q.dtype, accumulator(q.dtype)
    own = pool[:, layer : layer + 1].to(torch.float64, copy=True)
    plan = _REFERENCE.plan_attention(rows, page, q.device)
    exact = _REFERENCE.attention(q.double(), own, 0, plan, scores)
    keys = own[:, 0, 0].nan_to_num().norm(dim=-1).amax((0, 1))  # of each key head, the longest
    own[:, 0, 1].abs_()
    magnitude = _REFERENCE.attention(q.double(), own, 0, plan, scores)
    # Of a logit: a product of D terms, no larger than the vectors' lengths allow, and an exponential's argument.
    heads = q.shape[1]
    logit = scores.scale * q.double().norm(dim=-1) * keys.repeat_interleave(heads // len(keys))  # [T, heads]
    logit_off = (gamma(q.shape[-1] + 4, roundoff) + 4 * roundoff) * logit
    # A cap's slope is 1 at most.
    logit_off = logit_off + _FUNCTION * roundoff * (scores.soft_cap or 0.0)
    context = int(rows.kv_len.max()) if len(rows.kv_len) else 0
    # Of the sum above and of the sum below; the largest logit, which is taken away, is off as well.
    sums = torch.expm1(2 * logit_off) + _FUNCTION * roundoff + gamma(2 * context + 2, roundoff)
    relative = (1 + sums) * (1 + unit(dtype)) / (1 - sums).clamp(min=1e-3) - 1
    relative = relative.repeat_interleave(q.shape[-1], -1).view(magnitude.shape)
    # A small weight is stored with the precision of the smallest numbers; the largest one is 1.
    least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps * context * own[:, 0, 1].nan_to_num().max()
    return Bounded(exact, relative * magnitude + least)
