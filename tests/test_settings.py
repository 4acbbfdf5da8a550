"""Settings of the cache from each place that a user may write them: flags, a config file, keyword arguments."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import manylora.main
from manylora.cli import main
from manylora.config.declaring import ConfigError
from manylora.config.policy import CACHE_POLICIES, CACHE_SETTINGS, CacheConfig, PolicyConfig
from manylora.config.queueing import QueueConfig
from manylora.config.sections import CacheSettings, EngineSettings, HttpSettings
from manylora.flags import build_settings
from manylora.llm import LLM, AsyncLLM
from tests.e2e.process import command, environment

GIVEN: dict[str, Any] = {
    "host_pool": "2GiB", "device_pool": "1GiB", "cache_policy": "fastlibra",
    "cache_set": ["tau_s=2.5", "window_s=30", "high_mark=0.9", "low_mark=0.5", "interval_s=0.2"],
    "trace": "decisions.txt",
}  # fmt: skip
EXPECTED = CacheSettings(
    device_pool=2**30,
    host_pool=2**31,
    policy=CacheConfig(
        "fastlibra", tau_s=2.5, window_s=30.0, interval_s=0.2, high_mark=0.9, low_mark=0.5, trace=True
    ),
    settings=tuple(GIVEN["cache_set"]),
    trace="decisions.txt",
)


class Reached(Exception):
    """The settings came where an engine would be built from them."""

    def __init__(self, settings: EngineSettings, http: HttpSettings | None = None) -> None:
        super().__init__()
        self.trusts_templates = http is not None and http.trust_request_chat_template
        self.cache = settings.cache
        self.merge = settings.scheduler.merge


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is served; this process keeps its signal handlers."""

    def reached(settings: EngineSettings, *others: Any) -> None:
        raise Reached(settings, *others[:1])

    monkeypatch.setattr(manylora.main, "run_server", reached)
    monkeypatch.setattr(manylora.main, "build_driver", reached)
    monkeypatch.setattr(manylora.main, "load_texts", lambda model: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def options(values: dict[str, Any]) -> list[str]:
    lists = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    given = [(name, value) for name, values in lists.items() for value in values]
    return [word for name, value in given for word in ("--" + name.replace("_", "-"), str(value))]


def served(*args: str) -> CacheSettings:
    with pytest.raises(Reached) as reached:
        main(["serve", "model", *args])
    return reached.value.cache


@pytest.mark.usefixtures("stopped")
def test_flags_reach_the_engine() -> None:
    assert served(*options(GIVEN)) == EXPECTED
    assert served() == CacheSettings()
    assert served("--host-pool", "0").host_pool == 0
    assert served("--cache-policy", "static-lru", "--page-tokens", "16").page_tokens == 16
    for policy in CACHE_POLICIES:
        assert served("--cache-policy", policy).policy.policy == policy


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("dashes", [False, True])
def test_a_config_file_reaches_the_engine_and_the_command_line_wins(tmp_path: Path, dashes: bool) -> None:
    file = tmp_path / "serve.json"
    file.write_text(json.dumps({k.replace("_", "-") if dashes else k: v for k, v in GIVEN.items()}))
    assert served("--config", str(file)) == EXPECTED
    assert served("--config", str(file), "--cache-set", "tau_s=7").policy == CacheConfig(
        "fastlibra", tau_s=7.0, trace=True
    )


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_keyword_arguments_reach_the_engine(kind: type[LLM] | type[AsyncLLM]) -> None:
    with pytest.raises(Reached) as reached:
        kind("model", **GIVEN)
    assert reached.value.cache == EXPECTED


BAD = [
    ("cache_policy", "mru"), ("cache_set", "window_s=0"), ("cache_set", {"window_s": "x"}), ("cache_set", 3),
    ("host_pool", "10XB"), ("host_pool", -5), ("trace", 5),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")) as refused:
        build_settings({"model": "m", name: value})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("policy", "text", "says"), [
    ("fastlibra", "tau_s=0", "--cache-set tau_s must be more than 0, got 0.0"),
    ("fastlibra", "tau_s=inf", "--cache-set tau_s must be finite, got inf"),
    ("fastlibra", "tau_s=soon", "--cache-set tau_s must be a number, got 'soon'"),
    ("fastlibra", "high_mark=0", "--cache-set high_mark must be more than 0, got 0.0"),
    ("fastlibra", "high_mark=0.5", "--cache-set the marks must satisfy 0 < low_mark <= high_mark <= 1"),
    ("fastlibra", "tau_s", "--cache-set must be KEY=VALUE, got 'tau_s'"),
    ("static-lru", "adapter_share=nan", "--cache-set adapter_share must be more than 0, got nan"),
    (
        "manylora", "tau_s=1",
        "--cache-set tau_s=1: manylora has no setting 'tau_s': it has high_mark, low_mark, interval_s, window_s",
    ),
    ("lru", "window_s=1", "--cache-set window_s=1: lru has no setting 'window_s': it has none"),
])  # fmt: skip
def test_numbers_that_a_cache_policy_refuses(policy: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_settings({"model": "m", "cache_policy": policy, "cache_set": [text]})
    assert str(refused.value) == says


@pytest.mark.parametrize("policy", CACHE_POLICIES)
def test_a_cache_policy_has_its_own_numbers(policy: str) -> None:
    """And one from elsewhere may read all."""
    values: dict[str, Any] = {
        "high_mark": 0.9,
        "low_mark": 0.5,
        "interval_s": 0.2,
        "tau_s": 2.0,
        "window_s": 9.0,
    }
    values["adapter_share"] = 0.3
    for name, wanted in ((policy, CACHE_SETTINGS[policy]), ("a.b:C", tuple(values))):
        given = {key: values[key] for key in wanted}
        found = build_settings({"model": "m", "cache_policy": name, "cache_set": given})[0].cache.policy
        assert found == CacheConfig(name, **given)


@pytest.mark.parametrize("wrong", [
    {"policy": "mru"}, {"tau_s": 0.0}, {"tau_s": float("nan")}, {"window_s": -1.0}, {"interval_s": 0.0},
    {"adapter_share": 1.0}, {"adapter_share": float("nan")}, {"high_mark": 1.1}, {"low_mark": 0.0},
    {"low_mark": 0.96, "high_mark": 0.95},
], ids=str)  # fmt: skip
def test_the_caches_own_checks(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CacheConfig(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"num_host_pages": -1}, {"page_bytes": 0}, {"max_batch_tokens": 7}], ids=str
)
def test_the_policys_own_checks(wrong: dict[str, int]) -> None:
    fine: dict[str, Any] = {
        "num_pages": 9, "page_tokens": 4, "max_model_len": 64, "max_num_seqs": 8, "max_batch_tokens": 16
    }  # fmt: skip
    with pytest.raises(ConfigError):
        PolicyConfig(**{**fine, **wrong})


def test_a_reader_that_has_seen_enough_is_no_trouble() -> None:
    process = subprocess.Popen(
        command("workload", "list"),
        env=environment(PYTHONUNBUFFERED=""),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()  # before it has imported what it prints with
    assert process.communicate()[1] == b""
    assert process.returncode == 1


def test_a_journal_may_go_on_in_parts() -> None:
    engine, _ = build_settings({"model": "m", "journal": "j", "journal_rotate": "64KiB"})
    assert (engine.journal, engine.journal_part_bytes) == ("j", 2**16)
    assert build_settings({"model": "m", "journal": "j"})[0].journal_part_bytes is None
    for given, says in (
        ({"journal_rotate": "1MiB"}, "--journal-rotate needs --journal"),
        ({"journal": "j", "journal_rotate": 4095}, "--journal-rotate must be at least 4096 bytes, got 4095"),
        ({"journal": "j", "journal_rotate": "much"}, "--journal-rotate: 'much' is not a size"),
    ):
        with pytest.raises(ConfigError, match=says):
            build_settings({"model": "m", **given})


def test_orders_of_the_queue_that_cannot_work() -> None:
    """Each needs what it is about; one line each."""
    for given, says in (
        ({"fairness": "vtc", "fair_by": "key"}, "--fair-by key needs API keys: give --api-key"),
        ({"fair_weights": "1,1,0"}, "--fair-weights needs --fairness vtc"),
        ({"fair_share": "a=2"}, "--fair-share needs --fairness vtc"),
        ({"priority_age": 3}, "--priority-age needs --scheduling-policy priority"),
        ({"priority_floor": -3}, "--priority-floor needs --scheduling-policy priority"),
        (
            {"fairness": "vtc", "fair_by": "key", "api_key": "k", "fair_share": "french=2"},
            "--fair-share names a key by its place, from 0, got 'french'",
        ),
        ({"fairness": "vtc", "fair_share": ["a=2", "a=3"]}, "--fair-share names 'a' twice"),
        ({"scheduling_policy": "sjf"}, "--scheduling-policy must be one of fcfs, priority, got 'sjf'"),
    ):
        with pytest.raises(ConfigError) as refused:
            build_settings({"model": "m", **given})
        assert str(refused.value) == says


def test_merging_that_cannot_work() -> None:
    for given, says in (
        (
            {"merge": "always"},
            "--merge must be one of unmerged, dlora, manylora, or a baseline of manylora-lab (pip install "
            "manylora-lab), got 'always'",
        ),
        ({"merge_copy": "host"}, "--merge-copy needs --merge dlora or manylora"),
        ({"merge": "dlora", "merge_minority": "wait"}, "--merge-minority needs --merge manylora"),
        ({"merge": "manylora", "merge_alpha": 2}, "--merge-alpha needs --merge dlora"),
        ({"merge": "dlora", "merge_alpha": 0.5}, "--merge-alpha (0.5) must be above --merge-beta (0.556)"),
        ({"merge": "dlora", "merge_mul": "nan"}, "--merge-mul must be more than 1, got nan"),
    ):
        with pytest.raises(ConfigError) as refused:
            build_settings({"model": "m", **given})
        assert str(refused.value) == says


@pytest.mark.usefixtures("stopped")
def test_a_setting_that_is_on_or_off(tmp_path: Path) -> None:
    """A flag without a value; true or false in a file."""
    file = tmp_path / "serve.yaml"
    for text, is_on in (("", False), ("trust-request-chat-template: true", True)):
        file.write_text(text)
        with pytest.raises(Reached) as reached:
            main(["serve", "model", "--config", str(file)])
        assert reached.value.trusts_templates is is_on
    with pytest.raises(Reached) as reached:
        main(["serve", "model", "--trust-request-chat-template"])
    assert reached.value.trusts_templates


def test_a_share_for_a_client_that_is_not_there_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    queue = QueueConfig(fairness="vtc", fair_share=("german=2", "french=0.5"))
    manylora.main.warn_of_shares(queue, {"german"})
    assert [record.message for record in caplog.records] == [
        "--fair-share: there is no adapter 'french' at the moment"
    ]
