"""The sampler against a plain numpy reference, and its promise that a draw never depends on the batch."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from manylora_lab.bench.race import behind

from manylora.executor import sampling
from manylora.executor.sampling import TOP_K_WITHOUT_SORT, SampledRow, draw, draw_key, greedy
from manylora.types import SamplingParams, TokenLogprobs


def row(
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    stop: tuple[int, ...] = (),
    samples: tuple[tuple[int, int], ...] | None = None,
    **params: Any,
) -> SampledRow:
    settings = {"temperature": 0.0, "seed": 0, "max_tokens": None, **params}
    return SampledRow(
        params=SamplingParams(**settings),
        prompt_ids=np.array(prompt, dtype=np.int64),
        output_ids=output,
        stop_ids=stop,
        samples=((0, len(output)),) if samples is None else samples,
    )


def sample(logits: torch.Tensor, rows: list[SampledRow]) -> tuple[Any, Any]:
    """The draws, waited for: tokens, log-probabilities."""
    drawn = draw(logits, rows)
    found, logprobs, unsound = drawn.read(drawn.packed.cpu().numpy())
    assert not unsound
    for i, (first, tokens) in enumerate(zip(drawn.first.tolist(), found, strict=True)):
        assert not tokens or first == tokens[0], f"row {i}"
    return found, logprobs


def noise(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def edited_reference(logits: np.ndarray, r: SampledRow) -> np.ndarray:
    p, x = r.params, logits.astype(np.float32).copy()
    for token, bias in p.logit_bias:
        if token < len(x):
            x[token] += np.float32(bias)
    if r.samples[0][1] < p.min_tokens:
        x[[s for s in r.stop_ids if s < len(x)]] = -np.inf
    penalty = np.float32(p.repetition_penalty)
    for token in {*r.prompt_ids.tolist(), *r.output_ids}:
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in r.output_ids:
        x[token] -= np.float32(p.frequency_penalty)
    for token in set(r.output_ids):
        x[token] -= np.float32(p.presence_penalty)
    return x


def distribution_reference(logits: np.ndarray, r: SampledRow) -> np.ndarray:
    """Probabilities after every filter, in vLLM's order: min_p, then top_k, then top_p of what is left."""
    p = r.params
    x = edited_reference(logits, r).astype(np.float64) / p.temperature
    probs = np.exp(x - x.max())
    probs[probs < p.min_p * probs.max()] = 0
    order = np.argsort(-probs, kind="stable")
    if p.top_k:
        probs[order[p.top_k :]] = 0
    probs /= probs.sum()
    if p.top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= p.top_p]] = 0
    kept: np.ndarray = probs / probs.sum()
    return kept


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 8, "top_p": 0.7},
    {"top_k": 1000, "top_p": 0.7},
    {"top_k": 8, "top_p": 0.7, "min_p": 0.05},
    {"temperature": 0.05, "top_p": 0.95},
    {"temperature": 100.0, "top_k": 30},
]


def assert_distributed(drawn: np.ndarray, expected: np.ndarray) -> None:
    """Counts of draws [K] are those of probabilities [K]."""
    total = drawn.sum()
    assert not drawn[expected == 0].any()
    assert drawn[expected > 40 / total].all()
    likely = expected * total > 10
    chi_square = ((drawn - expected * total) ** 2 / np.maximum(expected * total, 1e-9))[likely].sum()
    degrees = max(int(likely.sum()) - 1, 1)
    # Wilson-Hilferty: the 99.99 % point of chi-square, seeds being fixed.
    assert chi_square < degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3 + 1e-6


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(("size", "ties"), [(40, False), (40, True), (300, False)])
def test_draws_cover_exactly_the_reference_support(filters: dict[str, Any], size: int, ties: bool) -> None:
    logits = noise(1, size)
    if ties:
        logits = (logits / 2).round()
    r = row(**{"temperature": 1.0, **filters})
    r.samples = tuple((i, 0) for i in range(20000))
    expected = distribution_reference(logits[0].numpy(), r)
    assert_distributed(np.bincount(sample(logits, [r])[0][0], minlength=size), expected)


