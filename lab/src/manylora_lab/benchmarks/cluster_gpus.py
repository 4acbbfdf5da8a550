"""Engines on GPUs of their own behind the router, beside one engine: tokens a second, first tokens, and moves.

    python -m manylora_lab.benchmarks.cluster_gpus --out FILE.json --commit "$(git rev-parse HEAD)"

For a machine with two GPUs. One server after the other, of a shape with dummy weights, each over the same eight
adapters of rank 16 on all projections: ``manylora serve`` alone; the same with ``--replicas 1``; with
``--replicas 2``, behind one front end and behind two.

``load``: so many streams for each GPU at once, 128 tokens of prompt and 128 generated, each with its next request
as soon as one has ended, from client processes: tokens a second within a window, after a rehearsal and a warm-up.
Two replicas are to give at least 1.9 times what one gives. ``lone``: one request after the other on a server that
does nothing else, and the time to its first token: the median is to be at most 1 ms later through the router.

``moves``: a stream of some context on one of two replicas; its longest pause between tokens after a
``manylora cluster move``, less the usual time between them, is what the move costs the client; and again as it
moves back, to where most of its keys and values still lie. The first move of a context is left out: it may
compile kernels. Beside that the bytes of its keys and values, and what they would take (``sending_ms``: a
quotient, nothing is sent) at the bandwidths of ``links``, which are measured here: a copy from GPU to GPU, and one
through the host. ``even_bytes_per_s``: the bandwidth at which sending them would take what the move took.
``drain``: pauses of all streams, half of which move, as their replica is emptied with ``--migrate``.

``--toy`` does all of it on a CPU at the demo model's size. A part that fails is named under ``errors``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from manylora.cluster.node_share import gpus
from manylora.pricing.shapes import SHAPES, ModelShape
from manylora_lab.bench.dummies import DEMO
from manylora_lab.bench.http_client import allow_many_connections
from manylora_lab.bench.http_target import Access, HttpTarget
from manylora_lab.bench.targets import TargetRequest, TargetResult
from manylora_lab.benchmarks.cluster_moves import drained, link_rates, moved, of_moves
from manylora_lab.benchmarks.cluster_servers import (
    CASES,
    REAL,
    TOY,
    Case,
    Scale,
    Server,
    Servers,
    busy_cores,
    prompt_of,
    times_ms,
)
from manylora_lab.benchmarks.run_report import Row, RunReport, run_parser

ASKED_RATIO, ASKED_LATER_MS = 1.9, 1.0
_ANSWER_S = 60.0


# ---------------------------------------------------------------- many at once


@dataclasses.dataclass(frozen=True, slots=True)
class Driven:
    """What one client process saw of the window."""

    tokens: float
    requests: int
    first_s: list[float]
    errors: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Drive:
    """What one client process does: ``streams`` in a closed loop; moments on ``time.monotonic``."""

    access: Access
    number: int
    streams: int
    names: tuple[str | None, ...]
    vocab_size: int
    prompt: int
    output: int
    begin_s: float
    end_s: float


async def drive(work: Drive) -> Driven:
    """See Drive."""
    target = HttpTarget(work.access)
    found = Driven(0.0, 0, [], [])
    tokens = 0.0

    async def stream(place: int) -> None:
        nonlocal tokens
        numbers = itertools.count()
        while time.monotonic() < work.end_s and len(found.errors) < work.streams:
            number = next(numbers)
            name = work.names[(work.number + place + number) % len(work.names)]
            seed = f"{work.begin_s} {work.number} {place} {number}"
            call = TargetRequest(prompt_of(seed, work.prompt, work.vocab_size), work.output, name)
            began_s = time.monotonic()
            result = await target.generate(call)
            if result.error is not None or result.num_tokens != work.output:
                found.errors.append(result.error or f"{result.num_tokens} tokens came, not {work.output}")
                continue
            tokens += within(result, work.begin_s, work.end_s)
            if result.first_s is not None and work.begin_s <= result.first_s < work.end_s:
                found.first_s.append(result.first_s - began_s)

    try:
        async with asyncio.timeout(work.end_s - time.monotonic() + _ANSWER_S):
            await asyncio.gather(*(stream(place) for place in range(work.streams)))
    except TimeoutError:
        found.errors.append("streams did not end")
    await target.close()
    return dataclasses.replace(found, tokens=tokens, requests=len(found.first_s))


def within(result: TargetResult, begin_s: float, end_s: float) -> float:
    """The answer's tokens that came within the window. A delivery is nearly always one token; where it is more,
    all count alike."""
    if result.first_s is None:
        return 0.0
    moments = list(itertools.accumulate(result.itls_s, initial=result.first_s))
    inside = sum(begin_s <= moment < end_s for moment in moments)
    return inside * result.num_tokens / len(moments)


def load(server: Server, scale: Scale, names: tuple[str | None, ...], vocab_size: int) -> Row:
    """Many streams at once, for a while."""
    engines = server.case.engines
    count = min(scale.processes * engines, max(1, (os.cpu_count() or 1) - 1))
    streams = scale.streams * engines
    watching: list[concurrent.futures.Future[dict[str, float]]] = []
    begin_s = 0.0

    def work(number: int) -> Drive:
        nonlocal begin_s
        if not watching:
            begin_s = time.monotonic() + scale.warm_s
            watching.append(pool.submit(busy_cores, server, begin_s, scale.window_s))
        own = streams // count + (number < streams % count)
        return Drive(
            server.access, number, own, names, vocab_size, scale.prompt, scale.output, begin_s,
            begin_s + scale.window_s,
        )  # fmt: skip

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = in_processes(count, work, scale.warm_s + scale.window_s + 2 * _ANSWER_S)
    first_s = [first_s for each in found for first_s in each.first_s]
    errors = [error for each in found for error in each.errors]
    return {
        "case": server.case.name, "replicas": server.case.replicas, "frontends": server.case.frontends,
        "streams": streams, "client_processes": count, "window_s": scale.window_s,
        "tokens_per_s": sum(each.tokens for each in found) / scale.window_s,
        "requests": sum(each.requests for each in found), **times_ms("ttft", first_s),
        "busy_cores": watching[0].result(), "errors": len(errors), "first_errors": errors[:3],
    }  # fmt: skip


def in_processes(count: int, work: Callable[[int], Drive], most_s: float) -> list[Driven]:
    """Of so many processes; what each does is asked for when all run. None is left. Raises TimeoutError, and
    EOFError where one has ended."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        pipes = []
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=drive_as_told, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            stack.callback(mine.close)
            pipes.append(mine)
        for pipe in pipes:
            heard(pipe, _ANSWER_S)
        for number, pipe in enumerate(pipes):
            pipe.send(work(number))
        until_s = time.monotonic() + most_s
        return [heard(pipe, until_s - time.monotonic()) for pipe in pipes]


