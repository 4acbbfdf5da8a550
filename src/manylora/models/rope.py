"""Computes the cosine and sine tables of rotary positions, with exactly the numbers that transformers gets.

Owns the frequency formulas of the supported kinds of rope. Does not rotate anything: that is one of the
kernels' operations.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from manylora.models.spec import ModelConfig, RopeConfig


def rope_tables(
    config: ModelConfig, max_positions: int, device: torch.device, rope: RopeConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin), each float32 ``[max_positions, head_dim / 2]``.

    The attention factor of yarn and longrope is multiplied in. ``rope``: the settings to use; None: the
    config's own. Longrope's tables have ``original_max_positions`` more rows: the rows for short contexts
    come first, then ``max_positions`` rows for long ones. Raises ValueError where the model has no rope, and
    where a linear or llama3 rope has no factor.
    """
    rope = rope or config.rope
    if rope is None:
        raise ValueError("the model has learned positions, not rotary ones")
    # Computed on the CPU for every device, because pow and cos differ in the last bit between devices.
    inverse, attention_factor = _frequencies(rope, config.head_dim, config.max_position_embeddings)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse
    if rope.kind == "longrope":
        short = dataclasses.replace(rope, long_factors=rope.short_factors)
        inverse, _ = _frequencies(short, config.head_dim, config.max_position_embeddings)
        first = torch.arange(rope.original_max_positions, dtype=torch.float32)[:, None]
        angles = torch.cat((first * inverse, angles))
    return (angles.cos() * attention_factor).to(device), (angles.sin() * attention_factor).to(device)


def _frequencies(rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> tuple[torch.Tensor, float]:
    """Return (radians per position, float32 ``[head_dim / 2]``; factor of cos and sin)."""
    theta = rope.theta
    if rope.kind == "dynamic" and rope.factor is not None:  # at the original length: 1 but for rounding
        scale = rope.factor * max_position_embeddings / max_position_embeddings - (rope.factor - 1)
        theta *= scale ** (head_dim / (head_dim - 2))
    powers = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind in ("yarn", "longrope"):
        factor = rope.factor
        if factor is None:
            factor = max_position_embeddings / rope.original_max_positions
        if rope.kind == "yarn":
            return _yarn(rope, powers, factor), _attention_factor(rope, factor)
        inverse = 1.0 / (torch.tensor(rope.long_factors, dtype=torch.float32) * powers)
        return inverse, _attention_factor(rope, factor)
    inverse = 1.0 / powers
    if rope.kind in ("default", "dynamic"):
        return inverse, 1.0
    if rope.factor is None:
        raise ValueError(f"{rope.kind} rope needs a factor")
    if rope.kind == "linear":
        return inverse / rope.factor, 1.0
    return _llama3(rope, inverse, rope.factor), 1.0


def _llama3(rope: RopeConfig, inverse: torch.Tensor, factor: float) -> torch.Tensor:
    """Divide the frequencies of long wavelengths by the factor, keep those of short ones, blend between."""
    original = rope.original_max_positions
    longest = original / rope.low_freq_factor
    shortest = original / rope.high_freq_factor
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > longest, inverse / factor, inverse)
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * scaled / factor + blend * scaled
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, blended, scaled)


def _yarn(rope: RopeConfig, powers: torch.Tensor, factor: float) -> torch.Tensor:
    """Blend extrapolated frequencies into interpolated ones along a ramp over the dimensions."""
    half = len(powers)
    dim = 2 * half

    def dimension_of(rotations: float) -> float:
        """Return the dimension that makes this many rotations within the original context."""
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # transformers' guard against dividing by zero
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep


def _attention_factor(rope: RopeConfig, factor: float) -> float:
    """Return yarn's or longrope's factor of cos and sin."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(rope.original_max_positions)) if factor > 1 else 1.0

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