@pytest.mark.parametrize("neighbour", ["seed", "sample", "position"])
def test_draws_of_neighbours_are_independent(neighbour: str) -> None:
    """Each pair of tokens is drawn as often as if the two were drawn apart."""
    logits = noise(1, 300).expand(40000, -1)
    named = [{"seed": 0, "sample": 0, "position": 0, neighbour: place} for place in range(40000)]
    rows = [row(temperature=0.6, seed=n["seed"], samples=((n["sample"], n["position"]),)) for n in named]
    tokens = draw(logits, rows).first.view(-1, 2).numpy()
    expected = distribution_reference(logits[0].numpy(), rows[0])
    counts = np.bincount(tokens[:, 0] * 300 + tokens[:, 1], minlength=300 * 300)
    assert_distributed(counts, np.outer(expected, expected).ravel())


@pytest.mark.parametrize("size", [40, 512, 5000])
def test_the_first_of_a_race_is_drawn(size: int) -> None:
    """Seeded answers stay what they are as long as this holds."""
    logits = noise(50, size)
    rows = [row(temperature=0.8, seed=2**63 + i, samples=((i % 3, i),)) for i in range(50)]
    weights = [distribution_reference(x.numpy(), r) for x, r in zip(logits, rows)]
    first = [int(behind(w, 2**63 + i, i % 3, i).argmin()) for i, w in enumerate(weights)]
    assert draw(logits, rows).first.tolist() == first
    assert len({draw_key(s, i, p) for s in (-1, 0, 1, 2**64 - 2) for i in range(5) for p in range(5)}) == 100


@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02}], ids=str)
def test_logits_that_differ_by_rounding_change_few_draws(filters: dict[str, Any]) -> None:
    """No larger a part of all draws than logits over temperature differ by."""
    logits, off = noise(100, 4096), 1e-3
    other = logits + noise(100, 4096, seed=1) / 3 * off
    draws = tuple((i, 0) for i in range(300))
    rows = [row(temperature=0.8, seed=i, samples=draws, **filters) for i in range(100)]
    one, two = (np.array(sample(x, rows)[0]) for x in (logits, other))
    assert 0 < (one != two).mean() < off / 0.8


def test_large_top_k_sorts_and_agrees_with_selection() -> None:
    logits = noise(1, 3 * TOP_K_WITHOUT_SORT)
    draws = tuple((i, 0) for i in range(500))
    below = sample(logits, [row(temperature=1.0, top_k=TOP_K_WITHOUT_SORT, samples=draws)])[0][0]
    above = sample(logits, [row(temperature=1.0, top_k=TOP_K_WITHOUT_SORT + 1, samples=draws)])[0][0]
    allowed = set(logits[0].topk(TOP_K_WITHOUT_SORT + 1).indices.tolist())
    assert set(above) <= allowed
    assert np.mean(np.array(below) == np.array(above)) > 0.95


def test_greedy_is_argmax_and_ties_go_to_the_lower_id() -> None:
    logits = noise(16, 300)
    assert sample(logits, [row()] * 16) == ([[t] for t in logits.argmax(-1).tolist()], None)
    logits[:, [7, 9, 200]] = 50.0
    assert sample(logits, [row()] * 16)[0] == [[7]] * 16
    filters: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-30, "top_p": 0.3}]
    for params in filters:
        assert sample(logits, [row(**{"temperature": 0.8, **params})] * 16)[0] == [[7]] * 16


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits = noise(24, 517)
    kinds: list[dict[str, Any]] = [
        *FILTERS,
        {"temperature": 0.0},
        {"repetition_penalty": 1.5},
        {"logprobs": 3},
        {"frequency_penalty": 1.0},
    ]
    rows = [
        row(prompt=(1, 2, 3), output=(4, 4, 5), **{"temperature": 1.0, "seed": i, **kinds[i % len(kinds)]})
        for i in range(24)
    ]
    together, logprobs = sample(logits, rows)
    for i in range(24):
        assert sample(logits[i : i + 1], rows[i : i + 1])[0][0] == together[i]
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist()
    mixed, _ = sample(logits[order], [rows[i] for i in order])
    assert mixed == [together[i] for i in order]
    assert [entry[0] is not None for entry in logprobs] == [r.params.logprobs is not None for r in rows]


