"""``--max-prefills-per-step``: of how many prompts one step computes a part."""

from __future__ import annotations

import dataclasses

import pytest

from manylora.protocol.commands import Command, RunStep
from tests.sim.test_replay import COSTS, config_of, replay_of, request, stream_of


def most_prefills(limit: int | None, batch_tokens: int) -> tuple[int, float]:
    """The most prompts in one step, and the mean time to the first token, of eight that come at once."""
    prompts = stream_of(*(request(1.0, place, 0, place % 5, 12, 6) for place in range(8)))
    config = dataclasses.replace(
        config_of(num_pages=200), max_batch_tokens=batch_tokens, max_prefills_per_step=limit
    )
    found = 0

    def watch(now: float, command: Command) -> None:
        nonlocal found
        if isinstance(command, RunStep):
            found = max(found, sum(row.num_tokens > 1 for row in command.rows))

    replay = replay_of(stream=prompts, config=config, costs=COSTS, watch=watch)
    replay.run()
    assert all(outcome.num_tokens == 6 for outcome in replay.outcomes)
    return found, sum(outcome.ttft_s for outcome in replay.outcomes) / 8


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_step_has_more_prompts_and_all_are_served(limit: int) -> None:
    assert most_prefills(limit, 64)[0] == limit


def test_without_a_limit_the_tokens_decide() -> None:
    found, ttft_s = most_prefills(None, 128)
    assert found == 7, "the first came alone"
    assert most_prefills(7, 128) == (found, ttft_s)
    assert most_prefills(1, 128)[1] > ttft_s


def test_chunks_of_one_prompt_follow_each_other() -> None:
    assert most_prefills(1, 9)[0] == 1
