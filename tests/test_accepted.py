"""Which values each setting and each sampling parameter takes, and what it makes of them, wherever it is given."""

from __future__ import annotations

import json
import operator
import os
from pathlib import Path
from typing import Any

import pytest

from manylora.config.cold_start import COLD_START_MODES
from manylora.config.declaring import ConfigError
from manylora.config.merging import MERGE_MODES
from manylora.config.policy import CACHE_POLICIES
from manylora.flags import ALL_FLAGS, build_settings, read_config_file
from manylora.models.config import read_model_config
from manylora.models.spec import ModelError
from manylora.server.errors import ApiError
from manylora.server.requests import ChatBody, CompletionBody, _decode, chat_params, completion_params
from manylora.types import InvalidRequest, SamplingParams

NAN, INF = float("nan"), float("inf")
LARGEST = 2**62
KEYS = str(Path(__file__))  # any file with lines that are no comments
HELD_BY = {
    "served_model_name": "model.served_model_names", "adapter": "adapters.adapters",
    "adapter_dir": "adapters.adapter_dir", "host": "host", "port": "port", "device": "model.device",
    "dtype": "model.dtype", "load_format": "model.load_format", "max_model_len": "model.max_model_len",
    "max_num_seqs": "scheduler.max_num_seqs", "max_batch_tokens": "scheduler.max_batch_tokens",
    "admission": "scheduler.admission", "slo_ttft": "scheduler.slo_ttft_s",
    "pipeline_depth": "scheduler.pipeline_depth", "page_tokens": "cache.page_tokens",
    "device_pool": "cache.device_pool", "host_pool": "cache.host_pool", "cuda_graphs": "cuda_graphs",
    "cache_policy": "cache.policy.policy", "cache_set": "cache.settings", "trace": "cache.trace",
    "max_adapter_rank": "adapters.max_adapter_rank", "step_timeout": "step_timeout_s",
    "drain_timeout": "drain_timeout", "allowed_hosts": "allowed_hosts", "api_key": "api_keys",
    "metrics_key": "metrics_key",
    "max_waiting": "max_waiting", "max_connections": "max_connections", "max_body_size": "max_body_size",
    "journal": "journal", "journal_rotate": "journal_part_bytes",
    "scheduling_policy": "scheduler.queue.scheduling_policy",
    "priority_floor": "scheduler.queue.priority_floor", "priority_age": "scheduler.queue.priority_age_s",
    "fairness": "scheduler.queue.fairness", "fair_by": "scheduler.queue.fair_by",
    "fair_weights": "scheduler.queue.fair_weights", "fair_share": "scheduler.queue.fair_share",
    "adapter_batch_limit": "scheduler.queue.adapter_batch_limit",
    "max_prefills_per_step": "scheduler.max_prefills", "kept_share": "scheduler.kept_share",
    "merge": "scheduler.merge.mode", "merge_copy": "scheduler.merge.copy",
    "merge_minority": "scheduler.merge.minority",
    "merge_starve": "scheduler.merge.starve_s", "merge_alpha": "scheduler.merge.alpha",
    "merge_beta": "scheduler.merge.beta", "merge_dec": "scheduler.merge.dec",
    "merge_mul": "scheduler.merge.mul", "merge_window": "scheduler.merge.window",
    "cold_start": "scheduler.cold_start.mode", "cold_start_stall": "scheduler.cold_start.stall",
    "cpu_lora_workers": "scheduler.cold_start.cpu_workers",
    "tensor_parallel_size": "tensor_parallel_size",
    "lora_sharding": "lora_sharding", "seed": "seed", "tokenizer": "model.tokenizer", "uds": "uds",
    "root_path": "root_path", "api_key_file": "api_key_file",
    "gpu_memory_utilization": "cache.gpu_memory_utilization", "chat_template": "model.chat_template",
    "generation_config": "model.generation_config", "trust_request_chat_template": "trust_request_chat_template",
}  # fmt: skip
"""Where each setting comes to lie."""
_DLORA, _MANYLORA = {"merge": "dlora"}, {"merge": "manylora"}
_PRIORITY, _VTC = {"scheduling_policy": "priority"}, {"fairness": "vtc"}
BESIDE: dict[str, dict[str, Any]] = {
    "journal_rotate": {"journal": "j"},
    "priority_floor": _PRIORITY, "priority_age": _PRIORITY,
    "fair_by": {**_VTC, "api_key": "k"}, "fair_weights": _VTC, "fair_share": _VTC,
    "merge_copy": {"merge": "merged"}, "merge_starve": {"merge": "merged"}, "merge_minority": _MANYLORA,
    "merge_alpha": _DLORA, "merge_beta": _DLORA, "merge_dec": _DLORA,
    "merge_mul": _DLORA, "merge_window": _DLORA, "cold_start_stall": {"cold_start": "layerwise"},
    "cpu_lora_workers": {"cold_start": "cpu"},
}  # fmt: skip
"""What a setting is nothing without."""

