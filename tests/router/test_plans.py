"""dLoRA's placement and plans: by hand, and against trying everything."""

from __future__ import annotations

import itertools
import random

import pytest

from manylora.protocol.routing import ProgrammeReplica, ProgrammeRequest, Solve
from manylora.router.policies.dlora_plan import (
    PlanState,
    greedy_plan,
    improve,
    is_solution,
    plan_copies,
    round_shares,
)

A, B, C, D = 1, 2, 3, 4
SIZES = {A: 10, B: 10, C: 10, D: 10}
LOADS = {A: 2.0, B: 1.0, C: 1.0, D: 0.5}
FREE = (100, 60, 40)


def test_burst_tolerance_by_hand() -> None:
    """Three replicas, four adapters, mean requests of 10 pages.

    At first A tolerates 100 / 10 / 2 = 5, B 10, C 6, D 8. A copy of A goes to the second replica, which has more
    room than the third: A 7.5, C 5, which is not less than 5. A copy of C goes to the first: A 7, B 9, C 14, D 8.
    A copy of A on the third would bring D to 30 / 10 / 0.5 = 6, below 7: it is not made.
    """
    holders = {A: [0], B: [0], C: [1], D: [2]}
    copies = plan_copies(FREE, (20, 20, 20), holders, SIZES, LOADS, 10.0)
    assert copies == [(A, 1), (C, 0)]


def test_copies_stop_at_the_reserve() -> None:
    """Without room on the second replica A is copied to the third, where D then tolerates 6, more than A's 5
    before; then A has 6.5, C 6 and D 6, of which C comes first and is copied to the first replica. Then A and D
    have 6, of which A comes first, and the only replica without it has no room."""
    holders = {A: [0], B: [0], C: [1], D: [2]}
    assert plan_copies(FREE, (20, 9, 20), holders, SIZES, LOADS, 10.0) == [(A, 2), (C, 0)]


def test_adapters_that_are_nowhere_come_first_the_busiest_of_them() -> None:
    copies = plan_copies(FREE, (10, 10, 10), {B: [1]}, SIZES, LOADS, 10.0)
    assert copies == [(A, 0), (C, 1), (D, 2)]
    assert plan_copies(FREE, (10, 0, 0), {B: [1]}, SIZES, LOADS, 10.0) == [(A, 0)]
    assert plan_copies(FREE, (10, 10, 10), {}, SIZES, {}, 10.0) == []


def test_an_undone_copy_leaves_no_trace() -> None:
    """The plan is that of asking for each copy anew, whatever was tried."""
    draw = random.Random(1)
    for _ in range(200):
        count = draw.randint(1, 4)
        free = [draw.randint(10, 100) for _ in range(count)]
        reserve = [draw.randint(0, 40) for _ in range(count)]
        sizes = {adapter: draw.randint(1, 12) for adapter in range(1, draw.randint(2, 7))}
        loads = {adapter: draw.choice([0.1, 0.5, 1.0, 3.0]) for adapter in sizes}
        holders = {adapter: draw.sample(range(count), draw.randint(0, count)) for adapter in sizes}
        expected = by_the_book(free, reserve, holders, sizes, loads, 7.0)
        assert plan_copies(free, reserve, holders, sizes, loads, 7.0) == expected


def by_the_book(
    free: list[int],
    reserve: list[int],
    holders: dict[int, list[int]],
    sizes: dict[int, int],
    loads: dict[int, float],
    request_pages: float,
) -> list[tuple[int, int]]:
    """The same with everything computed anew each time."""
    free, reserve = list(free), list(reserve)
    on = {adapter: set(holders[adapter]) for adapter in loads}
    copies: list[tuple[int, int]] = []

    def least() -> tuple[float, float, int]:
        def entry(adapter: int) -> tuple[float, float, int]:
            peak = sum(max(free[place], 0) for place in on[adapter]) / request_pages
            return peak / loads[adapter], -loads[adapter], adapter

        return min(map(entry, loads))

    while True:
        before, _, adapter = least()
        places = [p for p in range(len(free)) if p not in on[adapter] and sizes[adapter] <= reserve[p]]
        if not places:
            return copies
        place = max(places, key=lambda each: (free[each], -each))
        on[adapter].add(place)
        free[place] -= sizes[adapter]
        if least()[0] < before:
            return copies
        reserve[place] -= sizes[adapter]
        copies.append((adapter, place))


# ---------------------------------------------------------------- plans


def problem_of(seed: int, num_requests: int | None = None, num_replicas: int | None = None) -> Solve:
    draw = random.Random(seed)
    count = num_replicas or draw.randint(2, 3)
    replicas = tuple(ProgrammeReplica(10 + place, draw.randint(5, 60), 0.05) for place in range(count))
    requests = tuple(
        ProgrammeRequest(
            f"r{number}", 1, draw.randrange(count), draw.randint(1, 3), draw.randint(1, 20),
            draw.choice([0.5, 1.0, 2.0, 5.0]), draw.choice([0.05, 0.3]),
        )
        for number in range(num_requests or draw.randint(1, 6))
    )  # fmt: skip
    return Solve(1, replicas, requests, ((1, 2), (2, 5), (3, 9)), 0.05)


