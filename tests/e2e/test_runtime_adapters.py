"""Adapters that come and go while the server runs."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.e2e import folders
from tests.e2e.folders import CONFIG, WEIGHTS
from tests.e2e.process import (
    BASE,
    PAGES_ADAPTERS,
    RUNNING,
    Server,
    assert_error,
    completion,
    events,
    wait_until,
)


@pytest.fixture
def folder(adapters: Path) -> Iterator[Path]:
    """Inside the permitted root; the test makes it."""
    path = adapters / "made-by-a-test"
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_load_use_unload(server: Server, adapters: Path, folder: Path) -> None:
    folders.copy_of(adapters / "german", folder)
    expected = server.text(model="german")
    loaded = server.load("new", folder)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    try:
        card = server.http.get("/v1/models/new").json()
        assert (card["root"], card["parent"]) == (str(folder), BASE)
        assert "new" in {card["id"] for card in server.http.get("/v1/models").json()["data"]}
        assert server.text(model="new") == server.text(model=f"{BASE}:new") == expected
        again = assert_error(server.load("new", folder), 400, "already")
        assert again["type"] == "InvalidUserInput"
    finally:
        unloaded = server.unload("new")
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert_error(server.complete(model="new"), 404)
    assert_error(server.http.get("/v1/models/new"), 404)
    assert_error(server.unload("new"), 404)


def test_a_path_relative_to_the_root(server: Server, adapters: Path, folder: Path) -> None:
    folders.copy_of(adapters / "coffee", folder)
    assert server.load("relative", folder.name).status_code == 200
    assert server.unload("relative").status_code == 200


@pytest.mark.parametrize("body", [{}, {"lora_name": "x"}, {"lora_path": "german"}, {"lora_name": None},
                                  {"lora_name": "", "lora_path": "german"},
                                  {"lora_name": "x", "lora_path": ""},
                                  {"lora_name": 5, "lora_path": "german"},
                                  {"lora_name": "x", "lora_path": 5},
                                  {"lora_name": BASE, "lora_path": "german"},
                                  {"lora_name": "german", "lora_path": "german"},
                                  {"lora_name": "x" * 1000, "lora_path": "german"},
                                  {"lora_name": "x", "lora_path": "a\x00b"},
                                  {"lora_name": "x", "lora_path": "."}], ids=str)  # fmt: skip
def test_loads_that_are_400(server: Server, body: dict[str, object]) -> None:
    assert_error(server.post("/v1/load_lora_adapter", body), 400)


def test_unloads_that_are_refused(server: Server) -> None:
    for body in ({}, {"lora_name": None}, {"lora_name": ""}, {"lora_name": 5}):
        assert_error(server.post("/v1/unload_lora_adapter", body), 400)
    for name in ("nope", BASE, f"{BASE}:german"):
        assert_error(server.unload(name), 404)


def test_paths_that_do_not_exist_are_404(server: Server, adapters: Path) -> None:
    for path in ("nope", f"german/{CONFIG}", str(adapters / "nope")):
        assert_error(server.load("x", path), 404)


def test_paths_outside_the_root_are_403(server: Server, adapters: Path, folder: Path, tmp_path: Path) -> None:
    outside = folders.copy_of(adapters / "german", tmp_path / "outside")
    folder.symlink_to(outside)
    try:
        for path in ("/", "/etc/passwd", "..", "german/../../x", str(outside), str(outside / "nope")):
            assert_error(server.load("x", path), 403, "outside")
        for path in (str(folder), folder.name):
            error = assert_error(server.load("x", path), 403, "outside")
            assert str(outside) not in error["message"]
    finally:
        folder.unlink()


def test_a_link_to_weights_outside_the_root_is_403(
    server: Server, adapters: Path, folder: Path, tmp_path: Path
) -> None:
    folders.copy_of(adapters / "german", folder)
    shutil.move(folder / WEIGHTS, tmp_path / "weights")
    (folder / WEIGHTS).symlink_to(tmp_path / "weights")
    error = assert_error(server.load("x", folder), 403, "outside")
    assert str(tmp_path) not in error["message"]


def test_a_link_inside_the_root_is_fine(server: Server, adapters: Path, folder: Path) -> None:
    folder.symlink_to(adapters / "german")
    try:
        assert server.load("linked", folder).status_code == 200
        assert server.text(model="linked") == server.text(model="german")
        assert server.unload("linked").status_code == 200
    finally:
        folder.unlink()


def _truncated(path: Path) -> None:
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data[: len(data) * 2 // 3])


def _header_only(path: Path) -> None:
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:200])


def _huge_header(path: Path) -> None:
    (path / WEIGHTS).write_bytes((2**63 - 1).to_bytes(8, "little") + b"{}")


def _garbage(path: Path) -> None:
    (path / WEIGHTS).write_bytes(bytes(range(256)) * 100)


def _pickle(path: Path) -> None:
    (path / WEIGHTS).unlink()
    (path / "adapter_model.bin").write_bytes(b"\x80\x04K\x01.")


def _pickle_by_another_name(path: Path) -> None:
    (path / WEIGHTS).write_bytes(b"PK\x03\x04" + b"\x80\x02" * 500)


def _empty(path: Path) -> None:
    (path / WEIGHTS).write_bytes(b"")


def _a_folder_for_weights(path: Path) -> None:
    (path / WEIGHTS).unlink()
    (path / WEIGHTS).mkdir()


def _no_config(path: Path) -> None:
    (path / CONFIG).unlink()


def _config(**changes: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / CONFIG).read_text())
        (path / CONFIG).write_text(json.dumps({**config, **changes}))

    change.__name__ = str(changes)
    return change


def _bad_json(path: Path) -> None:
    (path / CONFIG).write_text('{"peft_type": "LORA", ')


def _deep_json(path: Path) -> None:
    (path / CONFIG).write_text("[" * 100000)


def _one_side(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    del tensors[next(name for name in tensors if ".lora_B." in name)]
    save_file(tensors, path / WEIGHTS)


def _unknown_tensor(path: Path) -> None:
    save_file({**load_file(path / WEIGHTS), "stranger": np.zeros(3, np.float32)}, path / WEIGHTS)


BROKEN: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (_truncated, ("truncated",)),
    (_header_only, ("truncated",)),
    (_huge_header, ()),
    (_garbage, ()),
    (_empty, ()),
    (_pickle, ("pickle", "safetensors")),
    (_pickle_by_another_name, ()),
    (_a_folder_for_weights, ()),
    (_no_config, (CONFIG,)),
    (_bad_json, (CONFIG, "JSON")),
    (_deep_json, (CONFIG,)),
    (_one_side, ("lora_A", "lora_B")),
    (_unknown_tensor, ("stranger",)),
    (_config(use_dora=True), ("DoRA",)),
    (_config(modules_to_save=["lm_head"]), ("modules_to_save",)),
    (_config(bias="all"), ("bias",)),
    (_config(peft_type="IA3"), ("IA3",)),
    (_config(r=0), ("r ",)),
    (_config(r="8"), ("r ",)),
    (_config(r=3), ("rank",)),
    (_config(lora_alpha=None), ("lora_alpha",)),
    (_config(target_modules=["nope"]), ("target",)),
    (_config(target_modules="((a+)+)+$"), ("does not target",)),
]


@pytest.mark.parametrize(("breaking", "words"), BROKEN, ids=lambda part: getattr(part, "__name__", None))
def test_a_broken_adapter_is_400_and_says_why(
    server: Server,
    adapters: Path,
    folder: Path,
    breaking: Callable[[Path], None],
    words: tuple[str, ...],
) -> None:
    folders.copy_of(adapters / "german", folder)
    breaking(folder)
    error = assert_error(server.load("broken", folder), 400, *words)
    assert error["type"] == "InvalidUserInput"
    assert_error(server.complete(model="broken"), 404)


def test_an_adapter_of_another_base_names_the_tensor_and_both_shapes(
    server: Server, adapters: Path, folder: Path
) -> None:
    path, tensor, shape = folders.of_other_base(adapters / "german", folder)
    assert_error(server.load("foreign", path), 400, tensor, str(shape), "[256, 256]")


def test_a_rank_over_the_limit_is_400(server: Server, adapters: Path, folder: Path) -> None:
    times = 64 // folders.rank_of(adapters / "finnish") + 1
    rank = folders.rank_of(folders.widened(adapters / "finnish", folder, times))
    assert_error(server.load("wide", folder), 400, f"rank {rank}", "64")


def test_weights_that_are_no_numbers_are_400(server: Server, adapters: Path, folder: Path) -> None:

    def invalidate(tensors: folders.Tensors) -> folders.Tensors:
        next(iter(tensors.values()))[:] = np.nan
        return tensors

    folders.with_tensors(adapters / "german", folder, invalidate)
    assert_error(server.load("invalid", folder), 400, "NaN or infinity")
    assert_error(server.complete(model="invalid"), 404)
    assert server.text(model="german")


@pytest.mark.parametrize("name", [" ", "x\ny", "\x00"])
def test_a_name_that_is_not_printable_is_400(server: Server, adapters: Path, name: str) -> None:
    assert_error(server.load(name, adapters / "german"), 400, "lora_name")


def test_a_text_far_over_the_context_is_refused_at_once(server: Server) -> None:
    assert_error(server.complete(prompt="aaaa" * 2**20), 400, "maximum context length")


def test_a_name_loaded_again_sees_its_new_weights(server: Server, adapters: Path, folder: Path) -> None:
    long = {"prompt": "The same long prompt, " * 12, "max_tokens": 16}
    expected = {name: server.text(model=name, **long) for name in ("german", "french")}
    assert expected["german"] != expected["french"]
    for name in ("german", "french", "german"):
        folders.copy_of(adapters / name, folder)
        assert server.load("again", folder).status_code == 200
        assert server.text(model="again", **long) == expected[name]
        assert server.text(model="again", **long) == expected[name]  # now from its own history
        assert server.unload("again").status_code == 200
        shutil.rmtree(folder)


def test_unload_waits_for_what_runs_and_refuses_what_comes(
    server: Server, adapters: Path, folder: Path
) -> None:
    folders.copy_of(adapters / "japanese", folder)
    pages_before = server.gauge(PAGES_ADAPTERS)
    assert server.load("leaving", folder).status_code == 200

    def stream(num_tokens: int) -> contextlib.AbstractContextManager[httpx.Response]:
        body = completion(model="leaving", max_tokens=num_tokens, ignore_eos=True, stream=True)
        return server.http.stream("POST", "/v1/completions", json=body)

    with ThreadPoolExecutor(1) as thread, stream(250) as whole:
        chunks = events(whole)
        next(chunks)
        with stream(1000) as long:  # given up at the end
            next(events(long))
            unloading = thread.submit(server.unload, "leaving")
            wait_until(
                lambda: server.complete(model="leaving").status_code == 404, "404 for the leaving name"
            )
            assert_error(server.complete(model=f"{BASE}:leaving"), 404)
            assert_error(server.unload("leaving"), 404)
            # In this order, since what runs may end meanwhile.
            assert not (unloading.done() and server.gauge(RUNNING))
            pages_now = server.gauge(PAGES_ADAPTERS)
            assert pages_now > pages_before or not server.gauge(RUNNING)
            # The name is free again at once, for other weights.
            shutil.rmtree(folder)
            folders.copy_of(adapters / "french", folder)
            assert server.load("leaving", folder).status_code == 200
            assert server.text(model="leaving") == server.text(model="french")
            *rest, done = chunks
            assert done == "[DONE]"
            assert rest[-1]["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
            assert not (unloading.done() and server.gauge(RUNNING))
        assert unloading.result().status_code == 200
    assert server.text(model="leaving") == server.text(model="french")
    assert server.unload("leaving").status_code == 200
    resident = [name for name in server.metrics() if "leaving" in name and "adapter" in name]
    assert not resident
    assert server.gauge(PAGES_ADAPTERS) <= pages_before + server.gauge(
        'manylora:adapter_pages{adapter_name="french"}'
    )


@pytest.mark.parametrize("stream", [False, True])
def test_an_adapter_whose_numbers_overflow_fails_its_own_requests(
    server: Server, adapters: Path, folder: Path, stream: bool
) -> None:
    folders.copy_of(adapters / "german", folder)
    weights = load_file(folder / WEIGHTS)
    save_file({name: np.full(w.shape, 1e30, np.float32) for name, w in weights.items()}, folder / WEIGHTS)
    expected = server.text(model="german")
    assert server.load("overflows", folder).status_code == 200
    try:
        bodies = [completion(model=name, stream=stream) for name in ("overflows", "german", "overflows")]
        bad, good, again = server.complete_all(bodies)
        for answer in (bad, again):
            assert_error(answer, 500, "not finite")
        assert good.status_code == 200
        assert server.text(model="german") == expected
        for params in ({"temperature": 1, "top_p": 0.5}, {"logprobs": 2}, {"logit_bias": {"5": 100}}):
            assert_error(server.complete(model="overflows", stream=stream, **params), 500, "not finite")
    finally:
        server.unload("overflows")
