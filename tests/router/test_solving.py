"""dLoRA's programme through HiGHS: against trying everything, the same twice, in a process that may hang or
end."""

from __future__ import annotations

import os
import signal

import highspy
import pytest

from manylora.protocol.events import Timer
from manylora.protocol.routing import Planned, ReplicaUp, Solve, Solved, Withdraw
from manylora.router.policies.dlora_plan import PlanState, greedy_plan, is_solution, round_shares
from manylora.solving import ProgrammeModel, SolverProcess, solve, solving
from tests.router.rig import FACTS, Rig, config_of, of_kind
from tests.router.test_plans import best_value, problem_of, value_by_hand

TINY = 1e-5


def test_whole_requests_are_shared_out_as_by_trying_all() -> None:
    """With x whole and no gap the programme is the definition's: six requests on three replicas at most."""
    for seed in range(60):
        problem = problem_of(seed)
        best_s, _ = best_value(problem)
        model = ProgrammeModel(problem, most_nodes=10**6, least_gap=0.0)
        for request in range(len(problem.requests)):
            for place in range(len(problem.replicas)):
                column = model.share(request, place)
                model.highs.changeColIntegrality(column, highspy.HighsVarType.kInteger)
        solved = model.solve()
        assert solved.bound_s == pytest.approx(best_s, abs=TINY)
        plan = tuple(max(range(len(shares)), key=shares.__getitem__) for shares in solved.shares)
        assert value_by_hand(problem, plan) == pytest.approx(best_s, abs=TINY)


def test_shares_bound_every_plan_and_round_to_a_good_one() -> None:
    ratios = []
    for seed in range(100):
        problem = problem_of(seed)
        best_s, _ = best_value(problem)
        solved = solve(problem)
        assert is_solution(problem, solved.shares)
        assert all(sum(shares) == pytest.approx(1.0, abs=1e-4) for shares in solved.shares)
        assert solved.bound_s <= best_s + TINY
        ratios.append(value_by_hand(problem, tuple(round_shares(problem, solved.shares))) / best_s)
    assert sum(ratios) / len(ratios) < 1.03
    assert max(ratios) < 1.3


def test_large_programmes_are_within_some_percent_of_their_bound() -> None:
    for seed, requests, replicas in ((1, 60, 4), (2, 200, 4), (3, 120, 3)):
        problem = problem_of(seed, requests, replicas)
        solved = solve(problem)
        rounded, greedy = round_shares(problem, solved.shares), greedy_plan(problem)
        value_s = min(value_by_hand(problem, tuple(plan)) for plan in (rounded, greedy))
        assert solved.bound_s - TINY <= value_s <= 1.05 * solved.bound_s


def test_a_process_gives_the_same_answer_each_time() -> None:
    problem = problem_of(7, 50, 4)
    answers = []
    for _ in range(2):
        with solving() as found:
            assert found is not None
            answers += [found(problem), found(problem)]
    assert {(answer.shares, answer.bound_s) for answer in answers} == {
        (answers[0].shares, answers[0].bound_s)
    }
    assert answers[0] == solve(problem)


def test_a_process_that_hangs_or_ends_gives_no_plan_and_the_next_is_another() -> None:
    problem = problem_of(8, 6, 2)
    solver = SolverProcess(wait_s=0.5)
    try:
        assert solver.solve(problem).shares
        assert solver._child is not None
        for number in (signal.SIGSTOP, signal.SIGKILL):
            child = solver._child
            os.kill(child.pid, number)
            assert solver.solve(problem) == Solved(problem.number)
            assert child.returncode is not None
            assert solver.solve(problem).shares, "by another process"
    finally:
        solver.close()
    solver.close()


def overloaded() -> tuple[Rig, Solve]:
    """Replica 0 has eight requests and a long queue, replica 1 nothing; the router tells of its plans."""
    rig = Rig(config_of("dlora", move_cooldown_s=1e-3, trace=True, suspect_s=100.0, lease_s=100.0))
    rig.tell(ReplicaUp(0, 1, FACTS))
    for number in range(8):
        rig.ask(f"r{number}", prompt_tokens=1000, max_tokens=3000)
        rig.accept(f"r{number}")
    rig.tell(ReplicaUp(1, 1, FACTS))
    rig.report(0, waiting_tokens=60_000)
    (problem,) = of_kind(rig.tell(Timer(), at=20.0), Solve)
    return rig, problem


def test_a_plan_is_told_with_its_distance_from_the_bound() -> None:
    rig, problem = overloaded()
    commands = rig.tell(solve(problem))
    (planned,) = of_kind(commands, Planned)
    moves = of_kind(commands, Withdraw)
    assert planned.num_moves == len(moves) > 0
    plan = [each.source for each in problem.requests]
    assert planned.before_s == pytest.approx(PlanState(problem, plan).value_s())
    assert 0 < planned.bound_s - TINY <= planned.value_s < planned.before_s
    rig, problem = overloaded()
    (planned,) = of_kind(rig.tell(Timer(), at=22.0), Planned)
    assert planned.bound_s == 0.0, "no solver has answered"
