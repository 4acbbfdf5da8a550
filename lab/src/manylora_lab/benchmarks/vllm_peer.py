"""vLLM on the requests that ``h200_aims`` serves, so that both can be measured on one machine in one hour.

Needs a vLLM in the environment (0.26 is what the records are made with). Parts, each with an engine in a process
of its own: ``base`` (1,000 requests at once without LoRA, by ``LLM.generate``), ``lora`` (the same over adapters
of rank 16, by popularity), ``chat`` (the shipped traces over 100 adapters, by ``AsyncLLM``; other turns before,
unmeasured, and no prefix kept from one rate to the next). Dummy weights, prompts of random tokens, greedy,
``ignore_eos``, no text. From the repository's root:

    python -m manylora_lab.benchmarks.vllm_peer --parts base,lora --out vllm.json
    python -m manylora_lab.benchmarks.vllm_peer --parts chat --rates 10,20 --out vllm_chat.json
    python -m manylora_lab.benchmarks.vllm_peer --parts chat --set kv_offloading_backend='"native"' \\
        --set kv_offloading_size=48 --set max_loras=50 --out vllm_offloading.json

``--set`` names an engine's argument and its value as JSON. What does not fit into ``--time-budget`` seconds is
left out and named; an engine that takes longer is ended, and the rows that it has told stay.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from manylora.models.config import read_model_config
from manylora.warmup import write_random_adapters
from manylora_lab.bench.dummies import DEMO, write_model
from manylora_lab.bench.profile import projections_of
from manylora_lab.bench.replay import ReplaySettings
from manylora_lab.bench.serve import measure
from manylora_lab.bench.targets import TargetRequest, TargetResult, has_ids
from manylora_lab.benchmarks.chat_runs import (
    REAL,
    REHEARSAL_SEED,
    REHEARSED_TURNS,
    TOY,
    ChatScale,
    loads_from,
    stream_of,
    turns_of,
)
from manylora_lab.benchmarks.offline_runs import (
    NUM_ADAPTERS,
    RANK,
    TOY_ADAPTERS,
    name_of,
    read_offline_rows,
)
from manylora_lab.benchmarks.run_report import Row, RunReport, run_parser
from manylora_lab.pricing.shapes import SHAPES, ModelShape

GIB = 2**30
POSITIONS = 4096
OFFLINE: Row = {
    "max_model_len": 2048, "enable_prefix_caching": False, "kv_cache_memory_bytes": 64 * GIB, "max_num_seqs": 32,
}  # fmt: skip
ENGINES: dict[str, Row] = {
    "base": OFFLINE,
    "lora": {
        **OFFLINE, "enable_lora": True, "max_loras": 32, "max_cpu_loras": NUM_ADAPTERS, "max_lora_rank": RANK,
    },
    "chat": {
        "max_model_len": POSITIONS, "enable_prefix_caching": True, "kv_cache_memory_bytes": 10 * GIB,
        "max_num_seqs": REAL.max_num_seqs, "max_num_batched_tokens": 8192, "enable_lora": True,
        "max_loras": 20, "max_cpu_loras": REAL.num_adapters, "max_lora_rank": max(REAL.ranks),
    },
}  # fmt: skip
"""An engine's arguments, by part. 20 slots of rank 64 take 2.6 GiB of chat's: 12.6 with the KV, our pool's."""
MODULES = {"lora": "all", "chat": "attention"}
"""Of the adapters of a part that has some."""
EXPECTED_S = {"base": 130.0, "lora": 215.0, "chat": 165.0}
"""The start of an engine where nothing is compiled, and its first row."""
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
_LOOK_S = 0.5


# ---------------------------------------------------------------- an engine's process


def serve(args: argparse.Namespace) -> None:
    """Be the process of an engine; rows go to ``--out``, a line each."""
    folder, out = Path(args.folder), Path(args.out)
    settings, vocab = engine_settings(args, args.serve), shape_of(args).vocab
    adapters = {path.name: str(path) for path in folder.glob("adapters/adapter-*")}
    if args.serve == "chat":
        asyncio.run(serve_chat(settings, adapters, vocab, args, out))
    else:
        popularities = args.popularities.split(",") if args.serve == "lora" else [None]
        serve_offline(settings, adapters, popularities, vocab, read_offline_rows(args.toy), out)
    sys.stdout.flush()
    os._exit(0)  # an engine's own end may wait for its processes, which the parent ends