def test_samples_of_a_fork_differ_and_continue_apart() -> None:
    logits = noise(1, 1000)
    fork = sample(logits, [row(temperature=2.0, samples=tuple((i, 0) for i in range(8)))])[0][0]
    assert len(set(fork)) > 4
    alone = [sample(logits, [row(temperature=2.0, samples=((i, 0),))])[0][0][0] for i in range(8)]
    assert alone == fork
    assert sample(logits, [row(samples=((0, 0), (1, 0), (2, 0)))])[0] == [[int(logits.argmax())] * 3]
    assert sample(logits, [row(temperature=1.0, samples=())]) == ([[]], None)


def test_rows_with_different_numbers_of_draws_keep_theirs() -> None:
    logits = noise(4, 50)
    rows = [
        row(temperature=1.0, samples=((0, 0),)),
        row(samples=((0, 0), (1, 0))),
        row(temperature=1.0, seed=5, samples=((0, 0), (1, 0), (2, 0))),
        row(temperature=1.0, samples=(), logprobs=2),
    ]
    together, _ = sample(logits, rows)
    assert [len(tokens) for tokens in together] == [1, 2, 3, 0]
    assert together == [sample(logits[i : i + 1], [r])[0][0] for i, r in enumerate(rows)]


EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.1},
    {"frequency_penalty": -2.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": {3: 100.0}},
    {"logit_bias": {3: 6.5, 4: 6.5, 900: 5.0}, "repetition_penalty": 2.0},
    {"min_tokens": 10},
    {"min_tokens": 5},
]


def test_edits_match_the_reference() -> None:
    logits = noise(60 * len(EDITS), 30)
    rows = [
        row(prompt=(1, 2, 3, 3), output=(3, 4, 4, 4, 29), stop=(3, 5, 17, 99), **EDITS[i % len(EDITS)])
        for i in range(len(logits))
    ]
    before = logits.clone()
    tokens, _ = sample(logits, rows)
    assert torch.equal(before, logits)
    expected = [edited_reference(x.numpy(), r).argmax() for x, r in zip(logits, rows)]
    assert [t[0] for t in tokens] == expected
    assert expected != logits.argmax(-1).tolist()


def test_min_tokens_holds_back_stop_ids_only_until_then() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 4] = 10.0
    logits[0, 6] = 5.0
    assert sample(logits, [row(stop=(4,), output=(1,), min_tokens=2)])[0] == [[6]]
    assert sample(logits, [row(stop=(4,), output=(1, 1), min_tokens=2)])[0] == [[4]]
    assert sample(logits, [row(stop=(4,), output=(1,), min_tokens=2, temperature=0.01)])[0] == [[6]]


def test_bias_of_minus_100_bans_and_everything_ruled_out_is_survived() -> None:
    logits = noise(1, 6)
    best = int(logits.argmax())
    banned = sample(
        logits, [row(temperature=1.0, logit_bias={best: -100.0}, samples=((0, 0), (1, 0), (2, 0)))]
    )
    assert best not in banned[0][0]
    everything = dict.fromkeys(range(6), -100.0)
    assert sample(logits, [row(logit_bias=everything)])[0] == [[best]]
    held = row(stop=tuple(range(6)), min_tokens=1, samples=((0, 0),))
    assert sample(logits, [held])[0] == [[0]]
    for filters in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}):
        drawn = row(stop=tuple(range(6)), min_tokens=1, samples=((0, 0),), temperature=1.0, **filters)
        assert sample(logits, [drawn])[0] == [[0]]


def test_never_draws_a_token_without_probability() -> None:
    logits = torch.full((1, 1000), float("-inf"))
    logits[0, [3, 500, 998]] = torch.tensor([0.0, 1.0, -1.0])
    draws = tuple((i, 0) for i in range(3000))
    for filters in ({}, {"top_k": 5}, {"top_p": 0.999}, {"min_p": 0.01}):
        tokens = sample(logits, [row(temperature=1.0, samples=draws, **filters)])[0][0]
        assert set(tokens) == {3, 500, 998}


