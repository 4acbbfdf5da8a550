"""Logits that are not finite: the request fails, nobody else does, and nothing of its KV is found again."""

from __future__ import annotations

import pytest
from manylora_lab.baselines import ALL_CACHE_POLICIES

from manylora.protocol.commands import Admitted, Emit, Finish
from manylora.protocol.events import Abort
from tests.policy.rig import PAGE, Rig

PROMPT = list(range(3 * PAGE))


def end_unsound(rig: Rig, *requests: str) -> None:
    """End the oldest step; the logits of these requests' rows are not finite."""
    ids = {rig.replica._requests.by_id[name].sequences[0].id for name in requests}
    done = rig.device.finish_step(ok=True)
    done.unsound = tuple(sequence for sequence, _ in done.tokens if sequence in ids)
    rig.feed(done)


def num_cached(rig: Rig, name: str) -> int:
    (admitted,) = [c for c in rig.commands if isinstance(c, Admitted) and c.request == name]
    return admitted.num_cached


@pytest.mark.parametrize("policy", ALL_CACHE_POLICIES)
def test_an_unsound_row_fails_its_request_alone(policy: str) -> None:
    rig = Rig(policy)
    rig.ask("bad", 0, PROMPT, max_tokens=5)
    rig.ask("good", 0, [9, *PROMPT], max_tokens=5)
    rig.end_step()
    for _ in range(3):
        end_unsound(rig, *{"bad"} & rig.replica._requests.by_id.keys())
    rig.settle()
    ended = rig.ends["bad"]
    assert isinstance(ended, Finish)
    assert ended.reason == "error"
    assert ended.error is not None
    assert ended.error.status == 500
    assert "not finite" in ended.error.message
    assert rig.ends["good"].reason == "length"
    assert len(rig.tokens["good"]) == 5
    rig.check_answer("good")


def test_what_an_unsound_sequence_computed_is_not_found_again() -> None:
    rig = Rig()
    rig.ask("healthy", 0, PROMPT)
    rig.settle()
    rig.ask("bad", 0, [*PROMPT, *PROMPT], max_tokens=50)
    assert num_cached(rig, "bad") == 3 * PAGE
    for _ in range(4):
        rig.end_step()
    end_unsound(rig, "bad")
    assert not any(isinstance(c, Emit) and c.request == "bad" for c in rig.commands[-3:])
    rig.ask("again", 0, [*PROMPT, *PROMPT], max_tokens=2)
    assert num_cached(rig, "again") == 0
    rig.settle()
    rig.check_answer("again")


def test_what_others_use_is_dropped_when_the_last_of_them_fails() -> None:
    """One found what another had computed before its own first token was drawn."""
    rig = Rig()
    long = [*PROMPT, *range(100, 160)]  # more than a step computes
    rig.ask("first", 0, long, max_tokens=2)
    rig.ask("second", 0, [*long[:40], 7], max_tokens=4)
    rig.end_step()
    assert num_cached(rig, "second") == 40
    end_unsound(rig, "first")
    assert rig.ends["first"].reason == "error"
    rig.ask("third", 0, [*long[:41], 8], max_tokens=4)
    end_unsound(rig, "second")
    assert num_cached(rig, "third") == 0
    rig.settle()
    rig.check_answer("third")


def test_a_prompt_aborted_before_its_first_token_does_not_poison_for_ever() -> None:
    """Its pages stay in the tree, for nothing has shown what they hold; the first who reads them drops them."""
    rig = Rig()
    long = [*PROMPT, *range(100, 160)]
    rig.ask("aborted", 0, long, max_tokens=2)
    rig.end_step()
    rig.feed(Abort("aborted"))
    rig.settle()
    rig.ask("reads it", 0, long, max_tokens=2)
    assert num_cached(rig, "reads it") > 0
    end_unsound(rig, "reads it")
    rig.ask("again", 0, long, max_tokens=2)
    assert num_cached(rig, "again") == 0


@pytest.mark.parametrize("policy", ["manylora", "static-lru", "s-lora"])
def test_with_two_steps_in_flight(policy: str) -> None:
    rig = Rig(policy, pipeline_depth=2)
    rig.ask("bad", 0, PROMPT, max_tokens=9)
    rig.ask("good", 0, [9, *PROMPT], max_tokens=9)
    rig.end_step()
    end_unsound(rig, *{"bad"} & rig.replica._requests.by_id.keys())
    while "bad" in rig.replica._requests.by_id:
        end_unsound(rig, "bad")
    rig.settle()
    assert rig.ends["bad"].reason == "error"
    rig.check_answer("good")
    rig.ask("again", 0, PROMPT, max_tokens=2)
    assert num_cached(rig, "again") == 0
    rig.settle()
    rig.check_answer("again")
