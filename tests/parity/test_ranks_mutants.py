"""Wrong cuts that a batch of every kind of adapter must find: each is one line of them that is wrong on all ranks.

The ranks are threads, so that they run what is changed here. No mutant leaves ranks waiting for each other, or
depends on which of them is faster.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from manylora import SamplingParams
from manylora.config import MergeTimes
from manylora.executor.ranked_merging import RankedMerging
from manylora.executor.ranked_sampling import RankedSampling
from manylora.executor.ranks import start
from manylora.kernels.cuts import RankPlace
from manylora.models import decoder
from manylora.models.ranked import RankedEmbedding, RankedLinear
from manylora.models.share import ModelShare
from manylora.policy.merging import state
from tests.parity.conftest import make_bench
from tests.parity.engines import Bench, greedy, random_tokens
from tests.parity.test_samples import sampled
from tests.policy.switching import EveryFewSteps
from tests.policy.test_merging_mutants import Mutant, mutated
from tests.threaded_ranks import RankThread, threaded_ranks

__all__ = ["threaded_ranks"]


class Way(NamedTuple):
    """An engine. ``merge``: adapters are merged in turn, with rows of others beside them."""

    family: str = "ranks-8-4"
    num_ranks: int = 2
    sharding: str = "sharded"
    merge: str = "unmerged"


SHARDED, REPLICATED = Way(), Way(sharding="replicated")
FOUR = Way("ranks-8-2", 4)
MERGED = Way(merge="manylora")
OTHER = "RankPlace((self.place.rank + 1) % self.place.num_ranks, self.place.num_ranks)"
NUM_TOKENS = 4

MUTANTS: list[tuple[Way, Mutant]] = [
    (SHARDED, Mutant(
        "a row linear's bias on every rank", decoder._ranked_linear, "ranked.share.place.rank == 0", "True",
    )),
    (SHARDED, Mutant(
        "a row linear's bias on no rank", decoder._ranked_linear, "ranked.share.place.rank == 0", "False",
    )),
    (SHARDED, Mutant(
        "the slab of B of another rank", ModelShare._row,
        "b_rows=(added,)", f"b_rows=({OTHER}.cut(len(wholes[0])),)",
    )),
    (SHARDED, Mutant(
        "the slab of B at other columns", ModelShare._row, "added=added", "added=range(len(added))",
    )),
    (SHARDED, Mutant(
        "inputs of A of another rank", ModelShare._column,
        "a_columns=read", f"a_columns={OTHER}.cut(len(whole)) if self.is_sharded else read",
    )),
    (REPLICATED, Mutant(
        "B of column linears by equal parts, not by heads", ModelShare._column,
        "b_rows=tuple(outputs)", f"b_rows=tuple({OTHER}.cut(p.out_features) for p in group.projections)",
    )),
    (FOUR, Mutant(
        "another KV head replicated", RankPlace.heads, "self.rank * heads // self.num_ranks", "self.rank % heads",
    )),
    (SHARDED, Mutant(
        "parts that do not come out even begin too early", RankPlace.cut,
        "self.rank * size + min(self.rank, over)", "self.rank * size",
    )),
    (SHARDED, Mutant(
        "up's part of the MLP is another rank's than gate's", ModelShare.linears,
        "self.place.cut(p.out_features, self.unit) for p in",
        f"(self.place if 'gate' in p.module else {OTHER}).cut(p.out_features, self.unit) for p in",
    )),
    (SHARDED, Mutant(
        "logits gathered in another order", RankedSampling._whole,
        "zip(parts, self._vocabs)", "zip(parts[::-1], self._vocabs)",
    )),
    (SHARDED, Mutant(
        "tokens counted from the rank's own first", RankedSampling.greedy,
        "self._vocabs[self._peers.rank].start", "0",
    )),
    (SHARDED, Mutant(
        "what adapters' A give is not added up", RankedLinear._adapted, "if shrunk.values.numel()", "if False",
    )),
    (SHARDED, Mutant(
        "sums of column linears", RankedLinear.__call__, 'self.share.kind == "row"', "True",
    )),
    (REPLICATED, Mutant(
        "a row linear's adapter added after the sum, by every rank", RankedLinear.__call__,
        "y = self._adapted(x, step)",
        "y = self._adapted(x, step); is_row = self.share.kind == 'row'; "
        "y += is_row * (y - step.ops.linear(x, self.weight, self.bias))",
    )),
    (SHARDED, Mutant(
        "the embedding of another rank's token", RankedEmbedding.looked_up,
        "x.masked_fill_(is_other[:, None], 0.0)", "x",
    )),
    (MERGED, Mutant(
        "rows gathered for a switch in another order", RankedMerging._gather,
        "zip(parts, widths, strict=True)", "zip(parts[::-1], widths, strict=True)",
    )),
    (MERGED, Mutant(
        "the other side is gathered for a switch", RankedMerging._gather,
        "whole.write(linear, 1 - side, own.read(part, 1 - side))", "pass",
    )),
]  # fmt: skip


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    made: dict[str, Bench] = {}

    def bench(family: str) -> Bench:
        if family not in made:
            made[family] = make_bench(tmp_path_factory, family)
        return made[family]

    return bench


_DRAWN: dict[str, list[list[int]]] = {}


def run(bench: Bench, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch of every adapter, and draws of the base and of one, which are those of an engine of one rank."""
    ranks: dict[str, Any] = {"tensor_parallel_size": way.num_ranks, "lora_sharding": way.sharding}
    if way.merge != "unmerged":
        ranks |= {"merge": way.merge}
        monkeypatch.setattr(state, "merge_policy", lambda config, times: EveryFewSteps())
        monkeypatch.setattr(start, "measure_merging", lambda *args, steps_wait: MergeTimes(steps_wait))
    names = bench.names
    prompts = [random_tokens(i, 2 + 5 * (i % 4), bench.checkpoint.vocab_size) for i in range(len(names))]
    if way.family not in _DRAWN:
        with bench.llm(["everything"]) as llm:
            _DRAWN[way.family] = draws(llm)
    with bench.llm(**ranks) as llm:
        bench.check(llm.generate(prompts, greedy(NUM_TOKENS), names), NUM_TOKENS)
        assert draws(llm) == _DRAWN[way.family]
        if way.merge != "unmerged":
            assert llm.metrics()['manylora:merge_switches_total{to="merged"}'] > 0


def draws(llm: Any) -> list[list[int]]:
    params: SamplingParams = sampled(NUM_TOKENS, n=2)
    outputs = [llm.generate([[3, 1, 4, 1, 5]], params, name)[0] for name in (None, "everything")]
    return [sample.token_ids for output in outputs for sample in output.outputs]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("way", [SHARDED, REPLICATED, FOUR, MERGED], ids=lambda way: "-".join(map(str, way)))
def test_the_batch_itself_is_right(
    way: Way,
    benches: Callable[[str], Bench],
    threaded_ranks: list[RankThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(benches(way.family), way, monkeypatch)
    assert len(threaded_ranks) == way.num_ranks


@pytest.mark.parametrize(
    ("way", "mutant"), [pytest.param(*it, id=it[1].name.replace(" ", "-")) for it in MUTANTS]
)
def test_it_is_found(
    way: Way,
    mutant: Mutant,
    benches: Callable[[str], Bench],
    threaded_ranks: list[RankThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = benches(way.family)
    *kind, name = mutant.function.__qualname__.split(".")
    module = sys.modules[mutant.function.__module__]
    monkeypatch.setattr(getattr(module, kind[0]) if kind else module, name, mutated(mutant))
    with pytest.raises(AssertionError):
        run(bench, way, monkeypatch)