NO_WHOLE_NUMBERS = [True, 1.0, 1.5, "1.0", "1e3", "x", "", NAN, [1], {}]
COUNTS = {
    "max_model_len": LARGEST, "max_num_seqs": 2**15, "max_batch_tokens": LARGEST, "page_tokens": LARGEST,
    "max_adapter_rank": LARGEST, "max_waiting": LARGEST, "max_connections": LARGEST, "merge_window": LARGEST,
    "max_prefills_per_step": LARGEST, "tensor_parallel_size": LARGEST,
}  # fmt: skip
"""With the most that each may be."""
SIZES = {
    "device_pool": 0,
    "host_pool": 0,
    "max_body_size": 1,
    "journal_rotate": 4096,
}
"""With the least that each may be."""
CHOICES = {
    "device": ("auto", "cpu", "cuda"), "dtype": ("auto", "float32", "float16", "bfloat16"),
    "load_format": ("auto", "dummy"), "cuda_graphs": ("auto", "on", "off"), "metrics_key": ("required", "open"),
    "scheduling_policy": ("fcfs", "priority"), "fairness": ("none", "vtc"), "fair_by": ("adapter", "key"),
    "cold_start": COLD_START_MODES, "lora_sharding": ("auto", "sharded", "replicated"),
    "generation_config": ("auto", "none", "vllm"),
    "merge": MERGE_MODES, "merge_copy": ("auto", "device", "host"), "merge_minority": ("wait", "unmerge"),
}  # fmt: skip
TEXTS = ("host", "trace", "journal", "tokenizer")


