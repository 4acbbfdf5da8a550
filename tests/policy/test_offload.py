"""Whether copies to the host pay: by what earlier ones brought back."""

from manylora.policy.cache_policies import OffloadWhereItPays
from manylora.policy.tree import Node
from manylora.policy.value import Rates
from manylora.types import BASE
from tests.policy.rig import PAGE

A_PAGE = Node(BASE, Node(BASE, None, b"", 0), b"", 1)
USUAL = 5.0
"""A moment that is not of a trial; 16.0 is."""


def rates_of(page_in_s: float, prefill_token_s: float) -> Rates:
    rates = Rates(page_bytes=2**20, page_tokens=PAGE)
    rates.saw_copy(1, page_in_s, to_device=True)
    rates.saw_copy(1, page_in_s, to_device=False)
    for _ in range(200):
        rates.saw_step(1, 101, 100 * prefill_token_s)
    return rates


def test_copies_that_never_come_back_are_made_no_more_but_for_trials() -> None:
    offload = OffloadWhereItPays(rates_of(page_in_s=0.003, prefill_token_s=0.001))
    assert offload.pays(A_PAGE, USUAL), "nobody knows yet"
    for _ in range(5000):
        offload.offloaded()
    # One in 40 is believed to come back and to save 1 ms then: less than a twentieth of the 3 ms of its write.
    assert not offload.pays(A_PAGE, USUAL)
    assert offload.pays(A_PAGE, 16.0)
    offload.came_back(1000)
    assert offload.pays(A_PAGE, USUAL)


def test_what_was_seen_long_ago_is_forgotten() -> None:
    offload = OffloadWhereItPays(rates_of(0.001, 0.001))
    for _ in range(100_000):
        offload.offloaded()
    offload.came_back(2000)
    assert offload.pays(A_PAGE, USUAL), "a fifth or more of those that are remembered"


def test_copies_slower_than_computing_never_pay() -> None:
    offload = OffloadWhereItPays(rates_of(page_in_s=0.1, prefill_token_s=0.001))
    offload.came_back(10_000)
    assert not offload.pays(A_PAGE, USUAL)
    assert not offload.pays(A_PAGE, 16.0)


def test_before_any_copy_came_they_are_believed_to_take_nothing() -> None:
    rates = Rates(page_bytes=2**20, page_tokens=PAGE)
    for _ in range(200):
        rates.saw_step(1, 101, 1e-4)
    assert rates.page_in_s > rates.page_prefill_s(1), "assumed, and not believed"
    offload = OffloadWhereItPays(rates)
    assert offload.pays(A_PAGE, USUAL)
    assert rates.weigh_copying((1,)) >= 0
    for _ in range(5000):
        offload.offloaded()
    assert not offload.pays(A_PAGE, USUAL), "nothing comes back"
    offload.came_back(5000)
    rates.saw_copy(1, 2 * PAGE * 1e-6, to_device=True)
    assert not offload.pays(A_PAGE, USUAL), "slow"
    assert rates.weigh_copying((1,)) < 0


def test_a_copy_may_take_longer_than_computing_where_that_holds_up_others() -> None:
    rates = rates_of(page_in_s=1.5 * PAGE * 0.001, prefill_token_s=0.001)
    assert rates.weigh_copying((1,)) < 0
    for _ in range(200):
        rates.saw_step(8, 8, 1e-3)
    assert rates.weigh_copying((1,)) >= 0
    for _ in range(200):
        rates.saw_copy(1, 2.5 * PAGE * 0.001, to_device=True)
    assert rates.weigh_copying((1,)) < 0, "many others count no more than one"
