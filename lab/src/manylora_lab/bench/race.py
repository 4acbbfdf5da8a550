"""The sampler's race once more, in plain numpy: which token wins, and how far behind every other one is.

For judging draws, of the sampler itself and of whole answers.
"""

from __future__ import annotations

import numpy as np

from manylora.executor.sampling import BLOCK_TOKENS, draw_key


def behind(weights: np.ndarray, seed: int, sample: int, position: int) -> np.ndarray:
    """float64 [V]: by how much the logarithms of ``weights`` [V] would have to change for each token to win.

    0 for the token that is drawn, inf where a weight is 0.
    """
    size = len(weights)
    blocks = np.pad(weights, (0, -size % BLOCK_TOKENS)).reshape(-1, BLOCK_TOKENS)
    bits = np.arange(1, BLOCK_TOKENS + len(blocks) + 1, dtype=np.int64) * _signed(0x9E3779B97F4A7C15)
    bits += draw_key(seed, sample, position)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> shift)) * _signed(factor)
    noise = np.log(-np.log(bits * (1 - 2.0**-52) * 2.0**-64 + 0.5))
    with np.errstate(divide="ignore", invalid="ignore"):
        of_blocks = noise[BLOCK_TOKENS:] - np.log(blocks.sum(axis=1))
        of_tokens = noise[:BLOCK_TOKENS] - np.log(blocks)
        of_tokens -= of_tokens.min(axis=1, keepdims=True)  # NaN where no token of a block may be drawn
    lost: np.ndarray = np.fmax(of_blocks[:, None] - of_blocks.min(), of_tokens)
    return lost.reshape(-1)[:size]


def _signed(number: int) -> int:
    return number - 2**64
