"""Whether answers to the same requests are equal, up to rounding.

What runs in the same steps changes last digits, and two logits, or the first two of a draw's race, may lie that
close together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from manylora_lab.bench.race import behind

from manylora import LLM, SamplingParams
from manylora.executor.sampling import SampledRow, _edited, _weights
from manylora.text.tokenizer import Tokenizer
from tests.cluster.process import ADAPTERS, Answer, Cluster, Json, TooLate
from tests.e2e.process import BASE, MODEL
from tests.parity.reference import Reference

CLOSE = 2e-4


def assert_equal(before: Sequence[Answer], after: Sequence[Answer]) -> int:
    """Nothing of an answer tells what happened to the cluster, but for partings by rounding; how many of these
    there are."""
    parted: list[_Parting] = []
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        if one.content == other.content:
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-3), number
            continue
        assert other.error == one.error, (number, other.error)
        assert other.choices.keys() == one.choices.keys(), number
        found = []
        for index, choice in one.choices.items():
            texts = choice["text"], other.choices[index]["text"]
            if texts[0] != texts[1]:
                found.append(_Parting(one.body, index, *texts))
            else:
                assert other.choices[index]["end"] == choice["end"], number
        assert found, (number, one.content, other.content)
        parted += found
    if parted:
        _judge(parted)
    assert len(parted) <= max(1, len(before) // 100), len(parted)
    return len(parted)


def assert_undisturbed(
    cluster: Cluster,
    expected: Sequence[Answer],
    act: Callable[[], object],
    moved: str,
    again: Callable[[], object],
) -> None:
    """What is done while the same requests run changes no answer, and makes some of them move for this reason.

    It may come when requests have ended, or before any have begun: then once more, after ``again``.
    """
    for _ in range(5):
        before = cluster.moved(moved)
        with contextlib.suppress(TooLate):
            assert_equal(expected, cluster.ask_all([answer.body for answer in expected], act))
            if cluster.moved(moved) > before:
                return
        again()
    raise AssertionError(f"no request moved: {moved}\n{cluster.log}")


@dataclasses.dataclass(frozen=True)
class _Parting:
    body: Json
    index: int
    one: str
    other: str

    @property
    def adapter(self) -> str | None:
        return None if self.body["model"] == BASE else self.body["model"]

    @property
    def params(self) -> SamplingParams:
        body = self.body
        return SamplingParams(
            n=body.get("n", 1), max_tokens=body["max_tokens"], temperature=body["temperature"],
            seed=body["seed"], ignore_eos=body.get("ignore_eos", False),
            frequency_penalty=body.get("frequency_penalty", 0.0),
            presence_penalty=body.get("presence_penalty", 0.0),
        )  # fmt: skip

    @property
    def common(self) -> int:
        """Characters up to where they part."""
        pairs = zip(self.one, self.other)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _judge(parted: Sequence[_Parting]) -> None:
    """Ask the model itself about the place of each. Its own answers, from which the tokens are, may part from both
    before that place: it is asked for all at once, and for each alone."""
    folders = {folder.name: folder for folder in ADAPTERS.iterdir()}
    named = {name: str(folder) for name, folder in folders.items()}
    with LLM(MODEL, named, device="cpu", dtype="float32", device_pool="48MiB", host_pool="16MiB") as llm:
        asked = [(each.body["prompt"], each.params, each.adapter) for each in parted]
        prompts, params, adapters = map(list, zip(*asked, strict=True))
        together = llm.generate(prompts, params, adapters)
        alone = [llm.generate([prompt], [each], [adapter])[0] for prompt, each, adapter in asked]
        eos_ids = tuple(llm.info.eos_ids)
    tokenizer, reference = Tokenizer.from_folder(MODEL), Reference(Path(MODEL), folders)
    for each, outputs in zip(parted, zip(together, alone, strict=True), strict=True):
        found = (
            _is_close(reference, each, list(output.prompt_token_ids), tokens, place, eos_ids)
            for output in outputs
            for tokens in [list(output.outputs[each.index].token_ids)]
            for place in _places(tokenizer, tokens, each.common)
        )
        assert any(found), each


def _places(tokenizer: Tokenizer, tokens: list[int], common: int) -> range:
    """Of the tokens at which texts may part after so many characters: a character may be of several."""
    ends = (len(tokenizer.decode(tokens[: place + 1])) for place in range(len(tokens)))
    parting = next((place for place, end in enumerate(ends) if end > common), len(tokens) - 1)
    return range(max(0, parting - 3), min(parting + 2, len(tokens)))


def _is_close(
    reference: Reference,
    parted: _Parting,
    prompt: list[int],
    tokens: list[int],
    place: int,
    eos_ids: tuple[int, ...],
) -> bool:
    """Whether the token at that place might as well have been another."""
    params, known = parted.params, tokens[:place]
    logits = reference.next_logits([*prompt, *known], parted.adapter)[None]
    stop_ids = () if params.ignore_eos else eos_ids
    row = SampledRow(params, np.array(prompt), np.array(known), stop_ids, ((parted.index, place),))
    edited = _edited(logits, [row], None)
    if not params.temperature:
        best = edited[0].topk(2).values
        return bool(best[0] - best[1] < CLOSE)
    weights = _weights(edited, [params])[0].double().numpy()
    second = np.partition(behind(weights, params.seed or 0, parted.index, place), 1)[1]
    return bool(second < CLOSE)
