"""Requests that a replica refuses, what bounds those that name no number of tokens, and policies that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from manylora.config.declaring import ConfigError
from manylora.policy.cache_policies import find_cache
from manylora.policy.value import Rates
from manylora.protocol.commands import Reject
from manylora.protocol.events import Arrive
from manylora.router.policies.policy import find_router
from manylora.types import BASE, Request, SamplingParams
from tests.policy.rig import Rig


def refused(rig: Rig, prompt: tuple[int, ...], **params: int | None) -> Reject:
    commands = rig.feed(Arrive(Request("r", BASE, prompt, SamplingParams(seed=0, **params))))  # type: ignore[arg-type]
    (reject,) = [command for command in commands if isinstance(command, Reject)]
    return reject


def test_an_empty_prompt() -> None:
    error = refused(Rig(), (), max_tokens=1).error
    assert (error.status, error.message, error.param) == (400, "the prompt is empty", "prompt")


@pytest.mark.parametrize(("num_prompt", "max_tokens", "param"), [(190, 11, "max_tokens"), (200, 1, "prompt")])
def test_more_than_the_context(num_prompt: int, max_tokens: int, param: str) -> None:
    error = refused(Rig(num_pages=100), tuple(range(num_prompt)), max_tokens=max_tokens).error
    assert error.status == 400
    assert error.param == param
    assert f"you requested {num_prompt + max_tokens} tokens ({num_prompt} in the prompt" in error.message


@pytest.mark.parametrize(
    ("num_pages", "expected"), [(100, 200 - 3), (5, (5 * 4 + 1) - 3), (8, (8 * 4 + 1) - 3)]
)
def test_without_a_number_a_reply_is_as_long_as_the_context_and_the_pool_allow(
    num_pages: int, expected: int
) -> None:
    rig = Rig("lru", num_pages=num_pages, num_host_pages=0)
    rig.feed(Arrive(Request("r", BASE, (1, 2, 3), SamplingParams(max_tokens=None, seed=0))))
    rig.settle()
    assert rig.ends["r"].reason == "length"
    assert len(rig.tokens["r"]) == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:Policy", "cannot be imported: No module named"),
        ("manylora.policy.replica:NoSuchPolicy", "cannot be imported"),
        ("manylora.policy.replica:Replica", "is no subclass of manylora's CachePolicy"),
        ("manylora.policy.replica:MAX_FAILED_COPIES", "is no subclass of manylora's CachePolicy"),
    ],
)
def test_a_policy_of_ones_own_that_is_none(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_cache(name)


@pytest.mark.parametrize("find", [find_cache, find_router])
def test_a_module_that_cannot_be_read_is_one_line(
    find: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_unread.py").write_text("class Mine(\n")
    (tmp_path / "own_raising.py").write_text("raise ValueError('no table')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, why in (("own_unread", "was never closed"), ("own_raising", "no table")):
        with pytest.raises(ConfigError, match=f"cannot be imported: .*{why}") as caught:
            find(f"{module}:Mine")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("num_pages", "seconds"), [(0, 1.0), (4, 0.0), (4, -1.0)])
def test_a_copy_that_says_nothing_of_the_link_is_not_learnt_from(num_pages: int, seconds: float) -> None:
    rates = Rig().replica._residency.rates
    assert isinstance(rates, Rates)
    before = rates.page_in_s, rates.page_out_s
    rates.saw_copy(num_pages, seconds, True)
    assert (rates.page_in_s, rates.page_out_s) == before