def accepted() -> list[tuple[str, Any, Any]]:
    """Setting, what is given, what is held."""
    found: list[tuple[str, Any, Any]] = []
    for name, most in COUNTS.items():
        found += [(name, 1, 1), (name, "1", 1), (name, " 1_000 ", 1000), (name, most, most)]
    for name, least in SIZES.items():
        found += [
            (name, least, least),
            (name, str(least), least),
            (name, " 8 kb ", 8000),
            (name, "8GiB", 2**33),
        ]
        found += [(name, "1.5MiB", 3 * 2**19), (name, LARGEST, LARGEST), (name, 5000.0, 5000)]
    for name, choices in CHOICES.items():
        found += [(name, choice, choice) for choice in choices]
    for name in TEXTS:
        found += [(name, "x", "x"), (name, "", ""), (name, Path("a/b"), "a/b")]
    for name in ("step_timeout", "priority_age"):
        found += [
            (name, 1, 1.0),
            (name, "1e-3", 0.001),
            (name, " 2 ", 2.0),
            (name, True, 1.0),
            (name, 1e300, 1e300),
        ]
    found += [("drain_timeout", 0, 0.0), ("drain_timeout", "2.5", 2.5), ("drain_timeout", False, 0.0)]
    found += [("cache_set", {"window_s": 0.5}, ("window_s=0.5",)), ("cache_set", [], ())]
    found += [("cache_set", ["window_s=1", "low_mark= 0.1 "], ("window_s=1", "low_mark= 0.1 "))]
    found += [("slo_ttft", 0.51, 0.51), ("slo_ttft", "6", 6.0), ("slo_ttft", True, 1.0)]
    found += [("pipeline_depth", depth, int(depth)) for depth in (1, 2, "1", "2")]
    found += [("port", 0, 0), ("port", "80", 80), ("port", 65535, 65535)]
    found += [("cache_policy", policy, policy) for policy in (*CACHE_POLICIES, "a.b:C")]
    found += [("cache_policy", Path("lru"), "lru")]
    found += [("admission", "fcfs", "fcfs"), ("admission", "lcfs", "lcfs"), ("adapter_dir", ".", ".")]
    found += [("dtype", "half", "float16"), ("dtype", "float", "float32")]
    found += [("served_model_name", "x", ("x",)), ("served_model_name", ["x", "y:z"], ("x", "y:z"))]
    found += [
        ("seed", 0, 0),
        ("seed", "-3", -3),
        ("seed", -(2**63), -(2**63)),
        ("seed", 2**64 - 1, 2**64 - 1),
    ]
    found += [("gpu_memory_utilization", "0.9", 0.9), ("gpu_memory_utilization", 1, 1.0)]
    found += [("uds", "x", "x"), ("root_path", "", ""), ("root_path", "/a/b", "/a/b")]
    found += [("api_key_file", KEYS, KEYS), ("api_key_file", Path(KEYS), KEYS)]
    found += [("api_key", "k", ("k",)), ("api_key", ["k", "l"], ("k", "l")), ("api_key", ("k",), ("k",))]
    found += [("allowed_hosts", each, (each,)) for each in ("*", "a.example,*.b.example", "[::1]", "::1")]
    found += [("api_key", [], ()), ("adapter", [], ()), ("adapter", "a=b=c", (("a", "b=c"),))]
    found += [("adapter", {"a": "b"}, (("a", "b"),)), ("adapter", ["a=b", "c=d"], (("a", "b"), ("c", "d")))]
    found += [("priority_floor", 0, 0), ("priority_floor", "-3", -3), ("priority_floor", -(2**31), -(2**31))]
    found += [("fair_weights", text, text) for text in ("1,2,0", "0,1,0", "3,0,9")]
    found += [("fair_share", "a=2", ("a=2",)), ("fair_share", {"a": 0.5, "b=c": 3}, ("a=0.5", "b=c=3"))]
    found += [("trust_request_chat_template", is_on, is_on) for is_on in (True, False)]
    found += [
        ("chat_template", "f", ("f",)),
        ("chat_template", {"a": "f"}, ("a=f",)),
        ("chat_template", [], ()),
    ]
    found += [
        ("merge_alpha", "2", 2.0),
        ("merge_beta", 0.5, 0.5),
        ("merge_dec", 0.1, 0.1),
        ("merge_mul", 2, 2.0),
    ]
    found += [("merge_starve", "1e-3", 0.001), ("merge_starve", 1e300, 1e300)]
    found += [("cold_start_stall", "1", 1.0), ("cold_start_stall", 0.5, 0.5)]
    found += [("cpu_lora_workers", text, text) for text in ("auto", "1", "256")]
    found += [("cpu_lora_workers", 8, "8")]
    found += [("kept_share", 0, 0.0), ("kept_share", "1", 1.0), ("kept_share", 0.25, 0.25)]
    found += [("adapter_batch_limit", 4, "4"), ("adapter_batch_limit", "4:hard", "4:hard")]
    return found


def each(name: str, *values: Any) -> list[tuple[str, Any]]:
    return [(name, value) for value in values]


