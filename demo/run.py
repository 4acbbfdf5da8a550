"""`make demo`: a real server, all shipped adapters, a mixed concurrent load, and what came back.

Starts ``manylora serve`` on a free port, sends prompts through the official ``openai`` client, many at once
and each to its own model, and prints every adapter's answer beside the base model's and a table per model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import openai
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

DEMO = Path(__file__).parent
BASE = "manylora-demo"
MAX_TOKENS = 48
START_LIMIT_S = 90.0


@dataclasses.dataclass(frozen=True)
class Task:
    """One prompt for one model; ``prompt`` is text or chat messages."""

    model: str
    prompt: str | list[dict[str, str]]

    @property
    def shown(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back, and when: seconds from sending to the first and the last token."""

    task: Task
    text: str
    num_tokens: int
    ttft_s: float
    total_s: float

    @property
    def tpot_s(self) -> float:
        return (self.total_s - self.ttft_s) / max(1, self.num_tokens - 1)


def load_tasks() -> list[Task]:
    """The shipped prompts, by model."""
    prompts = json.loads((DEMO / "prompts.json").read_text(encoding="utf-8"))
    return [
        Task(BASE if item["model"] == "base" else item["model"], item.get("prompt") or item["messages"])
        for item in prompts
    ]


@contextlib.contextmanager
def server(console: Console, *args: str) -> Iterator[str]:
    """A running server's address, with the shipped adapters unless ``args`` say otherwise; it is stopped in the
    end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "manylora", "serve", str(DEMO / "model"), "--served-model-name", BASE,
        "--port", str(port), *(args or ("--adapter-dir", str(DEMO / "adapters"))),
    ]  # fmt: skip
    environment = {**os.environ, "MANYLORA_LOG_LEVEL": "WARNING"}
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, env=environment)
    try:
        with console.status("starting the server"):
            wait_until_healthy(address, process)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def wait_until_healthy(address: str, process: subprocess.Popen[bytes]) -> None:
    """Returns when /health answers 200; raises SystemExit when the server ended or takes too long."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with exit code {process.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=1):
            return
        time.sleep(0.1)
    raise SystemExit("the server did not come up in time")


async def ask(client: openai.AsyncOpenAI, task: Task, model: str, temperature: float = 0.0) -> Answer:
    """Stream one answer."""
    began = time.perf_counter()
    first: float | None = None
    text, num_tokens = "", 0
    options: dict[str, Any] = {
        "model": model,
        "temperature": temperature,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if isinstance(task.prompt, str):
        stream = await client.completions.create(prompt=task.prompt, **options)
    else:
        stream = await client.chat.completions.create(messages=task.prompt, **options)
    async for chunk in stream:
        if chunk.choices:
            first = first or time.perf_counter()
            choice = chunk.choices[0]
            text += (choice.text if isinstance(task.prompt, str) else choice.delta.content) or ""
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
    ended = time.perf_counter()
    return Answer(task, text, num_tokens, (first or ended) - began, ended - began)


async def mixed_load(
    client: openai.AsyncOpenAI, tasks: list[Task], num_requests: int, concurrency: int, progress: Progress
) -> list[Answer]:
    """``num_requests`` sampled answers, models taking turns, ``concurrency`` at a time."""
    bar = progress.add_task("requests", total=num_requests)
    gate = asyncio.Semaphore(concurrency)
    by_model: dict[str, list[Task]] = {}
    for task in tasks:
        by_model.setdefault(task.model, []).append(task)
    models = list(by_model)

    async def one(index: int) -> Answer:
        mine = by_model[models[index % len(models)]]
        async with gate:
            task = mine[index // len(models) % len(mine)]
            answer = await ask(client, task, task.model, temperature=0.7)
        progress.advance(bar)
        return answer

    return list(await asyncio.gather(*[one(index) for index in range(num_requests)]))


async def compare(client: openai.AsyncOpenAI, tasks: list[Task]) -> list[tuple[Answer, Answer]]:
    """Each adapter's answer to its first prompt, and the base model's to the same: all at once."""
    firsts = {task.model: task for task in reversed(tasks) if task.model != BASE}
    chosen = list(reversed(firsts.values()))
    answers = await asyncio.gather(
        *[ask(client, task, task.model) for task in chosen], *[ask(client, task, BASE) for task in chosen]
    )
    return list(zip(answers[: len(chosen)], answers[len(chosen) :], strict=True))


def show_answers(console: Console, pairs: list[tuple[Answer, Answer]]) -> None:
    table = Table(title="the same prompt, with and without the adapter (greedy)", show_lines=True)
    for column in ("adapter", "prompt", "adapter's answer", "base model's answer"):
        table.add_column(column, overflow="fold", ratio=1 if column == "adapter" else 3)
    for adapted, base in pairs:
        table.add_row(adapted.task.model, adapted.task.shown, adapted.text.strip(), base.text.strip())
    console.print(table)


def show_load(console: Console, answers: list[Answer], wall_s: float) -> None:
    table = Table(title=f"mixed load: {len(answers)} requests in {wall_s:.1f} s")
    table.add_column("model")
    for column in ("requests", "TTFT mean ms", "TPOT mean ms", "tokens", "tokens/s"):
        table.add_column(column, justify="right")
    models = dict.fromkeys(answer.task.model for answer in answers)
    for model in [*models, "all"]:
        mine = [a for a in answers if model in (a.task.model, "all")]
        tokens = sum(a.num_tokens for a in mine)
        table.add_row(
            model,
            str(len(mine)),
            f"{mean(a.ttft_s for a in mine) * 1e3:.0f}",
            f"{mean(a.tpot_s for a in mine) * 1e3:.1f}",
            str(tokens),
            f"{tokens / wall_s:.0f}",
            end_section=model == list(models)[-1],
        )
    console.print(table)


async def run(address: str, console: Console, num_requests: int, concurrency: int) -> None:
    """The whole demonstration against a running server."""
    tasks = load_tasks()
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        served = [model.id async for model in client.models.list()]
        console.print(f"one base model and {len(served) - 1} adapters, one process: {', '.join(served[1:])}")
        pairs = await compare(client, tasks)
        show_answers(console, pairs)
        began = time.perf_counter()
        with Progress(console=console, transient=True) as progress:
            answers = await mixed_load(client, tasks, num_requests, concurrency, progress)
        show_load(console, answers, time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--svg", metavar="FILE", help="also save what is shown as a picture")
    args = parser.parse_args()
    console = Console(record=args.svg is not None, width=120 if args.svg else None)
    with server(console) as address:
        asyncio.run(run(address, console, args.requests, args.concurrency))
    if args.svg:
        console.save_svg(args.svg, title="make demo")


if __name__ == "__main__":
    main()