def value_by_hand(problem: Solve, plan: tuple[int, ...]) -> float:
    """The programme as it is written."""
    sizes = dict(problem.adapters)
    ends = []
    for place, replica in enumerate(problem.replicas):
        here = [each for each, where in zip(problem.requests, plan) if where == place]
        adapters = {each.adapter for each in here}
        pages = sum(each.pages for each in here) + sum(sizes[each] for each in adapters)
        run_s = sum(each.run_s + (each.move_s if each.source != place else 0.0) for each in here)
        ends.append(run_s + max(pages - replica.pages, 0) * replica.page_s + problem.eta_s * len(adapters))
    return max(ends)


def best_value(problem: Solve) -> tuple[float, tuple[int, ...]]:
    plans = itertools.product(range(len(problem.replicas)), repeat=len(problem.requests))
    return min((value_by_hand(problem, plan), plan) for plan in plans)


def test_the_value_of_a_plan_is_that_of_the_programme() -> None:
    for seed in range(100):
        problem, draw = problem_of(seed), random.Random(seed)
        places = range(len(problem.replicas))
        state = PlanState(problem, [each.source for each in problem.requests])
        for _ in range(5):
            request, place = draw.randrange(len(problem.requests)), draw.choice(places)
            source = state.plan[request]
            without_s = state.finish_s(source, request)
            with_s = state.finish_s(place, request) if place != source else None
            state.move(request, place)
            assert state.value_s() == pytest.approx(value_by_hand(problem, tuple(state.plan)))
            if with_s is not None:
                assert state.finish_s(source) == pytest.approx(without_s)
                assert state.finish_s(place) == pytest.approx(with_s)


def test_a_greedy_plan_against_trying_all() -> None:
    """Never better than the best, never worse than leaving all as it is, and seldom much worse than the best."""
    ratios = []
    for seed in range(150):
        problem = problem_of(seed)
        best_s, _ = best_value(problem)
        here = tuple(each.source for each in problem.requests)
        value_s = value_by_hand(problem, tuple(greedy_plan(problem)))
        assert best_s - 1e-9 <= value_s <= value_by_hand(problem, here) + 1e-9
        ratios.append(value_s / best_s)
    assert sum(ratios) / len(ratios) < 1.05
    assert max(ratios) < 1.6


def test_rounding_keeps_a_whole_solution_and_comes_near_the_best_from_halves() -> None:
    ratios = []
    for seed in range(150):
        problem = problem_of(seed)
        best_s, best = best_value(problem)
        count = len(problem.replicas)
        whole = [[float(place == where) for place in range(count)] for where in best]
        assert value_by_hand(problem, tuple(round_shares(problem, whole))) == pytest.approx(best_s)
        halves = [[1 / count] * count for _ in best]
        ratios.append(value_by_hand(problem, tuple(round_shares(problem, halves))) / best_s)
    assert sum(ratios) / len(ratios) < 1.06


def test_equal_shares_do_not_all_go_to_one_replica() -> None:
    requests = tuple(ProgrammeRequest(f"r{n}", 1, n % 2, 1, 1, 1.0, 0.0) for n in range(10))
    problem = Solve(1, (ProgrammeReplica(0, 99, 0.1), ProgrammeReplica(1, 99, 0.1)), requests, ((1, 1),), 0.0)
    plan = round_shares(problem, [(0.5, 0.5)] * 10)
    assert sorted(plan) == [0] * 5 + [1] * 5
    state = PlanState(problem, plan)
    assert state.value_s() == pytest.approx(5.0)
    # Argmax alone would have sent all ten to the first.
    assert PlanState(problem, [0] * 10).value_s() == pytest.approx(10.0)


def test_a_plan_is_improved_or_kept() -> None:
    for seed in range(20):
        problem = problem_of(seed, 40, 4 if seed % 2 else 3)
        start = [random.Random(seed).randrange(len(problem.replicas)) for _ in problem.requests]
        better = improve(problem, start)
        assert value_by_hand(problem, tuple(better)) <= value_by_hand(problem, tuple(start)) + 1e-9
        assert better != start


def test_shares_must_fit_the_problem() -> None:
    problem = problem_of(1, 3, 2)
    assert is_solution(problem, [(1.0, 0.0)] * 3)
    assert not is_solution(problem, [(1.0, 0.0)] * 2)
    assert not is_solution(problem, [(1.0, 0.0, 0.0)] * 3)
    assert not is_solution(problem, [])
