"""On a CUDA device: float32 tokens equal the CPU's, bfloat16 logits are as close as transformers' own.

The CPU path is held against transformers + PEFT elsewhere; here the GPU is held against the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manylora import LLM, SamplingParams

DEMO = Path(__file__).parents[2] / "demo"
ADAPTERS = {folder.name: str(folder) for folder in sorted((DEMO / "adapters").iterdir())}
GREEDY = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def workload() -> tuple[list[list[int]], list[str | None]]:
    """Prompts of mixed lengths, some with a shared prefix, over the base and every adapter."""
    generator = np.random.default_rng(0)
    shared = generator.integers(5, 4000, 40).tolist()
    prompts = [generator.integers(5, 4000, int(n)).tolist() for n in generator.integers(1, 150, 48)]
    prompts = [shared + p if i % 3 == 0 else p for i, p in enumerate(prompts)]
    models: list[str | None] = [None, *ADAPTERS]
    return prompts, [models[i % len(models)] for i in range(len(prompts))]


def tokens(**settings: Any) -> list[list[int]]:
    prompts, models = workload()
    with LLM(str(DEMO / "model"), adapters=ADAPTERS, **settings) as llm:
        results = llm.generate(prompts, GREEDY, models)
        stats = llm.stats()
        assert stats.pages_running == 0
        if settings.get("device_pool") == SQUEEZED:
            assert stats.adapter_evictions > 0, "the squeezed pool squeezes"
    return [r.outputs[0].token_ids for r in results]


SQUEEZED = 110 * 32768  # bytes: the largest adapter (71 pages of float32) and a little KV


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens(device="cpu", dtype="float32", device_pool="256MiB")


@pytest.mark.parametrize(
    "settings",
    [
        {"device_pool": "1GiB"},
        {"device_pool": "1GiB", "max_batch_tokens": 64, "max_num_seqs": 16},
        {"device_pool": SQUEEZED},
        {"device_pool": "1GiB", "page_tokens": 1},
    ],
    ids=["plain", "chunked", "squeezed", "page-of-one"],
)
def test_float32_tokens_equal_the_cpus(settings: dict[str, Any], expected: list[list[int]]) -> None:
    got = tokens(device="cuda", dtype="float32", **settings)
    differing = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
    assert not differing, f"requests {differing} differ"


def test_bfloat16_logits_are_as_close_as_transformers_own() -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    prompts, _ = workload()
    names = [None, *ADAPTERS]
    top = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    with LLM(
        str(DEMO / "model"), adapters=ADAPTERS, device="cuda", dtype="bfloat16", device_pool="1GiB"
    ) as llm:
        ours = {
            name: [r.outputs[0].logprobs for r in llm.generate(prompts[:12], top, name)] for name in names
        }
    ours_error, theirs_error = [], []
    for name in names:
        models = {}
        for dtype in (torch.float32, torch.bfloat16):
            model = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=dtype).cuda()
            if name is not None:
                # In the base's own type, as an engine holds adapters; PEFT would keep them in float32.
                model = peft.PeftModel.from_pretrained(model, ADAPTERS[name], autocast_adapter_dtype=False)
                model = model.to(dtype)
            models[dtype] = model.eval()
        for prompt, logprobs in zip(prompts[:12], ours[name], strict=True):
            with torch.inference_mode():
                exact, rough = (
                    models[d](torch.tensor([prompt], device="cuda"))
                    .logits[0, -1]
                    .float()
                    .log_softmax(-1)
                    .cpu()
                    for d in (torch.float32, torch.bfloat16)
                )
            assert logprobs is not None
            ids = list(logprobs[0])
            mine = torch.tensor([logprobs[0][token].logprob for token in ids])
            ours_error.append((mine - exact[ids]).abs().max().item())
            theirs_error.append((rough[ids] - exact[ids]).abs().max().item())
    assert np.mean(ours_error) <= 1.5 * np.mean(theirs_error) + 1e-3, (
        np.mean(ours_error),
        np.mean(theirs_error),
    )