def shape_of(args: argparse.Namespace) -> ModelShape:
    return DEMO if args.toy else SHAPES[args.shape]


def scale_of(args: argparse.Namespace) -> ChatScale:
    """Of chat."""
    return TOY if args.toy else REAL


def engine_settings(args: argparse.Namespace, part: str) -> Row:
    """The engine's arguments."""
    row: Row = {
        "model": str(Path(args.folder) / "model"), "load_format": "dummy", "dtype": "bfloat16",
        "skip_tokenizer_init": True, "seed": 0, **ENGINES[part],
    }  # fmt: skip
    if part in MODULES:
        projections = projections_of(read_model_config(Path(row["model"])), MODULES[part])
        row["lora_target_modules"] = sorted({one.module.rpartition(".")[2] for one in projections})
    return row | {name: json.loads(value) for name, value in (one.split("=", 1) for one in args.set)}


def tell(out: Path, row: Row) -> None:
    """For the process that writes the record."""
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")


def serve_offline(
    settings: Row,
    adapters: dict[str, str],
    popularities: Sequence[str | None],
    vocab: int,
    rows: Sequence[dict[str, int]],
    out: Path,
) -> None:
    """All requests at once, by popularity; tells a row each."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    began_s = time.monotonic()
    llm = LLM(**settings)
    start_s = time.monotonic() - began_s
    dice = random.Random(0)

    def lora(number: int | None) -> Any:
        name = name_of(number)
        return None if number is None or name is None else LoRARequest(name, number + 1, adapters[name])

    def run(lengths: Sequence[tuple[int, int]], models: Sequence[int | None]) -> tuple[int, float]:
        """Tokens that came, and seconds."""
        prompts = [{"prompt_token_ids": dice.choices(range(3, vocab), k=length)} for length, _ in lengths]
        params = [
            SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
            for _, count in lengths
        ]
        named = [lora(number) for number in models] if adapters else None
        began_s = time.monotonic()
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=named)
        return sum(len(one.outputs[0].token_ids) for one in outputs), time.monotonic() - began_s

    for number in range(len(adapters)):
        llm.llm_engine.add_lora(lora(number))
    warm = [number % len(adapters) if adapters else None for number in range(2 * settings["max_num_seqs"])]
    run([(200, 24)] * len(warm), warm)
    run([(700, 16)] * 8, warm[:8])
    lengths = [(row["prompt_tokens"], row["output_tokens"]) for row in rows]
    for popularity in popularities:
        chosen = [None if popularity is None else row[popularity] % len(adapters) for row in rows]
        num_tokens, seconds = run(lengths, chosen)
        assert num_tokens == sum(count for _, count in lengths)
        row = {"max_num_seqs": settings["max_num_seqs"], "popularity": popularity, "seconds": seconds}
        tell(out, {**row, "tokens": num_tokens, "tokens_per_s": num_tokens / seconds, "start_s": start_s})


class VllmTarget:
    """``bench.targets.Target`` on an engine of this process."""

    is_exact = True

    def __init__(self, engine: Any, adapters: dict[str, str], vocab: int, max_model_len: int) -> None:
        self.description: dict[str, Any] = {"kind": f"vLLM {metadata.version('vllm')} in process"}
        self.vocab_size: int | None = vocab
        self.max_model_len: int | None = max_model_len
        self.adapters = frozenset(adapters)
        self._engine = engine
        self._paths = adapters
        self._numbers = {name: number for number, name in enumerate(adapters, 1)}
        self._num_asked = 0

    async def generate(self, call: TargetRequest) -> TargetResult:
        """See Target."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        if not has_ids(call.prompt):
            return TargetResult(error="an engine in this process takes token ids")
        params = SamplingParams(
            max_tokens=call.max_tokens, temperature=0.0, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        name, prompt = call.adapter, {"prompt_token_ids": list(call.prompt)}
        lora = None if name is None else LoRARequest(name, self._numbers[name], self._paths[name])
        self._num_asked += 1
        answer, told = TargetResult(), str(self._num_asked)
        try:
            async for output in self._engine.generate(prompt, params, told, lora_request=lora):
                if output.outputs and (tokens := output.outputs[0].token_ids):
                    if answer.first_s is None:
                        answer.cached_tokens = output.num_cached_tokens or 0
                    answer.delivered(time.monotonic())
                    answer.tokens.extend(tokens)
        except Exception as error:  # whatever an engine raises is the request's failure
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    async def counters(self) -> dict[str, float]:
        """See Target."""
        return {}

    async def lost(self) -> str | None:
        """See Target."""
        return "the engine has died" if self._engine.errored else None

    async def close(self) -> None:
        """See Target."""
        self._engine.shutdown()


async def serve_chat(
    settings: Row, adapters: dict[str, str], vocab: int, args: argparse.Namespace, out: Path
) -> None:
    """The traces by rate; tells a row each."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    began_s = time.monotonic()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
    start_s = time.monotonic() - began_s
    target = VllmTarget(engine, adapters, vocab, settings["max_model_len"])
    scale = scale_of(args)
    rehearsed = stream_of(list(turns_of("20", scale)[:REHEARSED_TURNS]), scale)
    await measure(target, rehearsed, ReplaySettings(REHEARSAL_SEED), True, sorted(adapters))
    for load in loads_from(args.rates):
        await engine.reset_prefix_cache()
        found = await measure(target, load.stream(scale), ReplaySettings())
        tell(out, {"offered_per_s": load.offered_per_s, "summary": found.summary, "start_s": start_s})


# ---------------------------------------------------------------- the record


def run_part(part: str, args: argparse.Namespace, report: RunReport) -> None:
    """An engine's process from its start to its end; its rows are noted as they come."""
    with tempfile.TemporaryDirectory() as scratch:
        args.folder, out = scratch, Path(scratch) / "rows.jsonl"
        model = write_model(Path(scratch) / "model", shape_of(args), POSITIONS)
        if part in MODULES:
            config, scale = read_model_config(model), scale_of(args)
            ranks, count = (scale.ranks, scale.num_adapters)
            if part == "lora":
                ranks, count = (RANK,), TOY_ADAPTERS if args.toy else NUM_ADAPTERS
            folder, projections = Path(scratch) / "adapters", projections_of(config, MODULES[part])
            write_random_adapters(folder, config, "bfloat16", ranks, count, projections)
        report.values.setdefault("engines", {})[part] = {
            **engine_settings(args, part),
            "model": shape_of(args).name,
        }
        words = [
            sys.executable,
            "-m",
            "manylora_lab.benchmarks.vllm_peer",
            "--serve",
            part,
            "--folder",
            scratch,
        ]
        words += ["--out", str(out), "--shape", args.shape, "--rates", args.rates]
        words += ["--toy"] if args.toy else []
        words += ["--popularities", args.popularities, *(word for one in args.set for word in ("--set", one))]
        out.touch()
        environment, is_running = {**os.environ, **ENVIRONMENT}, True
        with out.open() as rows, subprocess.Popen(words, env=environment, start_new_session=True) as child:
            try:
                while is_running and report.left_s() > 0:
                    time.sleep(_LOOK_S)
                    is_running = child.poll() is None  # before the last rows are read
                    for line in rows:
                        report.note(part, json.loads(line))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # and what it has started
        if is_running or child.returncode:
            report.values["left_out"].append(f"{part}: {'no time' if is_running else 'the engine failed'}")
            report.say(report.values["left_out"][-1])


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = run_parser(__doc__, time_budget=550.0)
    parser.add_argument("--parts", default="base,lora,chat")
    parser.add_argument("--shape", default="llama-2-7b", choices=list(SHAPES))
    parser.add_argument("--popularities", default="distinct,identical,uniform", help="of lora; or skewed")
    parser.add_argument("--rates", default="10,20", help="of chat, as those of h200_aims")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="of every engine")
    parser.add_argument("--serve", choices=list(ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        serve(args)
        return
    parts = args.parts.split(",")
    if unknown := set(parts) - set(ENGINES):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(ENGINES)}")
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        parser.error("there is no vllm in this environment")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an engine's processes must not outlive this one
    report = RunReport(args, "0 of chat's tokens and of the other prompts", vllm=version)
    for part in parts:
        if report.has(EXPECTED_S[part], part):
            run_part(part, args, report)
    report.save()


if __name__ == "__main__":
    main()