def heard(pipe: Connection, most_s: float) -> Any:
    """The next message. Raises TimeoutError, and EOFError."""
    if not pipe.poll(max(0.0, most_s)):
        raise TimeoutError("a client process has not answered")
    return pipe.recv()


def drive_as_told(pipe: Connection) -> None:
    """A process's whole life."""
    allow_many_connections()
    pipe.send("ready")
    pipe.send(asyncio.run(drive(pipe.recv())))


# ---------------------------------------------------------------- one at a time


async def lone(server: Server, servers: Servers, vocab_size: int) -> Row:
    """First tokens of requests, one after the other; a first round over all adapters is left out."""
    scale, target = servers.scale, HttpTarget(server.access)
    times, errors = [], []
    async with asyncio.timeout(_ANSWER_S + scale.lone):
        for number in range(-2 * len(servers.names), scale.lone):
            prompt = prompt_of(f"lone {number}", scale.prompt, vocab_size)
            began_s = time.monotonic()
            result = await target.generate(
                TargetRequest(prompt, 4, servers.names[number % len(servers.names)])
            )
            if result.error is not None or result.first_s is None:
                errors.append(result.error or "no token came")
            elif number >= 0:
                times.append(result.first_s - began_s)
    await target.close()
    return {
        "case": server.case.name, "requests": len(times), **times_ms("ttft", times),
        "errors": len(errors), "first_errors": errors[:3],
    }  # fmt: skip


# ---------------------------------------------------------------- the command


def compared(report: RunReport) -> None:
    """Each case's load beside one replica's, and its first tokens beside the plain server's."""
    rates = {row["case"]: row["tokens_per_s"] for row in report.values.get("load", [])}
    first = {row["case"]: row["ttft_p50_ms"] for row in report.values.get("lone", [])}
    report.values["ratio_to_one_replica"] = {
        name: round(rate / rates["one replica"], 4)
        for name, rate in rates.items()
        if rates.get("one replica")
    }
    plain_ms = first.get("server")
    report.values["first_token_later_ms"] = {
        name: round(found_ms - plain_ms, 4)
        for name, found_ms in first.items()
        if plain_ms is not None and found_ms is not None
    }
    report.save()


