"""The invariants of a router, checked over the whole state: O(everything)."""

from __future__ import annotations

import math

from manylora.router.fleet import Fleet
from manylora.router.queue import Quarantine
from manylora.router.replicas import Learnt, ReplicaLoad, ReplicaState, kind_key, learnt_of
from manylora.router.requests import LiveRequest
from manylora.router.router import Router
from manylora.types import BASE


def check(router: Router) -> None:
    """Raise AssertionError where an invariant is broken."""
    fleet, requests = router.fleet, router.requests
    for name, request in requests.items():
        assert request.id == name
        check_owner(router, request)
    assert router.num_waiting == sum(request.replica is None for request in requests.values())
    owned = sum(len(replica.requests) for replica in fleet.up.values())
    assert owned == sum(request.replica is not None for request in requests.values())
    for place, replica in fleet.up.items():
        assert replica.id == place
        assert replica.is_up
        check_accounts(replica)
        check_homes(fleet, replica)
    check_indexes(fleet)
    check_kinds(fleet)
    check_quarantine(router._quarantine, fleet)


def check_owner(router: Router, request: LiveRequest) -> None:
    """A live request is in exactly one place: a queue, aside, or on a replica that is up."""
    fleet = router.fleet
    is_queued = (request.id in router._queue.waiting) + (request.id in router._quarantine.waiting)
    is_aside = router._stranded.get(request.id) is request
    is_owned = request.replica is not None
    assert is_queued + is_aside + is_owned == 1, f"{request.id} has {is_queued + is_aside + is_owned} owners"
    if request.replica is not None:
        owner = fleet.up[request.replica]
        assert owner.requests.get(request.id) is request
        assert fleet.fits_ever(owner, request), f"{request.id} can never be served by {owner.id}"
        assert request.attempt >= 1
    else:
        assert not request.is_withdrawing
        assert request.target is None
    assert not is_aside or not fleet.is_any_right(request)
    assert request.num_generated == sum(request.positions)


def check_quarantine(quarantine: Quarantine, fleet: Fleet) -> None:
    """A replica is reserved for at most one request, and gets no other."""
    reserved = set(quarantine._reserved.values())
    assert len(reserved) == len(quarantine._reserved), "one replica is kept for two requests"
    for replica in fleet.up.values():
        assert replica.is_reserved == (replica.id in reserved)
        assert not (replica.is_reserved and replica.is_open)


def check_accounts(replica: ReplicaState) -> None:
    """What a replica's counts add up to, and that what it has not seen is what it still has to get."""
    live = list(replica.requests.values())
    assert replica.rows == sum(request.samples for request in live)
    assert replica.rank_sum == sum(request.rank for request in live)
    assert replica.rank_max == max((request.rank for request in live), default=0)
    assert sum(replica.ranks.values()) == len(live)
    adapters = {request.adapter: request.adapter_pages for request in live if request.adapter != BASE}
    assert set(replica.adapters) == set(adapters)
    assert replica.adapter_pages == sum(adapters.values())
    numbers = list(replica.unseen)
    assert numbers == sorted(numbers)
    for number, taken in replica.unseen.items():
        request = replica.requests[taken.request]
        assert (request.number, request.samples) == (number, taken.rows)
    unseen, gone, report = replica.unseen.values(), replica.gone, replica.report
    pages = sum(taken.pages for taken in unseen)
    assert replica.spare_pages == report.free_pages - pages
    assert replica.waiting_tokens == report.waiting_tokens + sum(taken.waiting_tokens for taken in unseen)
    # Some of what has gone is in the report no more.
    freed = replica.free_pages - replica.spare_pages - report.reclaimable_pages
    assert 0 <= freed <= sum(taken.pages for taken in gone)
    freed = report.kv_tokens + sum(taken.kv_tokens for taken in unseen) - replica.kv_tokens
    assert 0 <= freed <= sum(taken.kv_tokens for taken in gone)


def check_homes(fleet: Fleet, replica: ReplicaState) -> None:
    """The index of homes knows of every adapter that the replica has, or gets."""
    for adapter in {*replica.residency, *replica.adapters}:
        assert replica.id in fleet.homes(adapter), f"adapter {adapter} of {replica.id} has no home"


def check_kinds(fleet: Fleet) -> None:
    """A kind has the mean of what its replicas have learnt, and they have what their reports say."""
    for kind in {replica.kind for replica in fleet.up.values()}:
        alike = [replica for replica in fleet.up.values() if replica.kind is kind]
        told = alike[0].facts
        for replica in alike:
            assert kind_key(replica.facts) == kind_key(told)
        for place, name in enumerate(Learnt._fields):
            learnt = [seconds for replica in alike if (seconds := learnt_of(replica.report)[place])]
            expected = sum(learnt) / len(learnt) if learnt else getattr(told, name)
            assert math.isclose(getattr(kind, name), expected, rel_tol=1e-6), name


def check_indexes(fleet: Fleet) -> None:
    """Indexes hold what is there, and nothing else."""
    is_open = sorted(replica.id for replica in fleet.up.values() if replica.is_open)
    assert fleet.open_ids == is_open
    loads = [replica.load for replica in fleet.up.values()]
    assert fleet.load == tuple(map(sum, zip(*loads))) if loads else fleet.load == ReplicaLoad()
    by_load = sorted((replica.rows, replica.id) for replica in fleet.up.values() if replica.is_open)
    assert list(fleet.by_load.ascending()) == [replica for _, replica in by_load]
    for adapter in set(fleet.adapters).union(*(replica.lacks for replica in fleet.up.values())):
        lacking = {replica.id for replica in fleet.up.values() if adapter in replica.lacks}
        assert fleet.lacking(adapter) == lacking
    for adapter, homes in fleet._homes.items():
        assert homes == tuple(sorted(set(homes)))
        for home in homes:
            state = fleet.up[home]
            assert adapter in state.residency or adapter in state.adapters, f"{home} has no adapter {adapter}"
