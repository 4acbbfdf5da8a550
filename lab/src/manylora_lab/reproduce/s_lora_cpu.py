"""S-LoRA's Table 3 on a CPU: the engine, the real PEFT and merged copies, on the demo model of a checkout.

All requests come at once. Needs torch, and transformers and PEFT, which the user installs.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from manylora.config.declaring import ConfigError
from manylora.flags import build_settings
from manylora_lab.bench.targets import EngineTarget, TargetRequest, open_engine
from manylora_lab.reproduce.experiment import Setup
from manylora_lab.reproduce.report import Row
from manylora_lab.reproduce.s_lora_baselines import batches, by_adapter
from manylora_lab.workloads.stream import StreamRequest
from manylora_lab.workloads.synthetic import Synthetic, synthetic

DEMO = Path(__file__).resolve().parents[4] / "demo"
MOST_COPIES = 5
"""Of a card of 80 GiB, Llama-7B's weights of 13.5 GB leave room for so many copies; taken over to the demo."""
PEFT_BATCH = 50
_FIRST_TOKEN, _VOCABULARY = 5, 4096
NOTES = (
    "The demo model on a CPU in float32 for Llama on an A100, all requests at once for arrivals over two minutes: "
    "compare the ratios. Adapters beyond the demo's are its own under other names, loaded on their own.",
    "peft: transformers + PEFT, every adapter in memory; batches of one adapter, left-padded, at most 50 "
    "requests, each generated to its longest output.",
    "vllm-packed: for each adapter an engine (this one, not vLLM) on merged weights, one after another: an ideal "
    f"share of the machine. More than {MOST_COPIES} count as out of memory, as on the paper's card.",
    "Torch works in one thread for every system: where others use the cores, a second one made PEFT nine times "
    "slower.",
    "Loading is not counted; every system has served something before, s-lora every adapter.",
)
_Measured = tuple[list[Row], dict[str, object], tuple[str, ...]]


def measure_all(setup: Setup) -> _Measured:
    """A row for each number of adapters and system, settings and notes. Raises ConfigError."""
    _require()
    from manylora_lab.bench.kernels.timing import one_thread

    numbers: Sequence[int] = setup.pick((2, 5, 25, 100), (2, 5, 25), (2,))
    num_requests = setup.pick(200, 50, 4)
    longest = setup.pick(128, 64, 8)
    repeats = setup.pick(3, 1, 1)
    rows: list[Row] = []
    for num_adapters in numbers:
        folders = _folders(num_adapters)
        lengths = f"uniform(8,{longest})"
        parts = Synthetic("at-once", prompt=lengths, output=lengths)
        stream = synthetic(
            parts, rate=num_requests, num_adapters=num_adapters, duration_s=1.0, seed=setup.seed
        )
        for system, run in (("s-lora", _with_adapters), ("vllm-packed", _with_copies), ("peft", _with_peft)):
            setup.show(f"{len(rows)} of {3 * len(numbers)} measured; {num_adapters} adapters: {system}")
            with one_thread():
                seconds = run(stream.requests, folders, repeats)
            rate = None if seconds is None else round(num_requests / seconds, 4)
            rows.append(
                {
                    "case": f"demo, {num_adapters}", "system": system, "num_adapters": num_adapters,
                    "requests": num_requests, "throughput_per_s": rate,
                }
            )  # fmt: skip
    settings = {
        "requests": num_requests,
        "lengths": lengths,
        "repeats": repeats,
        "model": "demo",
        "threads": 1,
    }
    return rows, settings, NOTES


def _require() -> None:
    if not (DEMO / "model").is_dir():
        raise ConfigError("s-lora-table3 on a CPU needs the demo model of a checkout; --device sim does not")
    for package in ("transformers", "peft"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"s-lora-table3 on a CPU needs {package}; --device sim does not")


