"""The reference against dense mathematics and against transformers: if it is wrong, everything is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from manylora_lab.bench.reference import ReferenceOps

from manylora.kernels.ops import LoraSite, LoraStep, Rotary, Summands
from manylora.kernels.shapes import PageShape, adapter_geometry
from tests.kernels.cases import attention_case, error, llama_groups, lora_case

CPU = torch.device("cpu")
OPS = ReferenceOps()


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("kv_heads", "heads_per_kv"), [(2, 4), (3, 1), (1, 5)])
def test_attention_is_unpaged_attention(window: int | None, kv_heads: int, heads_per_kv: int) -> None:
    case = attention_case(
        kv_heads,
        device=CPU,
        dtype=torch.float64,
        kv_heads=kv_heads,
        heads_per_kv=heads_per_kv,
        lengths=[(1, 13), (9, 9), (1, 1), (6, 21)],
        window=window,
    )
    plan = OPS.plan_attention(case.rows, case.page, CPU)
    out = OPS.attention(case.q, case.pool, case.layer, plan, case.scores)
    expected = []
    for row, (k, v) in enumerate(zip(case.keys, case.values)):
        q = case.q[case.rows.query_start[row] : case.rows.query_start[row + 1]]
        mask = torch.ones(len(k), len(k), dtype=torch.bool).tril()
        if window is not None:
            mask = mask.triu(1 - window)
        heads = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.repeat_interleave(heads_per_kv, 1).transpose(0, 1),
            v.repeat_interleave(heads_per_kv, 1).transpose(0, 1),
            attn_mask=mask[-len(q) :],
            scale=case.scale,
        )
        expected.append(heads.transpose(0, 1).reshape(len(q), -1))
    assert error(out, torch.cat(expected)) < 1e-12


def test_lora_is_dense_products() -> None:
    page = PageShape(layers=2, page_tokens=4, kv_heads=2, head_dim=12, itemsize=8)
    geometry = adapter_geometry(page, [llama_groups(40, 48, 24, 72)] * page.layers)
    case = lora_case(
        3,
        device=CPU,
        dtype=torch.float64,
        lengths=[(1, 3), (0, 1), (2, 4)],
        ranks=[1, 3, 8],
        geometry=geometry,
    )
    plan = OPS.plan_lora(case.segments, geometry, CPU)
    assert plan is not None
    index = 0
    for group in geometry.groups:
        x = torch.randn(case.num_tokens, group.in_features, dtype=torch.float64)
        y = torch.randn(case.num_tokens, group.offsets[-1], dtype=torch.float64)
        expected = y.clone()
        for i in range(len(group.projections)):
            for s, adapter in enumerate(case.adapters):
                pair = adapter[index]
                if pair is None:
                    continue
                first, length = int(case.segments.start[s]), int(case.segments.length[s])
                scale = float(case.segments.scales[s, index, case.layer])
                delta = x[first : first + length] @ pair[0].T @ pair[1] * scale
                expected[first : first + length, group.offsets[i] : group.offsets[i + 1]] += delta
            index += 1
        OPS.lora(y, x, LoraSite(group, case.layer), LoraStep(case.pool, plan))
        assert error(y, expected) < 1e-12


def test_no_segment_no_plan() -> None:
    page = PageShape(1, 4, 2, 12, 4)
    geometry = adapter_geometry(page, [llama_groups(40, 48, 24, 72)] * page.layers)
    case = lora_case(0, device=CPU, dtype=torch.float32, lengths=[], ranks=[1], geometry=geometry)
    assert OPS.plan_lora(case.segments, geometry, CPU) is None


def test_norms_and_rotation_are_those_of_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 48), torch.randn(5, 48), torch.rand(48)
    norm = llama.LlamaRMSNorm(48, eps=1e-5)
    norm.weight.data.copy_(weight)
    assert error(OPS.rms_norm(x, weight, 1e-5), norm(x)) < 1e-6
    normal, total = OPS.add_rms_norm(Summands(x), residual, weight, 1e-5)
    assert error(total, x + residual) < 1e-7
    assert error(normal, norm(x + residual)) < 1e-6

    q, k, positions = torch.randn(5, 6, 16), torch.randn(5, 2, 16), torch.tensor([3, 0, 11, 7, 7])
    angles = torch.outer(torch.arange(12.0), 0.5 ** torch.arange(8.0))
    full = torch.cat((angles, angles), -1)[positions]
    expected = llama.apply_rotary_pos_emb(
        q[None], k[None], full.cos()[None], full.sin()[None], unsqueeze_dim=2
    )
    pool, rotary = torch.zeros(1, 1, 2, 5, 2, 16), Rotary(angles.cos(), angles.sin())
    turned = OPS.rotate_and_store(q, k, k, pool, 0, rotary, positions, torch.arange(5), None)
    assert error(turned, expected[0][0]) < 1e-6
    assert error(pool[0, 0, 0], expected[1][0]) < 1e-6
    gate_up = torch.randn(5, 14)
    assert error(OPS.gate_mul(gate_up), F.silu(gate_up[:, :7]) * gate_up[:, 7:]) < 1e-6


def test_kv_goes_to_its_slots_and_nowhere_else() -> None:
    pool = torch.zeros(3, 2, 2, 4, 1, 2)
    k, v = torch.ones(2, 1, 2), 2 * torch.ones(2, 1, 2)
    OPS.write_kv(pool, 1, k, v, torch.tensor([5, 11]))
    expected = torch.zeros_like(pool)
    expected[1, 1, 0, 1], expected[1, 1, 1, 1] = 1, 2
    expected[2, 1, 0, 3], expected[2, 1, 1, 3] = 1, 2
    assert torch.equal(pool, expected)
