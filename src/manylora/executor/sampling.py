"""Samples tokens and computes log-probabilities from logits, on one rank or on several.

Follows vLLM's documented order. Log-probabilities come from the raw logits. Then logit_bias, the min_tokens
mask, and the repetition, frequency and presence penalties are applied. Where temperature is 0, argmax
follows; else temperature, min_p, top_k and top_p (over the remaining tokens, renormalised), and the draw.
Ties go to the lower token id everywhere, so top_k=1 is greedy. A row whose logits are not finite is reported,
and its tokens are meaningless. Knows tensors and SamplingParams; knows nothing of models, pages or particular
devices.

A draw depends on the row's logits and on (seed, sample, position), never on the batch. Probabilities become
integer weights, whose sums are exact in any order, and the draw is a race. A runner of weight w arrives after
an exponential time of rate w, and the first runner wins: first among blocks of tokens, then among the winning
block's tokens. The noise depends on the runner alone. So logits that differ in their last digits change a
draw only where two runners arrive almost together. All tensor work stays on the logits' device and the host
does not wait for it; everything that the host needs leaves in one tensor.

Ranks that divide the vocabulary among them get the same tokens. In a greedy step each rank contributes its
most likely token and that token's logit, and all ranks reduce these in the same way. In other steps the first
rank draws from all logits and broadcasts the tokens. So ranks agree by construction, whatever their
arithmetic.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from manylora.devices.peers import Peers
from manylora.types import PromptLogprobs, SamplingParams, SequenceId, TokenLogprobs


class Best(NamedTuple):
    """Each row's most likely token. ``tokens`` int64 [M]: the lowest id among the largest logits; ``values``
    float32 [M]: that logit, finite unless one of the row's logits is NaN or inf, or all are -inf. Both are
    views of ``packed`` int64 [2 * M], which the host can ``unpack``."""

    tokens: torch.Tensor
    values: torch.Tensor
    packed: torch.Tensor

    @classmethod
    def within(cls, packed: torch.Tensor) -> Best:
        """Return views of ``packed``, whether it is filled already or later."""
        size = len(packed) // 2
        return cls(packed[:size], packed[size:].view(torch.float32)[:size], packed)

    @staticmethod
    def unpack(packed: np.ndarray, count: int) -> tuple[list[int], list[int]]:
        """Return the tokens of the first ``count`` rows, and which of these rows have logits that are not
        finite."""
        size = len(packed) // 2
        return packed[:count].tolist(), unsound_rows(packed[size:].view(np.float32)[:count])


def greedy(logits: torch.Tensor) -> Best:
    """Return the most likely tokens of ``logits`` [M, V]. A NaN counts as larger than any number."""
    best = Best.within(torch.empty(2 * len(logits), dtype=torch.int64, device=logits.device))
    if logits.device.type == "cpu":
        # numpy's argmax is vectorised: 30 us for [64, 4096] on one core, where torch's takes 570 us.
        array = logits.numpy()
        tokens = array.argmax(axis=-1, out=best.tokens.numpy())
        best.values.numpy()[:] = array[np.arange(len(array)), tokens]
    else:
        torch.argmax(logits, dim=-1, out=best.tokens)
        torch.gather(logits, 1, best.tokens.unsqueeze(1), out=best.values.unsqueeze(1))
    return best


def unsound_rows(values: np.ndarray) -> list[int]:
    """Return the rows of ``values`` [M], the most likely tokens' logits, that are not finite; ascending."""
    is_sound = np.isfinite(values)
    return [] if is_sound.all() else np.flatnonzero(~is_sound).tolist()


TOP_K_WITHOUT_SORT = 1024
"""The largest top_k for which the largest logits are selected. Above it, and for top_p alone, the whole row
is sorted."""

_LARGEST = 3e38
"""A number close to the largest float32."""

_LEAST_TEMPERATURE = 1e-30
"""The least temperature used; much smaller ones would be 0 in float32."""

BLOCK_TOKENS = 128
"""The number of tokens in a block of the race. A race in two rounds needs noise for the blocks and for one
block's tokens, not for the whole vocabulary."""

