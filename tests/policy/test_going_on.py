"""Requests that come with the tokens that another replica has drawn (``Arrive.resume``), at their edges."""

from __future__ import annotations

import pytest

from manylora.protocol.commands import Finish, Reject
from manylora.protocol.events import Abort, Arrive
from manylora.types import BASE, Request, SamplingParams
from tests.policy.rig import PAGE, Rig

STOP = 7


def request(n: int = 2, max_tokens: int = 4, prompt: tuple[int, ...] = (1, 2, 3)) -> Request:
    return Request("r", BASE, prompt, SamplingParams(n=n, max_tokens=max_tokens, seed=0), (STOP,))


@pytest.mark.parametrize(
    ("resume", "closed", "expected"),
    [
        (((1,),), (), "2 samples and tokens of 1"),
        ((), (0, 1), "has an open sample"),
        ((), (2,), "closed ones of its own"),
    ],
)
def test_what_is_not_the_requests_is_refused(
    resume: tuple[tuple[int, ...], ...], closed: tuple[int, ...], expected: str
) -> None:
    rig = Rig()
    rig.feed(Arrive(request(), resume=resume, closed=closed))
    (refusal,) = rig.of(Reject)
    assert refusal.error.status == 400
    assert expected in refusal.error.message


def test_what_has_all_its_tokens_ends_as_it_comes() -> None:
    """One by its length, one by a stop token; the third goes on."""
    rig = Rig()
    rig.feed(Arrive(request(n=3), resume=((1, 2, 3, 4), (1, STOP), (1,))))
    assert [(end.sample, end.reason) for end in rig.of(Finish)] == [(0, "length"), (1, "stop")]
    rig.settle()
    assert [(end.sample, end.reason) for end in rig.of(Finish)][2:] == [(2, "length")]
    assert not rig.replica._requests.by_id


def test_a_sample_that_is_aborted_before_the_prompt_is_computed_does_not_go_on() -> None:
    """The second one waits for the first one's pages when its client goes."""
    rig = Rig()
    rig.feed(Arrive(request(n=3, max_tokens=8, prompt=tuple(range(2 * PAGE))), resume=((), (1,), (1, 2))))
    rig.feed(Abort("r", 1))
    rig.settle()
    ends = [(end.sample, end.reason) for end in rig.of(Finish)]
    assert sorted(ends) == [(0, "length"), (1, "abort"), (2, "length")]
    assert not rig.replica._requests.by_id


def test_where_the_first_is_aborted_the_others_wait_for_its_pages_no_longer() -> None:
    rig = Rig()
    rig.feed(Arrive(request(n=3, max_tokens=8, prompt=tuple(range(2 * PAGE))), resume=((1,), (2,), (1, 2))))
    assert rig.replica._requests.by_id["r"].later
    rig.feed(Abort("r", 0))
    assert not rig.replica._requests.by_id["r"].later
    rig.settle()
    ends = [(end.sample, end.reason) for end in rig.of(Finish)]
    assert sorted(ends) == [(0, "abort"), (1, "length"), (2, "length")]


def test_nothing_is_computed_for_one_whose_samples_have_all_ended() -> None:
    rig = Rig()
    rig.feed(Arrive(request(n=1), resume=((1, 2, 3, 4),)))
    assert [end.reason for end in rig.of(Finish)] == ["length"]
    assert not rig.device.steps
    assert not rig.replica._requests.by_id
