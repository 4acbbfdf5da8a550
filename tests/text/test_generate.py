"""Text from an engine: stop strings, stop tokens, the end of a stream that nobody reads on."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import tempfile
from pathlib import Path

import pytest

from manylora.engine.client import EngineDead, GenerationRequest
from manylora.text.generate import GenerationFailed, TextDelta, TextOutput, TextStream, collect
from manylora.text.prompts import encode_texts, fit_params
from manylora.text.tokenizer import Tokenizer
from manylora.types import InvalidRequest, SamplingParams
from tests.server.fakes import EOS, FakeEngine
from tests.text import made


@functools.cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.from_folder(made.layout_5(Path(folder)))


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def request(**params: object) -> GenerationRequest:
    return GenerationRequest("r", (5, 6), SamplingParams(**params))  # type: ignore[arg-type]


def run(text: str | list[int], per_step: int = 1, **params: object) -> tuple[list[TextOutput], FakeEngine]:
    tokens = ids(text) if isinstance(text, str) else text
    engine = FakeEngine(lambda _, sample: tokens, tokens_per_step=per_step)
    made_request = request(max_tokens=len(tokens), **params)
    stream = TextStream(engine, tokenizer(), made_request)
    return asyncio.run(collect(stream, made_request.params.n)), engine


@pytest.mark.parametrize("per_step", [1, 3, 100])
def test_plain_text(per_step: int) -> None:
    text = made.TEXTS[3]
    (output,), engine = run(text, per_step)
    assert output.text == text
    assert output.token_ids == ids(text)
    assert output.finish_reason == "length"
    assert engine.running == {}
    assert engine.aborts == []


@pytest.mark.parametrize("per_step", [1, 2, 100])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string(per_step: int, include: bool) -> None:
    text = "one two three STOP four five six seven eight nine"
    (output,), engine = run(text, per_step, stop="STOP", include_stop_str_in_output=include)
    assert output.text == ("one two three STOP" if include else "one two three ")
    assert (output.finish_reason, output.stop_reason) == ("stop", "STOP")
    # Tokens end with the one that completes the string, however far the engine ran ahead.
    assert tokenizer().decode(output.token_ids).rstrip() == "one two three STOP"
    assert engine.running == {}
    if per_step < 100:
        assert engine.aborts == [("r", 0, "stop")]


def test_a_possible_stop_string_is_shown_once_it_is_none() -> None:
    (output,), _ = run("a ## b ##", stop=["###"])
    assert output.text == "a ## b ##"
    assert output.finish_reason == "length"


def test_min_tokens_hides_early_text_from_stop_strings() -> None:
    text = "xx xx xx xx"
    tokens = ids(text)
    (output,), _ = run(text, stop="x", min_tokens=len(tokens) - 1)
    assert len(output.token_ids) == len(tokens)
    assert output.text.startswith("xx xx")


@pytest.mark.parametrize("include", [False, True])
def test_eos_is_a_token_but_not_text(include: bool) -> None:
    (output,), _ = run(
        [*ids("done"), EOS, *ids("more")],
        skip_special_tokens=False,
        include_stop_str_in_output=include,
    )
    assert output.text == ("done<|eos|>" if include else "done")
    assert output.token_ids == [*ids("done"), EOS]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_ignored_eos_is_skipped_as_special() -> None:
    (output,), _ = run([*ids("a"), EOS, *ids("b")], ignore_eos=True)
    assert (output.text, len(output.token_ids)) == ("ab", 3)


def test_stop_token_is_named() -> None:
    tokens = ids("stop here")
    (output,), _ = run(tokens, stop_token_ids=[tokens[-1]])
    assert output.stop_reason == tokens[-1]
    assert output.text == tokenizer().decode(tokens[:-1])


def test_samples_end_on_their_own() -> None:
    texts = ["short END and much more text here", "a longer one that never stops"]
    engine = FakeEngine(lambda _, sample: ids(texts[sample]))
    outputs = asyncio.run(collect(TextStream(engine, tokenizer(), request(n=2, stop="END")), 2))
    assert [output.text for output in outputs] == ["short ", texts[1]]
    assert engine.aborts == [("r", 0, "stop")]


def test_logprobs_stay_beside_their_tokens() -> None:
    (output,), _ = run("one two STOP three", 100, stop="STOP", logprobs=2)
    assert [entry.token for entry in output.logprobs] == output.token_ids


@pytest.mark.parametrize("prompt", [(5,), (5, 6)])
@pytest.mark.parametrize("per_step", [1, 100])
def test_a_prompts_logprobs_are_kept_through_later_deltas(prompt: tuple[int, ...], per_step: int) -> None:
    """Also where a stop string cuts the only delta, and where there is nothing to say of the prompt."""
    engine = FakeEngine(lambda *_: ids("one two STOP three"), tokens_per_step=per_step)
    asked = GenerationRequest("r", prompt, SamplingParams(stop="STOP", prompt_logprobs=1))
    (output,) = asyncio.run(collect(TextStream(engine, tokenizer(), asked), 1))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt) - 1


def test_failure_and_death() -> None:
    engine = FakeEngine()
    refused = GenerationRequest("r", (1,), SamplingParams(), adapter="gone")
    with pytest.raises(GenerationFailed) as caught:
        asyncio.run(collect(TextStream(engine, tokenizer(), refused), 1))
    assert caught.value.error.status == 404
    engine.die()
    with pytest.raises(EngineDead):
        TextStream(engine, tokenizer(), request())


def test_submits_before_it_is_read_and_aborts_when_closed() -> None:
    async def scenario() -> None:
        engine = FakeEngine(delay_s=10)
        stream = TextStream(engine, tokenizer(), request())
        assert list(engine.running) == ["r"]
        await stream.aclose()
        await stream.aclose()
        assert engine.running == {}
        assert [delta async for delta in stream] == []

    asyncio.run(scenario())


def test_cancelled_collect_leaves_nothing_running() -> None:
    async def scenario() -> None:
        engine = FakeEngine(delay_s=10)
        task = asyncio.create_task(collect(TextStream(engine, tokenizer(), request()), 1))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.running == {}

    asyncio.run(scenario())


def test_without_a_tokenizer_there_are_ids_only() -> None:
    async def scenario() -> list[TextDelta]:
        return [delta async for delta in TextStream(FakeEngine(), None, request(max_tokens=3))]

    deltas = asyncio.run(scenario())
    assert [len(delta.token_ids) for delta in deltas] == [1, 1, 1]
    assert not any(delta.text for delta in deltas)
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        TextStream(FakeEngine(), None, request(stop="x"))


INFO = FakeEngine().info


def test_fit_params() -> None:
    params = SamplingParams(max_tokens=16)
    assert fit_params([1], params, INFO, is_max_tokens_explicit=True) is params
    fitted = fit_params([1] * 250, params, INFO, is_max_tokens_explicit=False)
    assert fitted.max_tokens == 6
    with pytest.raises(InvalidRequest, match=r"length is 256 tokens\. However, you requested 266"):
        fit_params([1] * 250, params, INFO, is_max_tokens_explicit=True)
    with pytest.raises(InvalidRequest, match="maximum context length is 256"):
        fit_params([1] * 256, params, INFO, is_max_tokens_explicit=False)


def test_where_the_pool_sets_the_limit_a_refusal_says_pages() -> None:
    info = dataclasses.replace(INFO, max_model_len=160, num_pages=10, page_tokens=16)
    says = "needs 13 pages but the pool has 10"
    with pytest.raises(InvalidRequest, match=says):
        fit_params([1] * 200, SamplingParams(), info, is_max_tokens_explicit=False)
    with pytest.raises(InvalidRequest, match=says):
        fit_params([1] * 100, SamplingParams(max_tokens=100), info, is_max_tokens_explicit=True)
    text = "x" * 200 * tokenizer().longest_token_chars
    with pytest.raises(InvalidRequest, match=says):
        asyncio.run(encode_texts(tokenizer(), [text], info=info))
    with pytest.raises(InvalidRequest) as fits:
        fit_params([1] * 256, SamplingParams(), INFO, is_max_tokens_explicit=False)
    assert "pages" not in str(fits.value)


@pytest.mark.parametrize("prompt", [[], [-1], [420], [10**30], [True], ["a"], [1.0]])
def test_fit_params_refuses_prompts_that_are_no_token_ids(prompt: list[int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        fit_params(prompt, SamplingParams(), INFO, is_max_tokens_explicit=False)
    assert caught.value.param == "prompt"


def test_fit_params_shrinks_numbers_that_mean_no_more() -> None:
    params = SamplingParams(max_tokens=None, min_tokens=10**30, top_k=10**30)
    fitted = fit_params([1] * 6, params, INFO, is_max_tokens_explicit=False)
    assert (fitted.min_tokens, fitted.top_k, fitted.max_tokens) == (250, 0, None)


@pytest.mark.parametrize("params", [{"stop_token_ids": [420]}, {"logit_bias": {-1: 1.0}}])
def test_fit_params_checks_other_ids(params: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="not in the vocabulary"):
        fit_params([1], SamplingParams(**params), INFO, is_max_tokens_explicit=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5),
        ("stop", {"a"}),
        ("stop_token_ids", 5),
        ("logit_bias", 5),
        ("logit_bias", [1, 2]),
        ("logit_bias", [(1, 2, 3)]),
        ("logit_bias", "ab"),
    ],
)
def test_parameters_of_the_wrong_type_are_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(**{name: value})
    assert caught.value.param == name