_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)
"""SplitMix64's constants, written as int64."""


class Results(NamedTuple):
    """The tokens of a batch of rows, on the host.

    ``tokens``: the token of each row and draw. ``logprobs``: its log-probabilities, None for a row that does
    not ask for them; None altogether where no row asks. ``unsound``: the rows whose logits were not finite,
    ascending.
    """

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[TokenLogprobs | None]] | None
    unsound: Sequence[int]


class Bias:
    """A request's logit_bias as arrays, made once for all samples and steps of the request."""

    def __init__(self, logit_bias: tuple[tuple[int, float], ...]) -> None:
        total: dict[int, float] = {}
        for token, bias in logit_bias:
            total[token] = total.get(token, 0.0) + bias
        # A request may name any integer; ids that no vocabulary has are ignored.
        known = sorted((token, bias) for token, bias in total.items() if 0 <= token < 2**31)
        self._tokens = np.array([token for token, _ in known], dtype=np.int64)
        self._biases = np.array([bias for _, bias in known], dtype=np.float32)
        self._placed: tuple[torch.device, int, torch.Tensor, torch.Tensor] | None = None

    def on(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distinct tokens int64 [K], and the biases to add float32 [K], on the device of
        ``logits`` [M, V]. Tokens outside the vocabulary are left out."""
        device, size = logits.device, logits.shape[1]
        if self._placed is None or self._placed[:2] != (device, size):
            count = int(np.searchsorted(self._tokens, size))
            tokens = _to(logits, self._tokens[:count])
            self._placed = device, size, tokens, _to(logits, self._biases[:count], torch.float32)
        return self._placed[2:]


@dataclasses.dataclass(slots=True)
class SampledRow:
    """The draws wanted from one row of logits.

    ``output_ids``: the tokens generated so far, read by the penalties only; a negative last id stands for the
    row's ``pending`` token. ``samples``: (sample index, output position) of each wanted draw; all draws of a
    row have one position. ``bias``: the ``Bias`` of ``params``, made here unless it is given.
    """

    params: SamplingParams
    prompt_ids: np.ndarray
    output_ids: Sequence[int] | np.ndarray
    stop_ids: tuple[int, ...]
    samples: tuple[tuple[int, int], ...]
    bias: Bias | None = None

    def __post_init__(self) -> None:
        if self.bias is None and self.params.logit_bias:
            self.bias = Bias(self.params.logit_bias)


@dataclasses.dataclass(frozen=True, slots=True)
class Draws:
    """The sampled tokens, still on the device.

    ``first`` int64 [M]: each row's first draw; undefined for a row that draws nothing. ``packed``: a tensor
    that ``read`` converts to the results, once it is on the host.
    """

    first: torch.Tensor
    packed: torch.Tensor
    read: Callable[[np.ndarray], Results]


def draw(
    logits: torch.Tensor,
    rows: Sequence[SampledRow],
    best: Best | None = None,
    pending: torch.Tensor | None = None,
) -> Draws:
    """Draw every row's tokens from ``logits`` float32 [M, V]; M = len(rows). Does not change ``logits``.

    ``best``: the most likely tokens of ``logits``, if known, for M rows or more. ``pending`` int64 [M]: each
    row's last token, used for rows whose last token only the device knows. Token ids outside the vocabulary,
    in prompts, stop_ids or logit_bias, are ignored. Where every token is ruled out, token 0 is sampled.
    """
    best = greedy(logits) if best is None else best
    if all(_is_plain(row.params) and not _is_edited(row) for row in rows):
        return most_likely(best, [len(row.samples) for row in rows])
    edited = _edited(logits, rows, pending)
    tokens = best.tokens[: len(rows)] if edited is logits else greedy(edited).tokens
    sampled = _Sampled(tokens, best.values[: len(rows)], rows)
    random = [i for i, row in enumerate(rows) if row.params.temperature > 0 and row.samples]
    if random:
        chosen = [rows[i] for i in random]
        weights = _weights(_rows(edited, random), [row.params for row in chosen])
        sampled.put(random, _draws(weights, chosen))
    return sampled.packed(logits)


def most_likely(best: Best, counts: Sequence[int]) -> Draws:
    """Return draws that are all the row's most likely token: ``counts[i]`` draws of row i, for the first rows
    of ``best``."""

    def read(found: np.ndarray) -> Results:
        tokens, unsound = Best.unpack(found, len(counts))
        return Results([[token] * count for token, count in zip(tokens, counts)], None, unsound)

    return Draws(best.tokens, best.packed, read)


def is_greedy(params: SamplingParams) -> bool:
    """Return whether every draw is the most likely token of the raw logits, with no log-probabilities."""
    return _is_plain(params) and not (has_penalties(params) or params.logit_bias or params.min_tokens)


def has_penalties(params: SamplingParams) -> bool:
    """Return whether the tokens so far change the logits."""
    return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)


def _largest(values: torch.Tensor, width: int) -> torch.Tensor:
    """Return each row's ``width`` largest values in descending order, float32 [R, width]."""
    size = values.shape[1]
    if values.device.type == "cpu":
        # numpy is faster here as in ``greedy``: it takes a twentieth of the time of torch's sort.
        array = values.numpy()
        if width < size:
            array = np.partition(array, size - width, axis=-1)[:, size - width :]
        return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())
    if width < size:
        return values.topk(width, dim=-1).values
    return values.sort(dim=-1, descending=True).values


