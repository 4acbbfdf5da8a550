"""`make demo-cluster`: three replicas behind one port, one of them killed under load, and what clients see of it.

The same streams run twice, undisturbed and with a ``kill -9`` of the replica that has most of them. Exit code 0
where every stream of the second run ended as in the first, text for text.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import openai
from rich.console import Console
from rich.table import Table

from demo.run import BASE, DEMO, server

REPLICAS = 3
ADAPTERS = 8
LIMIT_S = 100.0
"""All of it, but the end."""


@dataclasses.dataclass
class Stream:
    """What a client got: its text, its number of tokens, what went wrong, and the longest time without news."""

    model: str
    text: str = ""
    num_tokens: int = 0
    error: str = ""
    longest_gap_s: float = 0.0


async def follow(client: openai.AsyncOpenAI, model: str, number: int, max_tokens: int) -> Stream:
    """One stream to its end."""
    found = Stream(model)
    last_s = time.monotonic()
    try:
        stream = await client.completions.create(
            model=model,
            prompt=f"Story number {number}. Once upon a time",
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            now = time.monotonic()
            found.longest_gap_s, last_s = max(found.longest_gap_s, now - last_s), now
            if chunk.choices:
                found.text += chunk.choices[0].text
            if chunk.usage:
                found.num_tokens = chunk.usage.completion_tokens
    except openai.OpenAIError as error:
        found.error = str(error)
    return found


async def load(
    client: openai.AsyncOpenAI,
    models: list[str],
    num_streams: int,
    max_tokens: int,
    meanwhile: Callable[[], Awaitable[None]] | None = None,
) -> list[Stream]:
    """All streams at once, models taking turns; ``meanwhile`` something may be done to the cluster."""
    tasks = [
        asyncio.create_task(follow(client, models[number % len(models)], number, max_tokens))
        for number in range(num_streams)
    ]
    if meanwhile is not None:
        await meanwhile()
    return await asyncio.gather(*tasks)


async def cluster_status(address: str) -> dict[str, Any]:
    """``GET /cluster``."""

    def read() -> dict[str, Any]:
        with urllib.request.urlopen(f"{address}/cluster", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    return await asyncio.to_thread(read)


async def wait_replicas(address: str) -> list[dict[str, Any]]:
    """All replicas, once all of them run."""
    while True:
        replicas: list[dict[str, Any]] = (await cluster_status(address))["replicas"]
        if [each["state"] for each in replicas] == ["running"] * REPLICAS:
            return replicas
        await asyncio.sleep(0.1)


async def kill_busiest(address: str, console: Console) -> None:
    """``kill -9`` of the replica with most of the streams, once each has some."""
    while True:
        replicas = (await cluster_status(address))["replicas"]
        if all(each["requests"] for each in replicas):
            break
        await asyncio.sleep(0.02)
    busiest = max(replicas, key=lambda each: int(each["requests"]))
    os.kill(busiest["pid"], signal.SIGKILL)
    console.print(
        f"kill -9 of replica {busiest['id']} (pid {busiest['pid']}), with {busiest['requests']} streams"
    )


def show(console: Console, before: list[Stream], after: list[Stream], status: dict[str, Any]) -> bool:
    """What the death did to the clients; whether that was nothing."""
    table = Table(title="what clients saw")
    table.add_column("")
    for column in ("undisturbed", "with the kill"):
        table.add_column(column, justify="right")
    equal = sum(one.text == other.text for one, other in zip(before, after, strict=True))
    runs = before, after
    table.add_row("streams", *(str(len(run)) for run in runs))
    table.add_row("errors", *(str(sum(bool(each.error) for each in run)) for run in runs))
    table.add_row("tokens", *(str(sum(each.num_tokens for each in run)) for run in runs))
    table.add_row("texts as undisturbed", "", f"{equal} of {len(after)}")
    table.add_row(
        "longest time without a token, ms",
        *(f"{max(each.longest_gap_s for each in run) * 1e3:.0f}" for run in runs),
    )
    console.print(table)
    router, frontends = status["router"], status["frontends"]
    again = sum(each["recomputed_tokens"] for each in frontends)
    console.print(
        f"streams that went on at another replica: {router['moved'].get('lost', 0)}; tokens of prompts and "
        f"answers computed again for that: {again}; replicas now: "
        + ", ".join(f"{each['id']} {each['state']} (life {each['epoch']})" for each in status["replicas"])
    )
    errors = [each.error for each in (*before, *after) if each.error]
    for error in errors:
        console.print(f"error: {error}", style="red")
    is_nothing = not errors and equal == len(after)
    console.print("What it did to the clients: " + ("nothing." if is_nothing else "see above."))
    return is_nothing


async def run(address: str, console: Console, models: list[str], num_streams: int, max_tokens: int) -> bool:
    """The whole demonstration; whether clients saw nothing of it."""
    async with asyncio.timeout(LIMIT_S):
        await wait_replicas(address)
        console.print(
            f"{REPLICAS} replicas behind {address}, {len(models) - 1} adapters: {', '.join(models[1:])}"
        )
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            before = await load(client, models, num_streams, max_tokens)
            after = await load(
                client, models, num_streams, max_tokens, lambda: kill_busiest(address, console)
            )
        await wait_replicas(address)
        return show(console, before, after, await cluster_status(address))


def main() -> int:
    """The exit code: 0 where clients saw nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=36)
    parser.add_argument("--max-tokens", type=int, default=200)
    args = parser.parse_args()
    console = Console()
    names = sorted(folder.name for folder in (DEMO / "adapters").iterdir())[:ADAPTERS]
    adapters = [word for name in names for word in ("--adapter", f"{name}={DEMO / 'adapters' / name}")]
    pools = ("--device-pool", "64MiB", "--host-pool", "16MiB", "--max-adapter-rank", "64")
    with tempfile.TemporaryDirectory() as folder:
        own = ("--replicas", str(REPLICAS), "--router", "round-robin", "--cluster-dir", f"{folder}/cluster")
        with server(console, *own, *adapters, *pools) as address:
            try:
                is_nothing = asyncio.run(run(address, console, [BASE, *names], args.streams, args.max_tokens))
            except TimeoutError:
                console.print(f"not done within {LIMIT_S:g} s", style="red")
                return 1
    return 0 if is_nothing else 1


if __name__ == "__main__":
    raise SystemExit(main())