def _folders(count: int) -> dict[str, Path]:
    """The folders of so many adapters by name, the demo's again and again."""
    found = sorted(folder for folder in (DEMO / "adapters").iterdir() if folder.is_dir())
    return {f"adapter-{number}": found[number % len(found)] for number in range(count)}


def _name(request: StreamRequest) -> str:
    return f"adapter-{request.adapter}"


def _prompt(request: StreamRequest) -> tuple[int, ...]:
    dice = Random(f"prompt {request.conversation}")
    return tuple(dice.randrange(_FIRST_TOKEN, _VOCABULARY) for _ in range(request.new_tokens))


def _median_s(run: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


# ---------------------------------------------------------------- engines


def _with_adapters(requests: Sequence[StreamRequest], folders: dict[str, Path], repeats: int) -> float:
    """One engine that serves all adapters, with S-LoRA's cache policy."""
    return asyncio.run(_serve(DEMO / "model", requests, folders, repeats))


def _with_copies(requests: Sequence[StreamRequest], folders: dict[str, Path], repeats: int) -> float | None:
    """The sum over merged copies; None for more than fit."""
    if len(folders) > MOST_COPIES:
        return None
    total_s = 0.0
    for mine in by_adapter(requests).values():
        with tempfile.TemporaryDirectory() as folder:
            _merge(folders[_name(mine[0])], folder)
            total_s += asyncio.run(_serve(Path(folder), mine, {}, repeats))
    return total_s


async def _serve(
    model: Path, requests: Sequence[StreamRequest], folders: dict[str, Path], repeats: int
) -> float:
    adapters = {name: str(folder) for name, folder in folders.items()}
    settings, _ = build_settings(
        {
            "model": str(model), "device": "cpu", "dtype": "float32", "cache_policy": "s-lora",
            "adapter": adapters or None,
        }
    )  # fmt: skip
    target = open_engine(settings)
    calls = [TargetRequest(_prompt(r), r.output_tokens, _name(r) if folders else None) for r in requests]
    try:
        await _ask(target, [TargetRequest(calls[0].prompt, 2, name) for name in folders or (None,)])
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            await _ask(target, calls)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)
    finally:
        await target.close()


async def _ask(target: EngineTarget, calls: Sequence[TargetRequest]) -> None:
    for answer in await asyncio.gather(*(target.generate(call) for call in calls)):
        if answer.error is not None:
            raise ConfigError(f"a request was not served: {answer.error}")


# ---------------------------------------------------------------- transformers and PEFT


def _base() -> Any:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def _merge(adapter: Path, folder: str) -> None:
    import peft

    peft.PeftModel.from_pretrained(_base(), str(adapter)).merge_and_unload().save_pretrained(folder)


def _with_peft(requests: Sequence[StreamRequest], folders: dict[str, Path], repeats: int) -> float:
    """Each adapter's requests in batches, one adapter after the other."""
    import peft
    import torch

    (first, folder), *others = folders.items()
    model = peft.PeftModel.from_pretrained(_base(), str(folder), adapter_name=first)
    for name, folder in others:
        model.load_adapter(str(folder), adapter_name=name)
    model.eval()

    def generate(batch: Sequence[StreamRequest]) -> None:
        model.set_adapter(_name(batch[0]))
        longest = max(request.new_tokens for request in batch)
        num_new = max(request.output_tokens for request in batch)
        gaps = [longest - request.new_tokens for request in batch]
        ids = [[0] * gap + [*_prompt(request)] for gap, request in zip(gaps, batch, strict=True)]
        mask = [[0] * gap + [1] * (longest - gap) for gap in gaps]
        model.generate(
            input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), max_new_tokens=num_new,
            min_new_tokens=num_new, do_sample=False, pad_token_id=0,
        )  # fmt: skip

    def run() -> None:
        for batch in batches(requests, PEFT_BATCH):
            generate(batch)

    with torch.inference_mode():
        generate(requests[:1])
        return _median_s(run, repeats)
