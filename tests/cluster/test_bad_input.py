"""What a start with replicas refuses: one line on stderr and exit code 2, before a model is loaded."""

from __future__ import annotations

import dataclasses
import importlib.util
import socket
import subprocess
from pathlib import Path

import pytest
from manylora_lab.bench.profile_report import describe
from manylora_lab.pricing.caraserve import merged_step_s
from manylora_lab.pricing.fit import fit_profile
from manylora_lab.pricing.ranks import RankLine, RankLines
from manylora_lab.sim.shipped import find_profile

from manylora.cluster.ray_launcher import check_ray
from manylora.config.cluster import ClusterOptions
from manylora.config.declaring import ConfigError
from manylora.config.routing import CaraServeParameters, read_parameters
from manylora.flags import split_cluster
from manylora.router.router import Router
from tests.e2e.process import MODEL, environment, free_port, lines_of, run_cli


def refused(*args: str, **env: str) -> str:
    """The line."""
    result: subprocess.CompletedProcess[str] = run_cli("serve", MODEL, "--port", "0", *args, **env)
    assert result.returncode == 2, result.stderr
    lines = [line for line in lines_of(result.stderr) if " INFO " not in line]
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"replicas": "0"}, "--replicas must be"),
        ({"replicas": "-1"}, "--replicas must be"),
        ({"replicas": "1000000000"}, "--replicas must be"),
        ({"replicas": "two"}, "--replicas"),
        ({"replicas": "2", "router": "best"}, "--router must be one of"),
        ({"replicas": "2", "min_replicas": "3", "max_replicas": "2"}, "--min-replicas 3 is above"),
        ({"replicas": "4", "max_replicas": "3"}, "--replicas 4 is above"),
        ({"replicas": "2", "lease": "0"}, "--lease must be"),
        ({"replicas": "2", "max_attempts": "0"}, "--max-attempts must be"),
        ({"replicas": "2", "launcher": "k8s"}, "--launcher"),
        ({"replicas": "2", "cluster_host": "0.0.0.0"}, "--cluster-host must be"),
        ({"replicas": "2", "cluster_host": "here"}, "--cluster-host must be"),
        ({"replicas": "2", "insecure_ray": True}, "--insecure-ray needs"),
        ({"replicas": "2", "ray_address": "auto"}, "--ray-address needs --launcher ray"),
        ({"replicas": "2", "router_set": ["punica.max_batch=3"]}, "is not of --router"),
        ({"replicas": "2", "data_parallel_size": "3"}, "one setting"),
    ],
)
def test_settings_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        split_cluster(given)


def test_one_replica_alone_is_no_cluster() -> None:
    assert split_cluster({"replicas": "1", "port": "1"}) == (None, [{"port": "1"}])
    assert split_cluster({}) == (None, [{}])
    found, rest = split_cluster({"replicas": 2}, {"router": "punica", "port": "1"})
    assert found == ClusterOptions(replicas=2, router="punica")
    assert rest == [{}, {"port": "1"}]


def test_names_of_vllm() -> None:
    given = {"data_parallel_size": "3", "api_server_count": "2", "data_parallel_backend": "mp"}
    assert split_cluster(given)[0] == ClusterOptions(replicas=3, frontends=2)


def test_a_start_says_one_line() -> None:
    assert "--replicas must be" in refused("--replicas", "1000000000")


RANKS = ("--replicas", "2", "--tensor-parallel-size")


def test_what_does_not_go_together() -> None:
    line = refused(*RANKS, "2", "--cold-start", "cpu")
    assert "--cold-start cpu does not work with --tensor-parallel-size above 1" in line


@pytest.mark.long
def test_ranks_that_do_not_fit_the_model() -> None:
    assert "--tensor-parallel-size 3 does not fit the model" in refused(*RANKS, "3", "--device", "cpu")


RAY = ("--replicas", "2", "--launcher", "ray")


def test_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs ray: pip install"):
        check_ray()


def test_another_version_of_ray(tmp_path: Path) -> None:
    about = tmp_path / "ray-2.59.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.59.0\n")
    paths = f"{tmp_path}:{environment()['PYTHONPATH']}"
    assert "and 2.59.0 is installed" in refused(*RAY, "--ray-address", "local", PYTHONPATH=paths)


def test_a_ray_that_cannot_be_reached() -> None:
    with socket.socket() as sock:  # bound, and nobody listens
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        assert f"Ray at {address} cannot be reached" in refused(*RAY, "--ray-address", address)


@pytest.mark.long
def test_a_ray_that_says_nothing() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        assert f"Ray at {address} does not answer" in refused(*RAY, "--ray-address", address)


@pytest.mark.long
def test_too_few_gpus_of_ray() -> None:
    args = (*RAY, "--ray-address", "local", "--device", "cuda")
    assert "2 replicas need 2 GPUs, and Ray has 0" in refused(*args)


def test_a_router_without_its_settings() -> None:
    line = refused("--replicas", "2", "--router", "caraserve")
    assert "router caraserve: decode_slope_s must be given: manylora profile prints what to give" in line
    assert "no_such_module" in refused("--replicas", "2", "--router", "no_such_module:Policy")


def test_caraserve_takes_what_a_profile_prints() -> None:
    lines = RankLines(
        RankLine(1e-4, 5e-3, 0.9, 20), RankLine(2e-4, 6e-3, 0.9, 20), RankLine(1e-3, 5e-3, 0.9, 9)
    )
    profile = dataclasses.replace(find_profile("cpu-demo"), ranks=lines)
    costs = fit_profile(profile)
    for kernel, slope_s in (("bgmv", 1e-4), ("mbgmv", 2e-4)):
        (line,) = (
            line for line in describe(profile, costs).splitlines() if f"caraserve.kernel={kernel} " in line
        )
        words = tuple(word for word in line.split() if word.startswith("caraserve."))
        found = ClusterOptions(2, "caraserve", words).router_config()
        parameters = read_parameters("caraserve", CaraServeParameters, found.settings)
        assert (parameters.decode_slope_s, parameters.prefill_base_s) == (slope_s, 5e-3)
        assert parameters.slo_s == pytest.approx(1.5 * merged_step_s(costs))
        Router(found)


def test_a_taken_port() -> None:
    port = free_port()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.listen()
        result = run_cli("serve", MODEL, "--port", str(port), "--replicas", "2")
    assert result.returncode == 2
    assert "cannot listen" in result.stderr


def test_a_folder_that_others_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir(mode=0o700)
    secret = folder / "secret"
    secret.write_text("x" * 64)
    secret.chmod(0o644)
    assert "can be read by others" in refused("--replicas", "2", "--cluster-dir", str(folder))


def test_too_few_gpus() -> None:
    assert "GPUs" in refused("--replicas", "2", "--device", "cuda", CUDA_VISIBLE_DEVICES="0")