def refused() -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, most in COUNTS.items():
        found += each(name, *NO_WHOLE_NUMBERS, 0, -1, "-1", most + 1, 10**400, INF)
    for name in ("port", "pipeline_depth"):
        found += each(name, *NO_WHOLE_NUMBERS, -1, 65536, 10**400)
    for name, least in SIZES.items():
        found += each(
            name, least - 1, True, "x", "1XB", "-1", "1e3", "", LARGEST + 1, "9" * 400, NAN, INF, [1]
        )
    for name in (*CHOICES, "admission", "cache_policy"):
        found += each(name, "", "AUTO", "x", "a:b:c", 1, True, [], ["auto"])
    for name in (*TEXTS, "adapter_dir"):
        found += each(name, 1, True, 0.0, ["x"], {})
    for name in ("step_timeout", "slo_ttft", "priority_age"):
        found += each(name, 0, False, -1, "0", "x", "", NAN, INF, 10**400, "nan", "inf", [1], {})
    found += each("drain_timeout", -1, "-0.1", NAN, INF, "x", [])
    found += each(
        "cache_set", "", "window_s", "=1", "tau_s=1", "window_s=", "window_s=0", "low_mark=nan", 1, [1]
    )
    found += each("pipeline_depth", 0, 3) + each("slo_ttft", 0.5) + each("admission", "early-abort")
    found += each("adapter_dir", "no/such/folder")
    found += each("priority_floor", *NO_WHOLE_NUMBERS, 1, "1", -(2**31) - 1, INF)
    found += each("fair_weights", "", "1,2", "1,2,0,0", "1;2;0", "-1,2,0", "0,0,1", "1.5,2,0", 1, [1, 2, 0])
    found += each("fair_share", "a", "a=", "=2", "a=0", "a=-1", "a=nan", "a=0.0001", "a=1e3", ["a=1", "a=2"])
    found += each("adapter_batch_limit", 0, "0", -1, "x", "4:soft", "4:", ":hard", True, 1.0, [4])
    found += each("trust_request_chat_template", "true", "yes", 1, 0, "", [True])
    found += each("chat_template", "", [" "], 1, [1])
    for name in ("merge_alpha", "merge_beta", "merge_starve", "merge_dec", "merge_mul"):
        found += each(name, 0, -1, "0", "x", "", NAN, INF, "nan", [1], {})
    found += each("merge_dec", 1, 1.5) + each("merge_mul", 1, 0.9) + each("merge_beta", 1, 1.1)
    found += each("merge_alpha", 0.556, 0.5)
    found += each("cold_start_stall", 0, -1, "0", 1.01, "x", "", NAN, INF, [1], {})
    found += each("cpu_lora_workers", "", "x", "-1", -1, "257", 257, "1.5", 1.0, True, "AUTO", NAN, [1], {})
    found += each("kept_share", -0.1, 1.01, "x", "", NAN, INF, [1], {})
    found += each("served_model_name", 1, True, [1], ["x", 2])
    found += each("seed", *NO_WHOLE_NUMBERS, -(2**63) - 1, 2**64, 10**400, INF)
    found += each("gpu_memory_utilization", 0, -0.1, 1.01, "x", "", NAN, INF, [1], {})
    found += each("uds", "", " ", 1, ["x"]) + each("root_path", "x", "a/b", 1, ["/x"])
    found += each("api_key_file", "no/such/file", ".", os.devnull, 1, ["x"])
    found += each("allowed_hosts", "", "a,,b", "a:80", "[::1]:80", "http://a", ["a", ""], 1)
    found += each("api_key", "", [" "], 1, [1], ["k", ""], {1: 2}.keys())
    found += each("adapter", "", "a", "a=", "=b", 1, [1], ["a=b", "a=c"], {"": "b"}, {"a": ""})
    return found


def held(name: str, values: dict[str, Any]) -> Any:
    engine, http = build_settings({"model": "m", **BESIDE.get(name, {}), **values})
    path = HELD_BY[name]
    return operator.attrgetter(path)(http if hasattr(http, path.partition(".")[0]) else engine)


def test_each_setting_is_tried() -> None:
    assert HELD_BY.keys() == {flag.name for flag in ALL_FLAGS}
    assert {name for name, *_ in accepted()} == {name for name, _ in refused()} == HELD_BY.keys()


def test_settings_hold_their_defaults() -> None:
    for flag in ALL_FLAGS:
        for values in ({}, {flag.name: None}):
            default = held(flag.name, values)
            lists = (
                "adapter",
                "allowed_hosts",
                "api_key",
                "fair_share",
                "served_model_name",
                "chat_template",
            )
            if flag.name in (*lists, "cache_set", "page_tokens", "cold_start"):
                assert (flag.default, default) in ((None, ()), (None, 16), (None, "wait"))
            else:
                assert default == flag.default
            assert type(default) is type(held(flag.name, {}))


@pytest.mark.parametrize(("name", "given", "expected"), accepted())
def test_a_setting_takes(name: str, given: Any, expected: Any) -> None:
    found = held(name, {name: given})
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(("name", "given"), refused())
def test_a_setting_refuses(name: str, given: Any) -> None:
    with pytest.raises(ConfigError) as error:
        held(name, {name: given})
    assert "\n" not in str(error.value)
    assert name.replace("_", "-") in str(error.value).replace("_", "-")


