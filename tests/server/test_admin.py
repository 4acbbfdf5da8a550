"""Models, adapters, probes, metrics, docs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from manylora.server import adapters
from manylora.server.app import create_app
from manylora.server.connection import ServerSettings
from manylora.server.errors import TYPES, ApiError
from manylora.text.texts import ModelText, Texts
from manylora.text.tokenizer import Tokenizer
from tests.server.conftest import BASE, RunningServer, client_of, make_app
from tests.server.fakes import FakeEngine

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The permitted root: a good and a broken adapter, links in and out; a secret beside it."""
    root = tmp_path / "adapters"
    for name in ("good", "broken", "deep/er"):
        (root / name).mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "in").symlink_to(root / "good")
    (root / "circle").symlink_to(root / "circle")
    (root / "file").write_text("x")
    return root


def run(engine: FakeEngine, tokenizer: Tokenizer, scenario: Any, **settings: Any) -> Any:
    async def main() -> Any:
        async with client_of(make_app(engine, tokenizer, **settings)) as client:
            return await scenario(client)

    return asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_cards(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        await engine.add_adapter("team/a d", "/adapters/ad")
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        base, adapter = listed["data"]
        assert (base["id"], base["root"], base["parent"]) == (BASE, "/models/base", None)
        assert (adapter["id"], adapter["root"], adapter["parent"]) == ("team/a d", "/adapters/ad", BASE)
        keys = {
            "id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission",
        }  # fmt: skip
        assert base.keys() == adapter.keys() == keys
        assert base["max_model_len"] == 256
        assert (await client.get(f"/v1/models/{BASE}")).json() == base
        assert (await client.get("/v1/models/team%2Fa%20d")).json() == adapter
        assert (await client.get(f"/v1/models/{BASE}:team/a d")).json() == adapter
        missing = await client.get("/v1/models/none")
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")

    run(engine, tokenizer, scenario)


def test_adapters_as_dynamo_asks_for_them(engine: FakeEngine, tokenizer: Tokenizer, folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        good = f"file://{folder / 'good'}"
        loaded = await client.post("/v1/loras", json={"lora_name": "x", "source": {"uri": good}})
        number = loaded.json()["lora_id"]
        assert loaded.json() == {
            "status": "success",
            "message": "LoRA adapter 'x' loaded successfully",
            "lora_name": "x",
            "lora_id": number,
        }
        assert 0 < number < 2**31
        assert engine.cards["x"].path == str(folder / "good")
        listed = (await client.get("/v1/loras")).json()
        assert listed == {"status": "success", "loras": {"x": number}, "count": 1}
        for body, param in (
            ({"source": {"uri": good}}, "lora_name"),
            ({"lora_name": "y"}, "source"),
            ({"lora_name": "y", "source": {}}, "source"),
            ({"lora_name": "y", "source": {"uri": "s3://bucket/y"}}, "source"),
            ({"lora_name": "y", "source": {"uri": "file://host/y"}}, "source"),
            ({"lora_name": "x", "source": {"uri": good}}, "lora_name"),
        ):
            refused = await client.post("/v1/loras", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        outside = {"lora_name": "y", "source": {"uri": f"file://{folder.parent / 'secret'}"}}
        assert (await client.post("/v1/loras", json=outside)).status_code == 403
        unloaded = await client.delete("/v1/loras/x")
        assert unloaded.json()["message"] == "LoRA adapter 'x' unloaded successfully"
        assert (await client.delete("/v1/loras/x")).status_code == 404
        assert (await client.get("/v1/loras")).json()["count"] == 0

    run(engine, tokenizer, scenario, adapter_dir=folder)


def test_load_and_unload(engine: FakeEngine, tokenizer: Tokenizer, folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        body = {"lora_name": "x", "lora_path": str(folder / "good")}
        loaded = await client.post(LOAD, json=body)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'x' added successfully.")
        assert engine.cards["x"].path == str(folder / "good")
        unloaded = await client.post(UNLOAD, json={"lora_name": "x"})
        assert (unloaded.status_code, unloaded.text) == (
            200,
            "Success: LoRA adapter 'x' removed successfully.",
        )
        answer = await client.post("/v1/completions", json={"model": "x", "prompt": [5]})
        assert answer.status_code == 404

    run(engine, tokenizer, scenario, adapter_dir=folder)


def test_no_adapter_takes_over_the_name_of_another(
    engine: FakeEngine, tokenizer: Tokenizer, folder: Path
) -> None:
    app = create_app(
        engine,
        Texts(ModelText(tokenizer)),
        ServerSettings("demo", "/models/base", "1.2.3", adapter_dir=folder),
    )

    async def scenario() -> None:
        async with client_of(app) as client:
            assert (await client.post(LOAD, json={"lora_name": "x", "lora_path": "good"})).status_code == 200
            for name in ("demo:x", "demo:", "demo:y:z", "demo"):
                refused = await client.post(LOAD, json={"lora_name": name, "lora_path": "good"})
                assert refused.status_code == 400
                assert refused.json()["error"]["param"] == "lora_name"
            # Another's colon is a name like any other.
            assert (
                await client.post(LOAD, json={"lora_name": "de:x", "lora_path": "good"})
            ).status_code == 200
            for name, adapter in (("demo:x", "x"), ("x", "x"), ("de:x", "de:x"), ("demo:de:x", "de:x")):
                answer = await client.get(f"/v1/models/{name}")
                assert answer.json().get("id") == adapter
            assert set(engine.cards) == {"x", "de:x"}

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["good", "in", "deep/er", "./good", "deep/../good"])
def test_relative_paths_and_links_inside(
    engine: FakeEngine, tokenizer: Tokenizer, folder: Path, path: str
) -> None:
    async def scenario(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(LOAD, json={"lora_name": "x", "lora_path": path})

    assert run(engine, tokenizer, scenario, adapter_dir=folder).status_code == 200
    assert Path(engine.cards["x"].path).parent.is_relative_to(folder)


def test_a_run_and_its_checkpoints_are_loaded_by_the_names_of_the_start(
    engine: FakeEngine, tokenizer: Tokenizer, folder: Path
) -> None:
    """``folder`` is the run, which the start would name by its own name."""

    async def scenario(client: httpx.AsyncClient) -> None:
        for name, path in ((folder.name, folder), (f"{folder.name}/good", folder / "good")):
            assert (await client.post(LOAD, json={"lora_name": name, "lora_path": name})).status_code == 200
            assert engine.cards[name].path == str(path)
            assert (await client.get(f"/v1/models/{name}")).status_code == 200
            assert (await client.delete(f"/v1/loras/{name}")).status_code == 200
        outside = {"lora_name": "x", "lora_path": f"{folder.name}/../../secret"}
        assert (await client.post(LOAD, json=outside)).status_code == 403

    for link in ("out", "circle"):
        (folder / link).unlink()
    run(engine, tokenizer, scenario, adapter_dir=folder)


def test_a_folder_of_too_many_files(
    engine: FakeEngine, tokenizer: Tokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(LOAD, json={"lora_name": "x", "lora_path": "good"})

    monkeypatch.setattr(adapters, "_MOST_ENTRIES", 3)
    for number in range(4):
        assert run(engine, tokenizer, scenario, adapter_dir=folder).status_code == 200
        (folder / "good" / str(number)).write_text("")
        engine.cards.clear()
    refused = run(engine, tokenizer, scenario, adapter_dir=folder)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")


def test_a_folder_that_hangs_holds_up_nobody_and_has_a_deadline(
    engine: FakeEngine, tokenizer: Tokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_back = threading.Event()

    def hang(*arguments: Any) -> None:
        assert is_back.wait(60)

    async def scenario(client: httpx.AsyncClient) -> None:
        loading = asyncio.create_task(client.post(LOAD, json={"lora_name": "x", "lora_path": "good"}))
        await asyncio.sleep(0)
        assert (await client.get("/v1/models")).status_code == 200
        refused = await loading
        assert refused.status_code == 503
        assert "does not answer" in refused.json()["error"]["message"]
        is_back.set()

    monkeypatch.setattr(adapters, "_check_entries", hang)
    monkeypatch.setattr(adapters, "_LOOK_S", 0.05)
    run(engine, tokenizer, scenario, adapter_dir=folder)
    assert not engine.cards


def test_callers_take_turns_to_load(engine: FakeEngine, tokenizer: Tokenizer, folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        def load(name: str, key: str) -> asyncio.Task[httpx.Response]:
            body, headers = {"lora_name": name, "lora_path": "good"}, {"authorization": f"Bearer {key}"}
            return asyncio.create_task(client.post(LOAD, json=body, headers=headers))

        engine.holds_loads = True
        many = [load(f"a{number}", "one") for number in range(10)]
        await until(lambda: len(engine.loads) == 2)
        other = load("b", "two")
        await until(lambda: "b" in engine.loads)
        assert engine.loads[2:] == [
            "b"
        ]  # folders are looked at beside each other: any two of its ten came first
        engine.holds_loads = False
        assert {answer.status_code for answer in await asyncio.gather(other, *many)} == {200}

    run(engine, tokenizer, scenario, adapter_dir=folder, api_keys=("one", "two"))


REFUSED = [
    ({"lora_name": "x"}, 400, "InvalidUserInput"),
    ({"lora_path": "good"}, 400, "InvalidUserInput"),
    ({"lora_name": "", "lora_path": "good"}, 400, "InvalidUserInput"),
    ({"lora_name": 3, "lora_path": "good"}, 400, "BadRequestError"),
    ({"lora_name": BASE, "lora_path": "good"}, 400, "InvalidUserInput"),
    ({"lora_name": "served", "lora_path": "good"}, 400, "InvalidUserInput"),
    ({"lora_name": "served", "lora_path": "good", "load_inplace": True}, 400, "InvalidUserInput"),
    ({"lora_name": "n" * 201, "lora_path": "good"}, 400, "InvalidUserInput"),
    ({"lora_name": "x", "lora_path": "broken"}, 400, "InvalidUserInput"),
    ({"lora_name": "x", "lora_path": "none"}, 404, "NotFoundError"),
    ({"lora_name": "x", "lora_path": "file"}, 404, "NotFoundError"),
    ({"lora_name": "x", "lora_path": "out"}, 403, "PermissionDeniedError"),
    ({"lora_name": "x", "lora_path": "../secret"}, 403, "PermissionDeniedError"),
    ({"lora_name": "x", "lora_path": "../nothing"}, 403, "PermissionDeniedError"),
    ({"lora_name": "x", "lora_path": "/"}, 403, "PermissionDeniedError"),
    ({"lora_name": "x", "lora_path": "circle"}, 400, "BadRequestError"),
    ({"lora_name": "x", "lora_path": "a\x00b"}, 400, "BadRequestError"),
    ({"lora_name": "x", "lora_path": "a" * 5000}, 400, "BadRequestError"),
    ({"lora_name": "x", "lora_path": "./" * 5000 + "good"}, 400, "BadRequestError"),
]


@pytest.mark.parametrize(("body", "status", "kind"), REFUSED, ids=lambda value: str(value)[:50])
def test_refused_loads(
    engine: FakeEngine, tokenizer: Tokenizer, folder: Path, body: dict[str, Any], status: int, kind: str
) -> None:
    async def scenario(client: httpx.AsyncClient) -> httpx.Response:
        await engine.add_adapter("served", "/adapters/served")
        return await client.post(LOAD, json=body)

    response = run(engine, tokenizer, scenario, adapter_dir=folder)
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind), response.text
    assert list(engine.cards) == ["served"]


def test_what_is_no_path_is_refused_without_saying_where_the_root_lies(
    engine: FakeEngine, tokenizer: Tokenizer, folder: Path
) -> None:
    async def scenario(client: httpx.AsyncClient) -> list[httpx.Response]:
        paths = ("circle", "a\x00b", "a" * 1000, "circle/x", "none", "out", "..")
        return [await client.post(LOAD, json={"lora_name": "x", "lora_path": path}) for path in paths]

    for response in run(engine, tokenizer, scenario, adapter_dir=folder):
        assert response.status_code in (400, 403, 404)
        assert str(folder.parent) not in response.text


def test_a_load_is_withdrawn_when_its_client_goes(
    running: RunningServer, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.holds_loads = True
    path = {"lora_name": "x", "lora_path": str(tmp_path)}
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=running.url, timeout=2) as client:
        client.post(LOAD, json=path)
    ends_at = time.monotonic() + 60
    while not engine.withdrawn and time.monotonic() < ends_at:
        time.sleep(0.01)
    assert engine.withdrawn == ["x"]
    engine.holds_loads = False
    with httpx.Client(base_url=running.url, timeout=60) as client:
        assert client.post(LOAD, json=path).status_code == 200
    assert engine.loads == ["x", "x"]


def test_loading_is_off_without_a_folder(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for body in ({"lora_name": "x", "lora_path": "/etc"}, {}):
            response = await client.post(LOAD, json=body)
            assert response.status_code == 403
            assert "--adapter-dir" in response.json()["error"]["message"]

    run(engine, tokenizer, scenario)


def test_refused_unloads(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for body, status in (({"lora_name": "none"}, 404), ({}, 400), ({"lora_name": BASE}, 404)):
            assert (await client.post(UNLOAD, json=body)).status_code == status

    run(engine, tokenizer, scenario)


def test_unload_answers_once_running_requests_have_ended(tokenizer: Tokenizer) -> None:
    engine = FakeEngine()
    engine.is_held = True

    async def scenario(client: httpx.AsyncClient) -> None:
        await engine.add_adapter("x", "/adapters/x")
        body = {"model": "x", "prompt": [5], "max_tokens": 8}
        running = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: bool(engine.running))
        unloading = asyncio.create_task(client.post(UNLOAD, json={"lora_name": "x"}))
        await until(lambda: not engine.cards)
        assert (await client.post("/v1/completions", json=body)).status_code == 404
        assert not unloading.done()
        engine.is_held = False
        assert (await running).status_code == 200
        assert (await unloading).status_code == 200

    run(engine, tokenizer, scenario)


def test_an_adapter_that_went_another_way_is_404(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        await engine.add_adapter("x", "/adapters/x")
        for status in (200, 404, 404):
            for stream in (False, True):
                body = {"model": "x", "prompt": [5], "stream": stream}
                response = await client.post("/v1/completions", json=body)
                assert response.status_code == status
            engine.cards.clear()
        assert response.json()["error"]["param"] == "model"

    run(engine, tokenizer, scenario)


def test_probes_and_docs(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        probes = [("GET", "/health"), ("HEAD", "/health"), ("GET", "/ping"), ("POST", "/ping")]
        live = [("GET", "/healthz"), ("HEAD", "/healthz")]
        for method, path in (*probes, *live):
            response = await client.request(method, path)
            assert (response.status_code, response.content) == (200, b"")
        engine.trouble = "no sign of it"
        assert {(await client.request(*each)).status_code for each in probes} == {503}
        assert {(await client.request(*each)).status_code for each in live} == {200}
        assert (await client.get("/version")).json() == {"version": "1.2.3"}
        page = (await client.get("/docs")).text
        assert "swagger-ui" in page
        assert "<code>POST /v1/chat/completions</code>" in page
        document = (await client.get("/openapi.json")).json()
        body = document["paths"]["/v1/completions"]["post"]["requestBody"]
        name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        assert "repetition_penalty" in document["components"]["schemas"][name]["properties"]

    run(engine, tokenizer, scenario)


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_the_document_says_which_errors_there_are_and_what_needs_a_key(
    engine: FakeEngine, tokenizer: Tokenizer, keys: tuple[str, ...]
) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        document = (await client.get("/openapi.json")).json()
        responses = document["components"]["responses"]
        assert {int(status) for status in responses} == set(TYPES)
        guarded = set()
        for path, operations in document["paths"].items():
            for operation in operations.values():
                assert operation["responses"].keys() - {"200"} <= responses.keys()
                assert ("401" in operation["responses"]) == ("security" in operation)
                if "security" in operation:
                    guarded.add(path)
        answered = {path for path in document["paths"] if (await client.get(path)).status_code == 401}
        assert guarded == answered
        assert bool(guarded) == bool(keys)
        error = document["components"]["schemas"]["ErrorDetail"]["properties"]
        assert error.keys() == (await client.get("/nothing")).json()["error"].keys()

    run(engine, tokenizer, scenario, api_keys=keys)


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_proxys_path_comes_or_is_taken_off(engine: FakeEngine, tokenizer: Tokenizer, prefix: str) -> None:
    key = {"Authorization": "Bearer secret"}

    async def scenario(client: httpx.AsyncClient) -> None:
        for path in ("/v1/models", "/metrics"):
            assert (await client.get(prefix + path)).status_code == 401
            assert (await client.get(prefix + path, headers=key)).status_code == 200
        for path in ("/llm", "/llm/", "/llmv1/models", "/llm/llm/v1/models"):
            assert (await client.get(path)).status_code == 404
        assert '"/llm/openapi.json"' in (await client.get(f"{prefix}/docs")).text
        document = (await client.get(f"{prefix}/openapi.json")).json()
        assert document["servers"] == [{"url": "/llm"}]

    run(engine, tokenizer, scenario, root_path="/llm", api_keys=("secret",))


def test_probes_under_a_proxys_path_are_probes(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    app = make_app(engine, tokenizer, root_path="/llm")
    assert {"/health", "/llm/health", "/llm/metrics"} <= app.state.connection_limits.probes


LABELS = ["tier", "use", "direction", "model_name"]


def scraped(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_metrics(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        await engine.add_adapter("ad", "/adapters/ad")
        await engine.add_adapter("idle", "/adapters/idle")
        for model, n in (("ad", 2), (BASE, 1)):
            body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "n": n}
            await client.post("/v1/completions", json=body)
        values = scraped((await client.get("/metrics")).text)
        label = {"model_name": BASE}
        for name, value in {
            "vllm:num_requests_running": 0, "vllm:num_requests_waiting": 2, "vllm:kv_cache_usage_perc": 0.2,
            "vllm:prefix_cache_queries_total": 11, "vllm:prefix_cache_hits_total": 0,
            "vllm:prompt_tokens_total": 123, "vllm:generation_tokens_total": 45,
            "vllm:num_preemptions_total": 4, "vllm:num_gpu_loaded_lora_adapters": 2,
            "vllm:num_cpu_loaded_lora_adapters": 2,
            "vllm:time_to_first_token_seconds_count": 2, "vllm:e2e_request_latency_seconds_count": 2,
            "vllm:request_queue_time_seconds_count": 2, "vllm:inter_token_latency_seconds_count": 9,
            "vllm:request_time_per_output_token_seconds_count": 3, "manylora:engine_up": 1,
        }.items():  # fmt: skip
            assert values[name] == [(label, value)], name
        assert (label | {"finished_reason": "length"}, 3) in values["vllm:request_success_total"]
        loaded = {"level": "gpu", "pinned": "false", "rank": "8"}
        for adapter in ("ad", "idle"):
            assert (loaded | {"adapter_name": adapter}, 1) in values["vllm:lora_adapter_loaded"]
            state = {"adapter_name": adapter, "state": "resident"}
            assert (state, 1) in values["manylora:adapter_state"]
        ((labels, seconds),) = values["vllm:lora_requests_info"]
        assert labels.keys() == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
        assert seconds > 1.7e9
        assert ({"adapter_name": "ad"}, 8) in values["manylora:adapter_generation_tokens_total"]
        assert ({"adapter_name": BASE}, 3) in values["manylora:adapter_prompt_tokens_total"]
        assert ({"tier": "device", "use": "history"}, 21) in values["manylora:pages"]
        await client.post(UNLOAD, json={"lora_name": "ad"})
        assert 'adapter_name="ad"' not in (await client.get("/metrics")).text

    run(engine, tokenizer, scenario)


def test_metrics_of_the_cache(running: RunningServer) -> None:
    url = f"{running.url}/metrics"
    values = scraped(httpx.get(url, timeout=60).text)
    for name, series in {
        "manylora:pages": {
            ("device", "free"): 50, ("device", "running"): 20, ("device", "history"): 21,
            ("device", "adapters"): 9, ("host", "free"): 30, ("host", "history"): 18, ("host", "adapters"): 12,
        },
        "manylora:host_pages_pinned": {(): 44},
        "manylora:pages_moving": {("in",): 3, ("out",): 1},
        "manylora:invalid_history_share": {(): 7 / 21},
        "manylora:invalid_history_share_mean": {(): 0.25},
        "manylora:kv_hit_tokens_total": {("device",): 32, ("host",): 16},
        "manylora:adapter_hits_total": {("device",): 8, ("host",): 5},
        "manylora:adapter_misses_total": {(BASE,): 2},
        "manylora:swap_bytes_total": {("in",): 10 * 4096, ("out",): 20 * 4096},
        "manylora:swap_seconds_total": {("in",): 0.5, ("out",): 0.25},
        "manylora:swap_failures_total": {(BASE,): 1},
        "manylora:history_page_drops_total": {(BASE,): 9},
        "manylora:host_evictions_total": {(BASE,): 13},
        "manylora:prefetches_total": {(BASE,): 14},
    }.items():  # fmt: skip
        found = {tuple(labels[key] for key in sorted(labels, key=LABELS.index)): value
                 for labels, value in values[name]}  # fmt: skip
        assert found == series, name
    ((shape, _),) = values["vllm:cache_config_info"]
    assert (shape["num_gpu_blocks"], shape["num_cpu_blocks"]) == ("100", "60")


def test_metrics_say_what_the_first_token_waited_for(running: RunningServer, engine: FakeEngine) -> None:
    """The fake's first deltas claim seconds that have not passed, so nothing is left for the prefill."""
    with httpx.Client(base_url=running.url) as client:
        running.call(asyncio.ensure_future, engine.add_adapter("ad", "/adapters/ad"))
        for model, stream in ((BASE, False), ("ad", False), ("ad", True)):
            body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "n": 2, "stream": stream}
            assert client.post("/v1/completions", json=body).status_code == 200
        values = scraped(client.get("/metrics").text)
        parts = {"queue": 1.0, "adapter": 2.0, "kv": 4.0, "prefill": 0.0}
        for part, seconds in parts.items():
            assert ({"part": part}, 3) in values["manylora:ttft_part_seconds_count"]
            assert ({"part": part}, 3 * seconds) in values["manylora:ttft_part_seconds_sum"]
            for name, count in (("ad", 2), (BASE, 1)):
                labels = {"adapter_name": name, "part": part}
                assert (labels, count * seconds) in values["manylora:adapter_ttft_part_seconds_total"]
                totals = values["manylora:adapter_time_to_first_token_seconds_count"]
                assert ({"adapter_name": name}, count) in totals
        for name, state in (("state", "resident"), ("host_state", "held")):
            assert ({"adapter_name": "ad", "state": state}, 1) in values[f"manylora:adapter_{name}"]
        assert ({"adapter_name": "ad"}, 5) in values["manylora:adapter_history_pages"]
        levels = {labels["level"] for labels, _ in values["vllm:lora_adapter_loaded"]}
        assert levels == {"gpu", "cpu"}
        assert client.post(UNLOAD, json={"lora_name": "ad"}).status_code == 200
        assert 'adapter_name="ad"' not in client.get("/metrics").text


def test_running_adapters_show(tokenizer: Tokenizer) -> None:
    engine = FakeEngine()
    engine.is_held = True

    async def scenario(client: httpx.AsyncClient) -> None:
        await engine.add_adapter("ad", "/adapters/ad")
        task = asyncio.create_task(client.post("/v1/completions", json={"model": "ad", "prompt": [5]}))
        await until(lambda: bool(engine.running))
        values = scraped((await client.get("/metrics")).text)
        assert values["vllm:lora_requests_info"][0][0]["running_lora_adapters"] == "ad"
        # Running pages and those of the adapter in use; history and idle adapters count as free.
        assert values["vllm:kv_cache_usage_perc"][0][1] == pytest.approx(0.23)
        engine.is_held = False
        await task

    run(engine, tokenizer, scenario)


def test_metrics_are_one_apps_own(tokenizer: Tokenizer) -> None:
    first, second = FakeEngine(), FakeEngine()

    async def scenario(client: httpx.AsyncClient) -> str:
        await client.post("/v1/completions", json={"model": BASE, "prompt": [5]})
        return (await client.get("/metrics")).text

    for engine in (first, second):
        values = scraped(run(engine, tokenizer, scenario))
        assert values["vllm:time_to_first_token_seconds_count"][0][1] == 1


def test_a_path_begins_with_the_name_of_a_link_to_the_permitted_folder(tmp_path: Path) -> None:
    """By which the folder's own adapters are served."""
    folder = tmp_path / "runs" / "german-v3" / "checkpoint-500"
    folder.mkdir(parents=True)
    link = tmp_path / "latest"
    link.symlink_to(folder.parent)
    for path in ("latest/checkpoint-500", "german-v3/checkpoint-500", "checkpoint-500"):
        assert adapters.permitted_folder(path, link) == folder
    for outside in ("runs", "../runs"):
        with pytest.raises(ApiError):
            adapters.permitted_folder(outside, link)