class Run:
    """The parts, one after the other; what goes wrong in one is written down."""

    def __init__(self, report: RunReport, servers: Servers, shape: ModelShape) -> None:
        self._report, self._servers, self._shape = report, servers, shape

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Anything that is raised ends the part alone."""
        try:
            yield
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {error}"
            self._report.values.setdefault("errors", []).append({"part": name, "error": text})
            self._report.say(f"{name} failed: {text}")
            self._report.save()

    def case(self, case: Case, parts: Sequence[str], environment: Mapping[str, str]) -> None:
        """What is asked of one server."""
        report, scale, vocab_size = self._report, self._servers.scale, self._shape.vocab
        seconds = 60.0 + scale.window_s
        if not report.has(seconds, case.name):
            return
        with self.part(case.name), self._servers.started(case, environment) as server:
            report.note("starts", {"case": case.name, "seconds": server.start_s})
            if "load" in parts:
                with self.part(f"{case.name}: load"):
                    names = tuple(self._servers.names)
                    load(server, self._rehearsal(), names, vocab_size)
                    report.note("load", load(server, scale, names, vocab_size))
            if "lone" in parts:
                with self.part(f"{case.name}: lone"):
                    report.note("lone", asyncio.run(lone(server, self._servers, vocab_size)))
            compared(report)
            if "moves" in parts and case.replicas == 2 and case.frontends == 1:
                self.moves(server)

    def _rehearsal(self) -> Scale:
        scale = self._servers.scale
        is_first = not self._report.values.get("load")
        seconds = scale.rehearse_s if is_first else scale.rehearse_s / 5
        return dataclasses.replace(scale, warm_s=0.0, window_s=seconds)

    def moves(self, server: Server) -> None:
        """See the module."""
        report, scale, vocab_size = self._report, self._servers.scale, self._shape.vocab
        bytes_per_token = self._shape.page_bytes(1)
        links = report.values.get("links", {})
        kinds: list[tuple[int, str | None]] = [(context, None) for context in scale.contexts]
        for context, name in [*kinds, (scale.contexts[1], "adapter-0")]:
            if not report.has(20.0, f"moves {context} {name}"):
                continue
            with self.part(f"moves {context} {name}"):
                # The first one may compile kernels, and read the adapter.
                rows = [
                    asyncio.run(moved(server, scale.longest, context, name, number, vocab_size))
                    for number in range(-1, scale.moves)
                ]
                report.note("moves", of_moves(rows[1:], bytes_per_token, links))
        if report.has(20.0, "drain"):
            with self.part("drain"):
                report.note("drain", asyncio.run(drained(server, self._servers, vocab_size)))


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = run_parser(__doc__, time_budget=560.0)
    parser.add_argument("--shape", default="llama-3-8b", choices=sorted(SHAPES))
    parser.add_argument("--parts", default="load,lone,moves", help="names with commas between")
    parser.add_argument("--cases", default="two,one,server,two-2", help=f"servers, of {', '.join(CASES)}")
    parser.add_argument("--streams", type=int, help="at once for each replica (default: 64)")
    args = parser.parse_args(argv)
    parts, chosen = args.parts.split(","), args.cases.split(",")
    if unknown := ({*parts} - {"load", "lone", "moves"}) | ({*chosen} - {*CASES}):
        parser.error(f"no such part or case: {', '.join(sorted(unknown))}")
    scale, shape = (TOY, DEMO) if args.toy else (REAL, SHAPES[args.shape])
    if args.streams is not None:
        scale = dataclasses.replace(scale, streams=args.streams)
    report = RunReport(args, "the prompts' numbers, and the moment of a load's start", shape=shape.name, asked={
        "ratio_to_one_replica": ASKED_RATIO, "first_token_later_ms": ASKED_LATER_MS,
    })  # fmt: skip
    environment: dict[str, str] = {}
    if not args.toy:
        found, there = len(gpus()), torch.cuda.device_count()
        report.values["gpus"] = {"serve_finds": found, "torch_finds": there}
        if found < 2 <= there:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(there)))
    with Servers(shape, scale) as servers:
        run = Run(report, servers, shape)
        with run.part("links"):
            report.values["links"] = link_rates(args.toy)
            if not args.toy:
                torch.cuda.empty_cache()
        for name in chosen:
            run.case(CASES[name], parts, environment)
    compared(report)
    shown = ("ratio_to_one_replica", "first_token_later_ms", "errors", "left_out")
    print(json.dumps({name: report.values.get(name) for name in shown}), flush=True)


if __name__ == "__main__":
    main()