def draw_key(seed: int, sample_index: int, position: int) -> int:
    """Hash the arguments to an int64, which depends on nothing else."""
    key = struct.pack("<Qqq", seed & (2**64 - 1), sample_index, position)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little", signed=True)


def _is_plain(params: SamplingParams) -> bool:
    """Return whether temperature is 0 and no log-probabilities are asked for."""
    return params.temperature == 0 and params.logprobs is None


def _is_edited(row: SampledRow) -> bool:
    """Return whether the logits change before the draw."""
    return has_penalties(row.params) or bool(row.params.logit_bias) or _holds_back(row)


def _holds_back(row: SampledRow) -> bool:
    """Return whether min_tokens still forbids stop ids to this row."""
    return bool(row.samples) and row.samples[0][1] < row.params.min_tokens


def _to(like: torch.Tensor, values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    host = torch.as_tensor(values, dtype=dtype)
    if like.is_cuda and host.numel():
        # A copy from pageable memory may wait for all earlier work.
        host = host.pin_memory()
    return host.to(like.device, non_blocking=True)


def _rows(tensor: torch.Tensor, index: Sequence[int]) -> torch.Tensor:
    """Select rows of the tensor, ascending; return the tensor itself where ``index`` has all rows."""
    return tensor if len(index) == len(tensor) else tensor[_to(tensor, index)]


# ---------------------------------------------------------------- changes to the logits


def _edited(logits: torch.Tensor, rows: Sequence[SampledRow], pending: torch.Tensor | None) -> torch.Tensor:
    """Return float32 [M, V] after logit_bias, min_tokens and penalties; a copy where any row changes."""
    index = [i for i, row in enumerate(rows) if _is_edited(row)]
    if not index:
        return logits.float()
    changed = [rows[i] for i in index]
    part = logits[_to(logits, index)].float()
    _add_bias(part, changed)
    _mask_stops(part, changed)
    _penalise(part, changed, None if pending is None else pending[_to(logits, index)])
    return logits.float().index_copy(0, _to(logits, index), part)


def _add_bias(part: torch.Tensor, rows: Sequence[SampledRow]) -> None:
    size = part.shape[1]
    # Samples of one request share its bias: together they take a few calls, however many entries it has.
    sharing: dict[Bias, list[int]] = {}
    for i, row in enumerate(rows):
        if row.bias is not None:
            sharing.setdefault(row.bias, []).append(i)
    for bias, members in sharing.items():
        tokens, values = bias.on(part)
        where = (_to(part, members).unsqueeze(1) * size + tokens).view(-1)
        part.view(-1).index_add_(0, where, values.repeat(len(members)))


def _mask_stops(part: torch.Tensor, rows: Sequence[SampledRow]) -> None:
    size = part.shape[1]
    held = [
        i * size + token
        for i, row in enumerate(rows)
        if _holds_back(row)
        for token in row.stop_ids
        if 0 <= token < size
    ]
    if held:
        part.view(-1).index_fill_(0, _to(part, held), float("-inf"))


def _penalise(part: torch.Tensor, rows: Sequence[SampledRow], pending: torch.Tensor | None) -> None:
    params = [row.params for row in rows]
    if any(p.repetition_penalty != 1 for p in params):
        all_ids = [
            np.concatenate((row.prompt_ids, row.output_ids)) if p.repetition_penalty != 1 else ()
            for row, p in zip(rows, params)
        ]
        seen = _counts(part, all_ids, pending)
        # Kept within float32: a penalty beyond it would turn 0 into NaN, and finite logits into inf.
        penalty = _column(part, params, lambda p: min(max(p.repetition_penalty, 1 / _LARGEST), _LARGEST))
        scaled = torch.where(part > 0, part / penalty, part * penalty).clamp_(max=_LARGEST)
        part.copy_(torch.where(seen > 0, scaled, part))
    if any(p.frequency_penalty or p.presence_penalty for p in params):
        ids = [
            row.output_ids if p.frequency_penalty or p.presence_penalty else ()
            for row, p in zip(rows, params)
        ]
        counts = _counts(part, ids, pending)
        part -= _column(part, params, lambda p: p.frequency_penalty) * counts
        part -= _column(part, params, lambda p: p.presence_penalty) * (counts > 0)


def _counts(part: torch.Tensor, ids: Sequence[Any], pending: torch.Tensor | None) -> torch.Tensor:
    """Count how often each token is among each row's ids, pending tokens included; float32 [R, V]."""
    size = part.shape[1]
    flat, ends_pending = [], []
    for i, tokens in enumerate(ids):
        array = np.asarray(tokens, dtype=np.int64)
        flat.append(array[(array >= 0) & (array < size)] + i * size)
        if pending is not None and len(array) and array[-1] < 0:
            ends_pending.append(i)
    where = _to(part, np.concatenate(flat))
    if pending is not None and ends_pending:
        owners = _to(part, ends_pending)
        where = torch.cat((where, pending[owners] + owners * size))
    # Counts are far below 2**24, so float32 holds them exactly, in whatever order a device adds.
    counts = torch.zeros(part.numel(), dtype=torch.float32, device=part.device)
    ones = torch.ones(len(where), dtype=torch.float32, device=part.device)
    return counts.index_add_(0, where, ones).view_as(part)


def _column(
    like: torch.Tensor,
    params: Sequence[SamplingParams],
    value: Callable[[SamplingParams], float],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return one value for each row, [R, 1]."""
    return _to(like, [value(p) for p in params], dtype).unsqueeze(1)


# ---------------------------------------------------------------- filtered distributions


def _weights(part: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the tokens' weights in each row's draw, int64 [R, V]; 0 for tokens that may not be sampled."""
    # The largest logit becomes 0 before dividing, so that no temperature can overflow.
    largest = part.amax(dim=-1, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, torch.zeros_like(largest))
    scaled = (part - largest).div_(_column(part, params, lambda p: max(p.temperature, _LEAST_TEMPERATURE)))
    if any(p.min_p for p in params):
        # p(token) >= min_p * p(best), without normalising either.
        floor = _column(part, params, lambda p: p.min_p).log()
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    size = part.shape[1]
    limits = [p.top_k if 0 < p.top_k < size else size for p in params]
    is_few = [limit <= TOP_K_WITHOUT_SORT and limit < size for limit in limits]
    few = [i for i, found in enumerate(is_few) if found]
    many = [i for i, p in enumerate(params) if not is_few[i] and (p.top_p < 1 or limits[i] < size)]
    for index, width in ((few, max((limits[i] for i in few), default=0)), (many, size)):
        if index:
            top_k = _to(part, [limits[i] for i in index]).unsqueeze(1)
            top_p = _column(part, [params[i] for i in index], lambda p: p.top_p, torch.float64)
            kept = _nucleus(_rows(scaled, index), top_k, top_p, width)
            is_all = len(index) == len(scaled)
            scaled = kept if is_all else scaled.index_copy(0, _to(part, index), kept)
    return _integers(scaled, size)


def _nucleus(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``scaled`` [R, V] with -inf outside each row's ``top_k`` and ``top_p``, both [R, 1]; top_k <=
    width.

    Both filters keep the first tokens in descending order of value, so the number of these tokens and the
    last value determine which are kept.
    """
    size = scaled.shape[1]
    values = _largest(scaled, width)
    weights = _integers(values, size)
    places = torch.arange(width, device=scaled.device)
    weights *= places < top_k
    sums = weights.cumsum(dim=-1)
    # A token stays while the tokens before it weigh less than top_p of the total. Integer sums are the same
    # in every batch.
    kept = ((sums - weights).double() < sums[:, -1:].double() * top_p) & (weights > 0)
    count = kept.sum(dim=-1, keepdim=True).clamp(min=1)
    last = values.gather(1, count - 1)
    # Among tokens equal to the last value, the lower ids stay.
    room = count - (values > last).sum(dim=-1, keepdim=True)
    equal = scaled == last
    keep = (scaled > last) | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= room))
    return scaled.masked_fill(~keep, float("-inf"))


def _integers(scaled: torch.Tensor, size: int) -> torch.Tensor:
    """Return exp(scaled) as int64, in a unit so small that the sum of ``size`` of these cannot overflow (1
    becomes 2**44 for a 256k vocabulary)."""
    unit = 2.0 ** (62 - max(size - 1, 1).bit_length())
    return scaled.exp().mul_(unit).to(torch.int64)


def _draws(weights: torch.Tensor, rows: Sequence[SampledRow]) -> torch.Tensor:
    """Return each row's draws, int64 [R, N], where N is the largest number of draws of a row. A row with
    fewer draws has its own at the front."""
    longest = max(len(row.samples) for row in rows)
    keys = np.zeros((len(rows), longest), dtype=np.int64)
    for i, row in enumerate(rows):
        seed = row.params.seed or 0
        for n, (sample_index, position) in enumerate(row.samples):
            keys[i, n] = draw_key(seed, sample_index, position)
    size = weights.shape[1]
    if size % BLOCK_TOKENS:
        weights = torch.nn.functional.pad(weights, (0, -size % BLOCK_TOKENS))
    blocks = weights.view(len(rows), -1, BLOCK_TOKENS)
    noise = _noise(_to(weights, keys), BLOCK_TOKENS + blocks.shape[1])
    # noise / weight is the negative of a runner's time, so the largest is the first. For weight 0 it is -inf.
    won = (noise[..., BLOCK_TOKENS:] / blocks.sum(dim=-1).unsqueeze(1)).argmax(dim=-1)
    tokens = blocks.gather(1, won.unsqueeze(-1).expand(-1, -1, BLOCK_TOKENS))
    first = (noise[..., :BLOCK_TOKENS] / tokens).argmax(dim=-1)
    return (won * BLOCK_TOKENS + first).clamp_(max=size - 1)


def _noise(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return the logarithms of ``count`` uniform numbers in (0, 1) for each key of int64 [R, N]; float64
    [R, N, count]."""
    bits = keys.unsqueeze(-1) + torch.arange(1, count + 1, device=keys.device) * _STEP
    for shift, factor in _MIX:
        # This shift repeats the sign where SplitMix64's shifts in zeros. One bit is lost, which does no harm.
        bits = bits.bitwise_xor_(bits >> shift).mul_(factor)
    return bits.double().mul_((1 - 2.0**-52) * 2.0**-64).add_(0.5).log_()


# ---------------------------------------------------------------- results


class _Sampled:
    """The draws of all rows, one after another, and their packing for the host."""

    def __init__(self, best: torch.Tensor, values: torch.Tensor, rows: Sequence[SampledRow]) -> None:
        """Set every draw to the row's greedy token; ``put`` replaces draws. ``best`` int64 [M]: the greedy
        tokens; ``values`` float32 [M]: the ``values`` of ``Best``."""
        self.rows = rows
        self.best = best
        self.values = values
        self.starts = [0]
        for row in rows:
            self.starts.append(self.starts[-1] + len(row.samples))
        owners = [i for i, row in enumerate(rows) for _ in row.samples]
        draws_once = owners == list(range(len(rows)))
        self.tokens = best if draws_once else best[_to(best, owners)]

    def put(self, index: Sequence[int], draws: torch.Tensor) -> None:
        """Set the tokens of the rows ``index`` to ``draws`` [len(index), N]."""
        width = draws.shape[1]
        if len(index) == len(self.rows) == len(self.tokens) == draws.numel():
            self.tokens = draws.view(-1)
            return
        where = [self.starts[i] + n for i in index for n in range(len(self.rows[i].samples))]
        source = [r * width + n for r, i in enumerate(index) for n in range(len(self.rows[i].samples))]
        self.tokens = self.tokens.index_copy(0, _to(draws, where), draws.view(-1)[_to(draws, source)])

    def packed(self, logits: torch.Tensor) -> Draws:
        """Pack all that the host needs into one float64 tensor, which holds token ids and float32 values
        exactly. ``logits``: the raw logits, for log-probabilities."""
        asked = [i for i, row in enumerate(self.rows) if row.params.logprobs is not None and row.samples]
        draws = [(a, d) for a, i in enumerate(asked) for d in range(self.starts[i], self.starts[i + 1])]
        width, parts = 0, [self.tokens, self.values]
        if asked:
            width = min(max(self.rows[i].params.logprobs or 0 for i in asked), logits.shape[1])
            logprobs = logits[_to(logits, asked)].float().log_softmax(dim=-1)
            top = logprobs.topk(width, dim=-1)
            own = logprobs[
                _to(logits, [a for a, _ in draws]), self.tokens[_to(logits, [d for _, d in draws])]
            ]
            parts += [own, top.values.reshape(-1), top.indices.reshape(-1)]
        ends = np.cumsum([len(part) for part in parts])[:-1]

        def read(packed: np.ndarray) -> Results:
            tokens, largest, *others = np.split(packed, ends)
            ids = tokens.astype(int).tolist()
            found: list[TokenLogprobs | None] = [None] * len(ids)
            for (a, d), logprob in zip(draws, others[0].tolist() if others else ()):
                _, values, indices = others
                wanted = slice(a * width, a * width + min(self.rows[asked[a]].params.logprobs or 0, width))
                alternatives = zip(indices[wanted].astype(int).tolist(), values[wanted].tolist())
                found[d] = TokenLogprobs(ids[d], logprob, tuple(alternatives))
            ranges = [slice(begin, end) for begin, end in zip(self.starts, self.starts[1:])]
            said = [found[part] for part in ranges] if asked else None
            return Results([ids[part] for part in ranges], said, unsound_rows(largest))

        return Draws(self._first(), torch.cat([part.double() for part in parts]), read)

    def _first(self) -> torch.Tensor:
        """Return each row's first draw, int64 [M]; undefined for rows that draw nothing."""
        if self.starts == list(range(len(self.rows) + 1)) or not len(self.tokens):
            return self.tokens if len(self.tokens) else self.best
        last = len(self.tokens) - 1
        return self.tokens[_to(self.tokens, [min(start, last) for start in self.starts[:-1]])]


LOGITS_AT_A_TIME = 2**23
"""The most logits scored at once: 32 MiB of float32, and a few times as much while log-probabilities are
computed. This is well within a step's workspace."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ScoredTokens:
    """The S prompt tokens of a step whose logits score the next token of their prompt.

    ``tokens`` int64 [2, S]: their places in the batch, and the tokens that follow them. ``runs``: the
    sequences in the order of their tokens, each with its number of tokens and number of alternatives.
    ``width``: the largest number of alternatives.
    """

    tokens: np.ndarray
    runs: tuple[tuple[SequenceId, int, int], ...]

    @property
    def width(self) -> int:
        return max(num_top for _, _, num_top in self.runs)

    def read(self, scores: np.ndarray) -> dict[SequenceId, PromptLogprobs]:
        """Divide the result of ``score``, on the host, among the sequences."""
        width, begin = scores.shape[1] // 2 - 1, 0
        found = {}
        for sequence, count, asked in self.runs:
            rows, num_top = scores[begin : begin + count], min(asked, width)
            begin += count
            parts = rows[:, : 2 + num_top], rows[:, 2 + width : 2 + width + num_top]
            found[sequence] = PromptLogprobs(num_top, np.concatenate(parts, axis=1).tobytes())
        return found


def score(logits: torch.Tensor, targets: torch.Tensor, width: int) -> torch.Tensor:
    """Score ``targets`` [C] in ``logits`` float32 [C, V], and find the ``width`` (at most V) most probable
    tokens. Return int32 [C, 2 + 2 * width] in the order that ``PromptLogprobs`` packs, with floats as their
    bits."""
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, targets.unsqueeze(1))
    rank = (logprobs > own).sum(dim=-1, keepdim=True, dtype=torch.int32) + 1
    top = logprobs.topk(min(width, logprobs.shape[1]), dim=-1)
    parts = own.view(torch.int32), rank, top.values.view(torch.int32), top.indices.to(torch.int32)
    return torch.cat(parts, dim=1)


class RankedSampling:
    """The sampling functions of one of several ranks, each of which has the logits of a part of the
    vocabulary. ``vocabs``: each rank's token ids, in order."""

    def __init__(self, peers: Peers, vocabs: Sequence[range]) -> None:
        self._peers = peers
        self._vocabs = vocabs

    def greedy(self, logits: torch.Tensor) -> Best:
        """Return ``greedy`` of all ranks' logits, given this rank's, ``[M, own]``. Ties go to the lowest
        id."""
        own = greedy(logits)
        if len(logits) == 0:
            return own
        own.tokens.add_(self._vocabs[self._peers.rank].start)
        found = [Best.within(packed) for packed in self._peers.gather(own.packed, "sampling")]
        values = torch.stack([best.values for best in found])
        # The first of the largest values, with NaN larger than any number.
        which = torch.where(values.isnan(), torch.inf, values)
        first = (which == which.amax(0)).to(torch.uint8).argmax(0)[None]
        best = Best.within(torch.empty_like(own.packed))
        best.tokens.copy_(torch.stack([one.tokens for one in found]).gather(0, first)[0])
        best.values.copy_(values.gather(0, first)[0])
        return best

    def draw(self, logits: torch.Tensor, rows: Sequence[SampledRow], best: Best, last: torch.Tensor) -> Draws:
        """Draw from all ranks' logits as ``draw`` does. ``last`` is its ``pending``. Only the first rank's
        results have more than each row's first draw."""
        whole = self._whole(logits)
        if self._peers.rank == 0:
            draws = draw(whole, rows, best, last)
            first = draws.first[: len(rows)].clone()
            self._peers.broadcast(first, "sampling")
            return draws
        first = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        self._peers.broadcast(first, "sampling")
        return Draws(first, first, lambda tokens: Results([(token,) for token in tokens.tolist()], None, []))

    def score(self, logits: torch.Tensor, targets: torch.Tensor, width: int) -> torch.Tensor:
        """Score from all ranks' logits as ``score`` does. Only the first rank's result has rows."""
        whole = self._whole(logits)
        count = len(whole) if self._peers.rank == 0 else 0
        return score(whole[:count], targets[:count], width)

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        widest = len(self._vocabs[0])
        own = logits.new_full((len(logits), widest), -torch.inf)
        own[:, : logits.shape[1]] = logits
        parts = self._peers.gather(own, "sampling")
        return torch.cat([part[:, : len(vocab)] for part, vocab in zip(parts, self._vocabs)], dim=1)