def test_logprobs_come_from_the_raw_logits_and_include_the_chosen_token() -> None:
    logits = noise(5, 64)
    rows = [
        row(temperature=1.0, logprobs=3, top_k=2),
        row(logprobs=0, logit_bias={9: 100.0}),
        row(),
        row(logprobs=20, repetition_penalty=1.3, prompt=(1, 2)),
        row(temperature=1.5, logprobs=1, samples=((0, 0), (1, 0))),
    ]
    tokens, logprobs = sample(logits, rows)
    reference = torch.log_softmax(logits.double(), dim=-1)
    assert logprobs[2] == [None]
    assert tokens[1] == [9]
    for i in (0, 1, 3, 4):
        for token, entry in zip(tokens[i], logprobs[i]):
            assert isinstance(entry, TokenLogprobs)
            assert entry.token == token
            assert entry.logprob == pytest.approx(reference[i, token].item(), abs=1e-5)
            best = reference[i].topk(rows[i].params.logprobs or 0)
            assert [t for t, _ in entry.top] == best.indices.tolist()
            assert [v for _, v in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert len(logprobs[4]) == 2
    assert len(sample(logits[:, :5], [row(logprobs=20)] * 5)[1][0][0].top) == 5


def test_a_token_that_only_the_device_knows_is_penalised_like_any_other() -> None:
    logits = noise(3, 30)
    late = torch.tensor([4, 5, 17])
    edits: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 2.0}
    told = [row(prompt=(1,), output=(2, 2, token), **edits) for token in (4, 5, 17)]
    untold = [row(prompt=(1,), output=(2, 2, -entry), **edits) for entry in (7, 1, 3)]
    for x, r, token in zip(logits, told, (4, 5, 17)):
        # The penalised token is the likeliest before, and another one after.
        x[token] = x.max() + 0.5
        assert int(edited_reference(x.numpy(), r).argmax()) != token
    chosen = [int(edited_reference(x.numpy(), r).argmax()) for x, r in zip(logits, told)]
    assert draw(logits, untold, pending=late).first.tolist() == chosen
    mixed = [row(), untold[1], told[2]]
    assert draw(logits, mixed, pending=late).first.tolist() == [4, *chosen[1:]]
    assert draw(logits, told).first.tolist() == chosen


def test_greedy_tokens_that_are_known_are_not_looked_for_again() -> None:
    logits = noise(3, 30)
    best = greedy(logits)
    drawn = draw(logits, [row()] * 3, best)
    assert drawn.first is best.tokens
    edited = draw(logits, [row(), row(logit_bias={3: 100.0}), row()], best)
    assert edited.first.tolist() == [int(best.tokens[0]), 3, int(best.tokens[2])]


def test_extreme_temperatures_and_logits_stay_finite() -> None:
    logits = torch.tensor([[1e38, -1e38, 0.0, 1e38]])
    for temperature in (1e-300, 1e-5, 1.0, 100.0):
        drawn = sample(logits, [row(temperature=temperature, samples=tuple((i, 0) for i in range(50)))])[0][0]
        assert set(drawn) == {0, 3}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_draws_what_the_cpu_draws_and_waits_for_nothing() -> None:
    kinds: list[dict[str, Any]] = [*FILTERS, *EDITS, {"temperature": 0.0}, {"logprobs": 3}]
    logits = (noise(4 * len(kinds), 5000) * 4).round() / 4
    rows = [
        row(
            prompt=(1, 2, 3),
            output=(4, 4, 5),
            stop=(7, 8),
            samples=((0, 3), (1, 3))[: 1 + i % 2],
            **{"temperature": 1.0, "seed": i, **kinds[i % len(kinds)]},
        )
        for i in range(len(logits))
    ]
    on_device = logits.cuda()
    expected, expected_logprobs = sample(logits, rows)
    sample(on_device, rows)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            drawn = draw(on_device, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [w for w in waits if "synchroniz" in str(w.message)]
    tokens, logprobs, unsound = drawn.read(drawn.packed.cpu().numpy())
    assert tokens == expected
    assert not unsound
    assert logprobs is not None
    for found, wanted in zip(logprobs, expected_logprobs):
        for a, b in zip(found, wanted):
            if a is not None and b is not None:
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
    assert sample(on_device, [row()] * len(rows))[0] == [[t] for t in logits.argmax(-1).tolist()]


def test_plain_greedy_does_no_more_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look at the logits: no copy of them is edited, nothing is weighed."""
    for name in ("_edited", "_weights", "_draws"):
        monkeypatch.setattr(sampling, name, None)
    logits = noise(64, 4096)
    rows = [row(output=(1, 2, 3)) for _ in range(64)]
    assert sample(logits, rows)[0] == [[token] for token in logits.argmax(dim=-1).tolist()]
