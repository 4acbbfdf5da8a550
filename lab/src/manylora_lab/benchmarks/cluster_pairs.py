"""What a router before one replica costs: the demo's server beside a cluster of one, in interleaved pairs.

    python -m manylora_lab.benchmarks.cluster_pairs --pairs 15 --out FILE.json

Both stay up and take turns with the same requests over HTTP: 64 streams at once over the base and eight adapters,
32 words of prompt and 128 generated tokens, greedy; then 24 requests of one token, one after the other, for the
time to the first token. A pair gives the ratio of the rates and the difference of the median times; shown are
medians of the pairs with bootstrap 95 % intervals. All texts must be equal.

``--tls FOLDER``: a cluster of one whose links are encrypted beside one whose links are not. The folder has ca.crt,
link.crt and link.key for 127.0.0.1, as docs/cluster.md makes them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manylora_lab.bench.http_client import HttpClient
from manylora_lab.bench.provenance import ROOT, Provenance, add_flags
from manylora_lab.benchmarks.pairs import interval

STREAMS, PROMPT_WORDS, GENERATE, ADAPTERS, ALONE = 64, 32, 128, 8, 24
START_S, END_S = 120.0, 30.0
_TOLD = 4000
"""Characters of a log, its last."""
DEMO = ROOT / "demo"
NAMES = sorted(folder.name for folder in (DEMO / "adapters").iterdir())[:ADAPTERS]


@contextlib.contextmanager
def server(folder: Path, *args: str) -> Iterator[str]:
    """``manylora serve`` on the demo; its address."""
    demo = (str(DEMO / "model"), "--served-model-name", "demo", "--adapter-dir", str(DEMO / "adapters"))
    with serving(folder, *demo, "--device", "cpu", *args) as url:
        yield url


@contextlib.contextmanager
def serving(folder: Path, *args: str, start_s: float = START_S, **more: str) -> Iterator[str]:
    """``manylora serve`` with these words; its address, when it has one. ``folder``: where its log lies. ``more``:
    of its environment. Raises SystemExit where it has none within ``start_s``."""
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "manylora", "serve", *args, "--port", "0"],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **more}, stdin=subprocess.DEVNULL, stdout=file,
            stderr=file,
        )  # fmt: skip
    try:
        until_s = time.monotonic() + start_s
        while (found := re.search(r"on (http://[\d.]+:\d+)", log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"the server does not start:\n{log.read_text()[-_TOLD:]}")
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:  # its children end with it
            process.kill()
            process.wait()


def body(seed: int, number: int, max_tokens: int) -> bytes:
    """A request's, of words that no other has."""
    words = " ".join(f"w{(seed * 7919 + number * 104_729 + place) % 9973}" for place in range(PROMPT_WORDS))
    asked = {
        "model": ["demo", *NAMES][number % (ADAPTERS + 1)],
        "prompt": words,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return json.dumps(asked).encode()


async def ask(client: HttpClient, sent: bytes) -> tuple[float, str]:
    """Seconds to the first token, and the text."""
    began_s = time.perf_counter()
    first_s, texts = 0.0, []

    def hear(line: bytes) -> None:
        nonlocal first_s
        if line.startswith(b"data: {"):
            first_s = first_s or time.perf_counter() - began_s
            texts.append(json.loads(line[6:])["choices"][0]["text"])

    await client.send("POST", "/v1/completions", sent, hear)
    return first_s, "".join(texts)


async def turn(url: str, seed: int) -> tuple[float, float, list[str]]:
    """Tokens a second of all streams together, the median time to the first token of lone requests, and texts."""
    client = HttpClient(url)
    began_s = time.perf_counter()
    answers = await asyncio.gather(*(ask(client, body(seed, number, GENERATE)) for number in range(STREAMS)))
    seconds = time.perf_counter() - began_s
    alone = [await ask(client, body(seed, STREAMS + number, 1)) for number in range(ALONE)]
    await client.close()
    first_s = statistics.median(first_s for first_s, _ in alone)
    return STREAMS * GENERATE / seconds, first_s, [text for _, text in [*answers, *alone]]


def measure(pairs: int, args: list[str], tls: Path | None) -> dict[str, Any]:
    """The pairs; the first one warms up and is left out."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        first: list[str] = []
        second = ["--replicas", "1", "--cluster-dir", str(folder / "second" / "cluster")]
        if tls is not None:
            first = ["--replicas", "1", "--cluster-dir", str(folder / "first" / "cluster")]
            files = {"cert": "link.crt", "key": "link.key", "ca": "ca.crt"}
            second += [
                word for name, file in files.items() for word in (f"--cluster-tls-{name}", str(tls / file))
            ]
        urls = []
        for name, words in (("first", first), ("second", second)):
            (folder / name).mkdir()
            urls.append(stack.enter_context(server(folder / name, *words, *args)))
        found, differing = [], 0
        for seed in range(pairs + 1):
            turns = (0, 1) if seed % 2 else (1, 0)  # neither is always first
            results = {number: asyncio.run(turn(urls[number], seed)) for number in turns}
            differing += sum(one != other for one, other in zip(results[0][2], results[1][2], strict=True))
            found.append([results[number][:2] for number in (0, 1)])
    rates = [cluster[0] / one[0] for one, cluster in found[1:]]
    later_ms = [1e3 * (cluster[1] - one[1]) for one, cluster in found[1:]]
    return {
        "tokens_per_s": [[round(rate, 1) for rate, _ in pair] for pair in found[1:]],
        "first_token_ms": [[round(1e3 * first_s, 3) for _, first_s in pair] for pair in found[1:]],
        "rate_ratio_median": round(statistics.median(rates), 4),
        "rate_ratio_interval": [round(value, 4) for value in interval(rates)],
        "first_token_later_ms_median": round(statistics.median(later_ms), 3),
        "first_token_later_ms_interval": [round(value, 3) for value in interval(later_ms)],
        "answers": (pairs + 1) * (STREAMS + ALONE),
        "answers_that_differ": differing,
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--serve-args", nargs="*", default=[], help="more of `manylora serve`, for both")
    parser.add_argument("--tls", type=Path, metavar="FOLDER", help="compare encrypted links with plain ones")
    parser.add_argument("--out", type=Path)
    add_flags(parser)
    args = parser.parse_args()
    recording = Provenance.of(args, "the pair's number")
    found = measure(args.pairs, args.serve_args, args.tls)
    print(
        json.dumps({name: found[name] for name in found if name.endswith(("median", "interval", "differ"))})
    )
    if args.out:
        report = {"benchmark": "cluster_pairs", **found, "provenance": recording.provenance()}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