def test_a_config_file_takes_what_keywords_take(tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    for name, given, expected in accepted():
        if not isinstance(given, Path):
            file.write_text(json.dumps({name.replace("_", "-"): given}))
            assert held(name, read_config_file(str(file))) == expected


NUMBERS: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 0.0, -0.0, 1, 100, 1e-300], [-1e-9, 100.1, INF, -INF]),
    "top_p": ([1, 1.0, 1e-300], [0, 1.0001, -1, INF]),
    "min_p": ([0, 1, 0.5], [-0.1, 1.1, INF]),
    "presence_penalty": ([-2, 2, 0.0], [-2.1, 2.1, INF, -INF]),
    "frequency_penalty": ([-2, 2, 0.0], [-2.1, 2.1, INF, -INF]),
    "repetition_penalty": ([1e-300, 1, 1e30], [0, -1, INF]),
}
INTEGERS: dict[str, tuple[list[Any], list[Any]]] = {
    "n": ([1, 128], [0, 129, -1, 10**30]),
    "min_tokens": ([0, 16], [-1, 17, 10**30]),
    "top_k": ([-1, 0, 1, 10**30], [-2]),
    "max_tokens": ([None, 1, 10**30], [0, -1]),
    "seed": ([None, 0, -(2**63), 2**64 - 1], [-(2**63) - 1, 2**64]),
    "logprobs": ([None, 0, 20], [-1, 21]),
    "prompt_logprobs": ([None, 0, 20], [-1, 21]),
}
SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
NO_NUMBERS: list[Any] = [True, "1", NAN, [], {}, 1j]


def parameters() -> list[tuple[str, Any, Any]]:
    """Name, what is given, what is held."""
    found = [(name, given, given) for name, (good, _) in (NUMBERS | INTEGERS).items() for given in good]
    found = [(name, given, 0 if (name, given) == ("top_k", -1) else held) for name, given, held in found]
    found += [(name, given, given) for name in SWITCHES for given in (True, False)]
    found += [("stop", None, ()), ("stop", (), ()), ("stop", [], ())]
    found += [("stop", "x", ("x",)), ("stop", ["x", "yz"], ("x", "yz")), ("stop", ("x",), ("x",))]
    found += [("stop_token_ids", None, ()), ("stop_token_ids", (), ()), ("stop_token_ids", [], ())]
    found += [("stop_token_ids", [1, 2], (1, 2)), ("stop_token_ids", (-1, 10**30), (-1, 10**30))]
    for given, bias in (
        (None, ()), ({}, ()), ((), ()), ([], ()), ({7: 1, "3": "-2"}, ((3, -2.0), (7, 1.0))),
        ({1: True, 2.0: 100}, ((1, 1.0), (2, 100.0))), ([[5, 1], (2, -100)], ((5, 1), (2, -100))),
        ([(1, True)], ((1, True),)),
    ):  # fmt: skip
        found.append(("logit_bias", given, bias))
    return found


def wrong_parameters() -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, (_, wrong) in (NUMBERS | INTEGERS).items():
        found += each(name, *wrong, *NO_NUMBERS)
    for name in INTEGERS:
        found += each(name, 1.0)
    for name in (*NUMBERS, "n", "min_tokens", "top_k", *SWITCHES):
        found += each(name, None)
    for name in SWITCHES:
        found += each(name, 0, 1, "true")
    found += each("stop", "", [""], [1], {"x"}, 1, b"x", iter("x"))
    found += each("stop_token_ids", [True], [1.0], ["1"], 1, {1}, "1", iter([1]))
    found += each("logit_bias", {"x": 1}, {1: "x"}, {1: 101}, {1: NAN}, {1: INF}, {1: None}, 1, "abc")
    found += each("logit_bias", {INF: 1}, {1: 10**400}, 0, b"ab")
    found += each("logit_bias", [(1,)], [(1, 2, 3)], [(1.0, 2)], [(True, 2)], [(1, "2")])
    found += each("logit_bias", [(1, NAN)], [(1, -101)])
    return found


@pytest.mark.parametrize(("name", "given", "expected"), parameters())
def test_a_parameter_takes(name: str, given: Any, expected: Any) -> None:
    found = getattr(SamplingParams(**{name: given}), name)
    assert found == expected
    assert type(found) is type(expected)


def test_type_checkers_know_what_is_given_and_what_is_held() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3], logit_bias={7: 1, 2: 0.5})
    stop: tuple[str, ...] = params.stop
    ids: tuple[int, ...] = params.stop_token_ids
    bias: tuple[tuple[int, float], ...] = params.logit_bias
    assert (stop, ids, bias) == (("x",), (3,), ((2, 0.5), (7, 1.0)))
    assert SamplingParams(stop=["x"], stop_token_ids=(3,), logit_bias=[(7, 1)]).logit_bias == ((7, 1),)
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()


@pytest.mark.parametrize(("name", "given"), wrong_parameters())
def test_a_parameter_refuses(name: str, given: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**{name: given})
    assert error.value.param == name
    assert "\n" not in str(error.value)


