"""Where FlashInfer cannot serve, our kernels do, and the log says why in one line. (With it: tests/gpu.)"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from manylora.kernels.flashinfer_attention import AttentionShape, PromptAttention, serving_prompts
from manylora.kernels.ops import AttentionRows, Scores
from manylora.kernels.select import ops_for
from manylora.kernels.shapes import PageShape
from manylora.kernels.triton.attention_plan import TritonAttentionPlan
from manylora.kernels.triton.decode_table import TABLE, DecodeConfig, DecodeTable, stored_table
from tests.kernels.cases import attention_case, attention_truth

CPU = torch.device("cpu")
SHAPE = AttentionShape(32, 8, 128, torch.bfloat16)
ROWS = AttentionRows(
    np.array([0, 128], np.int32), np.array([128], np.int32), np.arange(8, dtype=np.int32)[None]
)


def reason(caplog: pytest.LogCaptureFixture, shape: AttentionShape) -> str:
    """Of FlashInfer not serving, the one line that says so."""
    with caplog.at_level(logging.INFO, "manylora.kernels.flashinfer_attention"):
        coming = serving_prompts(shape, CPU)
        if coming is not None:
            coming.thread.join(60.0)
            assert coming.plan(ROWS, PageShape(1, 16, shape.kv_heads, shape.head_dim, 2)) is None
    lines = [record.getMessage() for record in caplog.records if "our kernel" in record.getMessage()]
    assert len(lines) == 1
    assert "\n" not in lines[0]
    return lines[0]


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (AttentionShape(32, 8, 128, torch.float32), "no float32"),
        (AttentionShape(32, 8, 80, torch.bfloat16), "heads of 80"),
        (AttentionShape(32, 8, 256, torch.float16), "heads of 256"),
        (AttentionShape(32, 8, 128, torch.float16, full_layers=False), "has a window"),
    ],
)
def test_shapes_that_are_ours(caplog: pytest.LogCaptureFixture, shape: AttentionShape, why: str) -> None:
    assert why in reason(caplog, shape)


def test_not_installed(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    assert "not installed" in reason(caplog, SHAPE)


def test_a_broken_installation(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libcudart is missing\\nand more')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr("manylora.kernels.flashinfer_attention._backend", lambda _: "fa3")
    assert reason(caplog, SHAPE).endswith("FlashInfer fails: libcudart is missing")


def test_our_kernel_serves_until_it_is_ready(
    stand_in: PromptAttention, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    page = PageShape(1, 16, stand_in._shape.kv_heads, stand_in._shape.head_dim, 4)
    monkeypatch.setattr("manylora.kernels.flashinfer_attention._why_not", lambda _: None)
    monkeypatch.setattr("manylora.kernels.flashinfer_attention._backend", lambda _: "fa3")
    monkeypatch.setattr(PromptAttention, "try_out", lambda _: may_end.wait(30))
    with caplog.at_level(logging.INFO, "manylora.kernels.flashinfer_attention"):
        coming = serving_prompts(stand_in._shape, CPU)
        assert coming is not None
        assert coming.plan(ROWS, page) is None
        may_end.set()
        coming.thread.join()
    assert coming.plan(ROWS, page) is not None
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "FlashInfer (fa3, ready in" in lines[0]


def test_a_compiler_ends_with_the_engine(
    stand_in: PromptAttention,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    ninja = tmp_path / "ninja"
    shutil.copy("/bin/sleep", ninja)
    begun = threading.Event()

    def build(_: PromptAttention) -> None:
        with subprocess.Popen([ninja, "60"]) as child:
            while Path(f"/proc/{child.pid}/comm").read_text() != "ninja\n":
                time.sleep(0.001)  # a new program gets its name a moment after it has begun
            begun.set()
            child.wait()
        raise RuntimeError("not built")

    monkeypatch.setattr("manylora.kernels.flashinfer_attention._why_not", lambda _: None)
    monkeypatch.setattr("manylora.kernels.flashinfer_attention._backend", lambda _: "fa3")
    monkeypatch.setattr(PromptAttention, "try_out", build)
    coming = serving_prompts(stand_in._shape, CPU)
    assert coming is not None
    assert begun.wait(30)
    coming.close()
    coming.thread.join(30)
    assert not coming.thread.is_alive()
    assert coming.plan(ROWS, PageShape(1, 16, 2, 64, 2)) is None
    assert not caplog.records, "nobody asked for it any more"
    coming.close()


def test_a_cpu_does_not_ask_for_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert ops_for(CPU, attention=SHAPE).name == "cpu"
    assert not caplog.records


# ---------------------------------------------------------------- what FlashInfer is told

STAND_IN = '''
import torch

class BatchPrefillWithPagedKVCacheWrapper:
    """What its documentation says of the calls that are made, in plain torch."""

    def __init__(self, workspace, layout, backend):
        assert layout == "NHD"

    def plan(self, qo_indptr, kv_indptr, kv_indices, last_page_len, heads, kv_heads, dim, page_size, *, causal,
             sm_scale, logits_soft_cap, q_data_type, kv_data_type):
        assert causal
        assert all(x.dtype == torch.int32 for x in (qo_indptr, kv_indptr, kv_indices, last_page_len))
        assert len(qo_indptr) == len(kv_indptr) == len(last_page_len) + 1
        assert len(kv_indices) == kv_indptr[-1]
        self.said = (qo_indptr, kv_indptr, kv_indices, last_page_len, heads // kv_heads, page_size, sm_scale)
        self.cap = logits_soft_cap

    def run(self, q, keys_and_values, out):
        qo, kv, indices, last, group, page_size, scale = self.said
        assert len(q) == qo[-1] == len(out)
        for i in range(len(last)):
            pages = indices[kv[i] : kv[i + 1]].long()
            length = max(0, len(pages) - 1) * page_size + int(last[i])
            k, v = (x[pages].flatten(0, 1)[:length].float().repeat_interleave(group, 1) for x in keys_and_values)
            rows = q[qo[i] : qo[i + 1]].float()
            scores = torch.einsum("qhd,khd->hqk", rows, k) * scale
            if self.cap is not None:
                scores = self.cap * torch.tanh(scores / self.cap)
            position = torch.arange(length - len(rows), length)[:, None]
            weights = scores.masked_fill(torch.arange(length) > position, float("-inf")).softmax(-1)
            out[qo[i] : qo[i + 1]] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
'''


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PromptAttention:
    (tmp_path / "flashinfer.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    return made()


def made(**more: float) -> PromptAttention:
    prompts = PromptAttention(AttentionShape(4, 2, 64, torch.float16, **more), CPU, "fa3")  # type: ignore[arg-type]
    sys.modules.pop("flashinfer")
    prompts.try_out()
    return prompts


@pytest.mark.parametrize(
    "lengths",
    [
        [(130, 130)],
        [(1, 5), (129, 200), (1, 9), (1, 1), (140, 141), (150, 150), (1, 7)],
        [(300, 301), (2, 33), (1, 40), (100, 100)],
    ],
)
def test_prompts_between_decoding_rows(stand_in: PromptAttention, lengths: list[tuple[int, int]]) -> None:
    case = attention_case(
        1, device=CPU, dtype=torch.float16, dim=64, heads_per_kv=2, page_tokens=4, lengths=lengths
    )
    scale = 64**-0.5
    planned = stand_in.plan(case.rows, case.page)
    assert planned is not None
    assert planned.serves(case.q, Scores(scale))
    assert not planned.serves(case.q, Scores(scale, 100))
    assert not planned.serves(case.q, Scores(2 * scale))
    assert not planned.serves(case.q.float(), Scores(scale))
    out = torch.full((len(case.q), 256), float("nan"), dtype=torch.float16)
    planned.run(case.q, case.pool, case.layer, out)
    truth = attention_truth(dataclasses.replace(case, scale=scale))
    inside = [length > 1 for length, _ in lengths]
    for row in np.flatnonzero(inside):
        tokens = slice(*case.rows.query_start[row : row + 2])
        assert truth.part(tokens).excess(out[tokens]) <= 1
    first, last = (case.rows.query_start[np.flatnonzero(inside)[n] + (n < 0)] for n in (0, -1))
    assert out[:first].isnan().all()
    assert out[last:].isnan().all()


def test_a_scale_and_a_cap_of_the_model_are_its_own(stand_in: PromptAttention) -> None:
    case = attention_case(
        1, device=CPU, dtype=torch.float16, dim=64, heads_per_kv=2, page_tokens=4, lengths=[(130, 140)]
    )
    case = dataclasses.replace(case, scale=0.3, soft_cap=1.5)
    plain, planned = (
        each.plan(case.rows, case.page) for each in (stand_in, made(own_scale=0.3, soft_cap=1.5))
    )
    assert plain is not None
    assert planned is not None
    assert not plain.serves(case.q, Scores(64**-0.5, soft_cap=1.5))
    assert not planned.serves(case.q, Scores(0.3))
    assert planned.serves(case.q, Scores(0.3, soft_cap=1.5))
    out = torch.empty(130, 256, dtype=torch.float16)
    planned.run(case.q, case.pool, case.layer, out)
    assert attention_truth(case).excess(out) <= 1


@pytest.mark.parametrize("lengths", [[(1, 50)] * 3, [(127, 127)], [(200, 200), (50, 90)], [(1, 500)]])
def test_short_prompts_are_ours(stand_in: PromptAttention, lengths: list[tuple[int, int]]) -> None:
    case = attention_case(
        1, device=CPU, dtype=torch.float16, dim=64, heads_per_kv=2, page_tokens=4, lengths=lengths
    )
    assert stand_in.plan(case.rows, case.page) is None


# ---------------------------------------------------------------- the table of decoding


def test_the_table_chooses_by_rows() -> None:
    few, many = DecodeConfig(32, 4, 5, 264), DecodeConfig(64, 8, 3)
    table = DecodeTable(((4, few), (64, many)))
    assert [table.choice(rows) for rows in (0, 4, 5, 64, 1000)] == [few, few, many, many, many]
    assert DecodeTable().choice(7) == DecodeConfig()


def test_stored_choices_are_of_one_kind_of_heads(tmp_path: Path) -> None:
    row = {"group": 4, "head_dim": 64, "rows": 16, "block_n": 32, "warps": 2, "stages": 4, "programs": 100}
    path = tmp_path / "attention.json"
    path.write_text(json.dumps({"Device": [{**row, "rows": 99, "programs": None}, row]}))
    table = stored_table("Device", 4, 64, path)
    assert table.choice(16) == DecodeConfig(32, 2, 4, 100)
    assert table.choice(17) == DecodeConfig(32, 2, 4, None)
    for other in (("Other", 4, 64), ("Device", 1, 64), ("Device", 4, 128)):
        assert stored_table(*other, path).choice(16) == DecodeConfig()
    assert stored_table("Device", 4, 64, tmp_path / "none.json").choice(1) == DecodeConfig()


def test_the_shipped_table_can_be_launched() -> None:
    for device, rows in json.loads(TABLE.read_text()).items():
        for row in rows:
            table = stored_table(device, row["group"], row["head_dim"])
            config = table.tiles if "tiles" in row else table.choice(row["rows"])
            assert 64 % config.block_n == 0
            assert config.warps in (2, 4, 8)
            if "tiles" in row:
                assert dataclasses.asdict(table.tiles) == row["tiles"]
            else:
                assert table.choice(row["rows"]).programs == row["programs"]


def test_plans_are_cut_as_the_table_says() -> None:
    rows = AttentionRows(
        np.arange(3, dtype=np.int32), np.full(2, 4096, np.int32), np.zeros((2, 256), np.int32)
    )
    page = PageShape(1, 16, 2, 64, 2)

    def pieces(table: DecodeTable) -> int:
        plan = TritonAttentionPlan(page, CPU, 8, table)
        plan.fill(rows)
        return len(plan.records)

    assert pieces(DecodeTable()) == 4
    assert pieces(DecodeTable(((2, DecodeConfig(programs=32)),))) == 16
    assert pieces(DecodeTable(((1, DecodeConfig()), (9, DecodeConfig(programs=64))))) == 32
