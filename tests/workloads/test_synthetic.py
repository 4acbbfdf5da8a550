"""Streams made up: their parts, S-LoRA's defaults, seeds."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from random import Random

import pytest
from manylora_lab.workloads.stream import Stream
from manylora_lab.workloads.synthetic import Synthetic, empirical, parse_length, synthetic

from manylora.config.declaring import ConfigError


def made(parts: Synthetic, seed: int = 0, **options: object) -> Stream:
    load = {"rate": 20.0, "num_adapters": 10, "duration_s": 500.0} | options
    return synthetic(parts, seed=seed, **load)  # type: ignore[arg-type]


def test_s_lora_s_defaults() -> None:
    stream = made(Synthetic())
    assert len(stream.requests) == pytest.approx(10_000, abs=400)
    for lengths in ([r.new_tokens for r in stream.requests], [r.output_tokens for r in stream.requests]):
        assert (min(lengths), max(lengths)) == (8, 512)
        assert statistics.fmean(lengths) == pytest.approx(260, abs=6)
    counts = Counter(request.adapter for request in stream.requests)
    assert all(abs(counts[number] - 1000) < 150 for number in range(10))
    assert stream.ranks == (8,) * 10
    assert len({piece.identity for r in stream.requests for piece in r.prompt}) == len(stream.requests)
    assert "seed 0" in stream.notes[0]


def test_a_seed_repeats_a_stream_and_parts_do_not_move_each_other() -> None:
    stream = made(Synthetic())
    assert stream == made(Synthetic())
    assert stream != made(Synthetic(), seed=1)
    bursty = made(Synthetic(arrivals="gamma(3)"))
    shared = min(len(stream.requests), len(bursty.requests))
    assert shared > 5000
    for before, after in itertools.islice(zip(stream.requests, bursty.requests), shared):
        assert before.adapter == after.adapter
        assert (before.new_tokens, before.output_tokens) == (after.new_tokens, after.output_tokens)


def test_each_adapter_with_its_own_arrivals() -> None:
    stream = made(Synthetic(arrivals="even", popularity="zipf(1)"), num_adapters=2, each=True)
    of_first = [r.arrival_s for r in stream.requests if r.adapter == 0]
    of_second = [r.arrival_s for r in stream.requests if r.adapter == 1]
    # 20 requests a second are 40/3 and 20/3.
    assert len(of_first) == pytest.approx(500 * 40 / 3, abs=1)
    assert len(of_second) == pytest.approx(500 * 20 / 3, abs=1)
    assert of_second[1] - of_second[0] == pytest.approx(3 / 20)
    assert made(Synthetic(popularity="identical"), each=True).requests[0].adapter == 0


def test_lengths() -> None:
    dice = Random(0)
    assert {parse_length("128")(dice) for _ in range(9)} == {128}
    assert {parse_length("constant(7)")(dice) for _ in range(9)} == {7}
    assert {parse_length("uniform(3,5)")(dice) for _ in range(99)} == {3, 4, 5}
    drawn = [parse_length("lognormal(200,1.5)")(dice) for _ in range(100_000)]
    assert statistics.fmean(drawn) == pytest.approx(200, rel=0.03)
    assert statistics.pstdev(drawn) / statistics.fmean(drawn) == pytest.approx(1.5, rel=0.1)
    assert min(parse_length("lognormal(1,5)")(dice) for _ in range(99)) == 1


def test_recorded_lengths_stay_together() -> None:
    pairs = [(10, 1), (20, 2), (30, 3)]
    stream = made(Synthetic(), lengths=empirical(pairs))
    found = Counter((r.new_tokens, r.output_tokens) for r in stream.requests)
    assert set(found) == set(pairs)
    assert min(found.values()) > len(stream.requests) / 3 - 250
    with pytest.raises(ConfigError, match="no recorded lengths"):
        empirical([])


@pytest.mark.parametrize(
    "text",
    ["0", "uniform(5,3)", "uniform(1.5,3)", "uniform(0,3)", "lognormal(5)", "x", "1e99", "constant(-1)"],
)
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_length(text)


def test_nobody_comes() -> None:
    with pytest.raises(ConfigError, match="no requests"):
        made(Synthetic(), rate=0.001, duration_s=1.0)