def of_body(name: str, given: str) -> Any:
    """What a completion's parameter is made of this JSON."""
    raw = f'{{"model": "m", "prompt": "x", "{name}": {given}}}'.encode()
    return getattr(completion_params(_decode(raw, CompletionBody), {}), name)


def named_by(name: str, given: str) -> str | None:
    """The parameter that the refusal names; none where this is no JSON."""
    try:
        found = of_body(name, given)
    except (ApiError, InvalidRequest) as error:
        return error.param
    pytest.fail(f"{name} took {given} as {found}")


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS])
def test_json_of_numbers(name: str) -> None:
    good, wrong = (NUMBERS | INTEGERS)[name]
    for given in good:
        held = of_body(name, json.dumps(given))
        default = SamplingParams().max_tokens if name == "max_tokens" else None
        assert held == (0 if (name, given) == ("top_k", -1) else default if given is None else given)
        assert isinstance(held, float) == (name in NUMBERS)
    refusals = [json.dumps(given) for given in wrong]
    for given_json in (*refusals, "true", '"1"', "[]", "{}", "NaN", "1e999"):
        if name == "min_tokens" and given_json.isdecimal():
            continue  # the default length makes room
        is_json = given_json not in ("NaN", "Infinity", "-Infinity")
        assert named_by(name, given_json) == (name if is_json else None)


def test_json_of_the_rest() -> None:
    assert of_body("stop", '"x"') == ("x",)
    assert of_body("stop", '["x", "y"]') == ("x", "y")
    assert of_body("stop_token_ids", "[3]") == (3,)
    assert of_body("logit_bias", '{"7": 1, "3": -2}') == ((3, -2.0), (7, 1.0))
    assert of_body("min_tokens", "17") == 17
    for name in SWITCHES:
        assert of_body(name, "true") is True
        assert of_body(name, "null") is getattr(SamplingParams(), name)
    for name, given in (
        ("n", "1.5"), ("n", "1.0"), ("max_tokens", "1e2"), ("stop", "1"), ("stop", '[""]'),
        ("stop_token_ids", '["1"]'), ("logit_bias", "[]"), ("logit_bias", '{"x": 1}'),
        ("logit_bias", '{"01": 1}'), ("logit_bias", '{"1": 101}'), ("ignore_eos", "1"),
    ):  # fmt: skip
        assert named_by(name, given) == name
    chat = _decode(b'{"model": "m", "messages": [], "logprobs": true, "top_logprobs": 3}', ChatBody)
    assert chat_params(chat, {}) == SamplingParams(max_tokens=None, logprobs=3)


@pytest.mark.parametrize(
    ("fields", "is_served"),
    [
        ({"hidden_size": 4096.0}, False), ({"hidden_size": True}, False), ({"hidden_size": None}, False),
        ({"hidden_size": "64"}, False), ({"vocab_size": 10**30}, True), ({"num_key_value_heads": None}, True),
        ({"num_key_value_heads": 0}, False), ({"rms_norm_eps": 1}, True), ({"rms_norm_eps": None}, False),
        ({"rms_norm_eps": NAN}, False), ({"rms_norm_eps": INF}, False), ({"rms_norm_eps": True}, False),
        ({"tie_word_embeddings": None}, False), ({"hidden_act": None}, True), ({"torch_dtype": 5}, False),
        ({"unread": NAN}, True), ({"sliding_window": "wide"}, True), ({"rope_theta": 2}, True),
        ({"rope_scaling": {}}, True), ({"rope_scaling": {"type": "default", "factor": "x"}}, True),
        ({"rope_scaling": {"type": "yarn", "beta_fast": 0}}, True), ({"rope_scaling": []}, False),
        ({"eos_token_id": None}, True), ({"eos_token_id": [1, 1]}, True), ({"eos_token_id": -1}, False),
        ({"eos_token_id": 1.0}, False), ({"bos_token_id": 0}, True), ({"bos_token_id": None}, True),
        ({"architectures": None, "model_type": "llama"}, True), ({"attention_bias": 0}, False),
    ],
    ids=str,
)  # fmt: skip
def test_a_model_is_served(fields: dict[str, Any], is_served: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | fields))
    if is_served:
        read_model_config(tmp_path)
    else:
        with pytest.raises(ModelError, match=next(iter(fields))):
            read_model_config(tmp_path)
