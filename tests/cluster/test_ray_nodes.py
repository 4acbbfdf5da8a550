"""What is refused of Ray's nodes, and what a replica gets of the one that it is placed on."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from manylora._version import VERSION
from manylora.cluster.ray_driver import RayNodeFacts, RayNodes, allowed, measure
from manylora.config.declaring import ConfigError
from manylora.config.sections import EngineSettings, ModelSettings
from tests.e2e.process import MODEL

GIB = 2**30
FIRST = RayNodeFacts("a", "10.0.0.1", 0, VERSION, "digest", 16 * GIB, 8)
SECOND = msgspec.structs.replace(FIRST, id="b", address="10.0.0.2", free_bytes=8 * GIB, threads=4)


def nodes(
    *found: RayNodeFacts,
    device: Literal["auto", "cpu", "cuda"] = "cpu",
    most: int = 4,
    per_gpu: int = 1,
    ranks: int = 1,
) -> RayNodes:
    settings = EngineSettings(model=ModelSettings(MODEL, device=device), tensor_parallel_size=ranks)
    return RayNodes(found, "digest", settings, most=most, at_start=2, per_gpu=per_gpu)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "another"}, "the model on node 10.0.0.2 is another one"),
        ({"model": "?no such directory"}, "node 10.0.0.2 cannot serve the model: no such directory"),
        ({"version": "0.0.1"}, "node 10.0.0.2 has manylora 0.0.1"),
    ],
)
def test_nodes_that_differ_are_refused(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        nodes(FIRST, msgspec.structs.replace(SECOND, **changes))


def test_gpus_are_counted() -> None:
    one = msgspec.structs.replace(FIRST, gpus=1)
    with pytest.raises(ConfigError, match="2 replicas need 2 GPUs, and Ray has 1"):
        nodes(one, device="cuda")
    found = nodes(one, msgspec.structs.replace(SECOND, gpus=3), device="auto")
    assert (found.most, found.gpus_each) == (4, 1)
    with pytest.raises(ConfigError, match="--device-pool"):
        nodes(one, device="cuda", per_gpu=2)


def test_the_gpus_of_a_replica_are_of_one_node() -> None:
    three, four = (msgspec.structs.replace(SECOND, id=str(count), gpus=count) for count in (3, 4))
    found = nodes(three, four, device="cuda", ranks=2)
    assert (found.most, found.gpus_each) == (3, 2)
    with pytest.raises(ConfigError, match="2 replicas need 8 GPUs, 4 of one node each, and Ray has 7"):
        nodes(three, four, device="cuda", ranks=4)
    with pytest.raises(ConfigError, match="--replicas-per-gpu"):
        nodes(four, device="cuda", ranks=2, per_gpu=2)


def test_a_replica_gets_its_share_of_its_node() -> None:
    found = nodes(FIRST, SECOND)
    assert (found.most, found.gpus_each) == (None, 0)
    settings = EngineSettings(model=ModelSettings(MODEL))
    for node, pool, threads in (("a", GIB, 2), ("b", GIB // 2, 1), ("unknown", GIB // 2, 1)):
        given, count = found.share(settings, node, 0)
        assert (given.cache.device_pool, given.cache.host_pool, count) == (pool, pool, threads)


def test_a_node_is_measured() -> None:
    found = measure(FIRST, MODEL, "/")
    assert (found.version, len(found.model)) == (VERSION, 64)
    assert measure(FIRST, "none", "/").model.startswith("?")


@pytest.mark.parametrize(
    ("address", "has_token", "is_insecure", "is_refused"),
    [
        ("127.0.0.1", False, False, False),
        ("10.0.0.1", True, False, False),
        ("10.0.0.1", False, True, False),
        ("10.0.0.1", False, False, True),
    ],
)
def test_a_ray_without_a_token(address: str, has_token: bool, is_insecure: bool, is_refused: bool) -> None:
    assert allowed(address, has_token=has_token, is_insecure=is_insecure) is not is_refused
