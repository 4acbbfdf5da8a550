"""Published files as streams: which loader reads which format, and how a file is fitted to a rate and adapters."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

from manylora.config.declaring import ConfigError
from manylora_lab.workloads import (
    alpaca,
    azure_functions,
    chat,
    extracts,
    lora_traces,
    mooncake,
    parallel_text,
    servegen,
)
from manylora_lab.workloads.arrivals import check_load
from manylora_lab.workloads.assembly import NO_TIMES, Adapters, assign, lone_request, with_arrivals
from manylora_lab.workloads.conversations import LMSYS, SHAREGPT, load_arena
from manylora_lab.workloads.popularity import Popularity, check_adapters, mapped_functions, parse_ranks
from manylora_lab.workloads.scenarios import RANKS, THINK_S
from manylora_lab.workloads.stream import Stream, StreamRequest, in_order
from manylora_lab.workloads.taskmaster import TASKMASTER
from manylora_lab.workloads.terms import Form, Number, parse_term, suggestion
from manylora_lab.workloads.traces import AZURE_LLM, BURSTGPT, WHOLE, ReadOptions, TimedTrace

MOONCAKE_STEP_S = 3.0
"""Its conversation trace's timestamps come in such steps; arrivals are spread over them."""
_SERVEGEN_DURATION_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What is asked of a workload. None leaves a part as the file, or the named workload, has it.

    ``rate``: requests a second, in the mean. ``popularity`` draws an adapter for each conversation; without one
    the file's own keys take the adapters in turn (docs of each loader: what a key is). ``skip_bad_lines``: leave
    out a file's malformed lines and count them in the notes; a chat trace cannot do without any.
    """

    rate: float | None = None
    num_adapters: int | None = None
    duration_s: float | None = None
    seed: int = 0
    popularity: str | None = None
    ranks: str | None = None
    skip_bad_lines: bool = False

    def drawn_ranks(self, count: int) -> tuple[int, ...]:
        """FastLibra's 32 and 64 at random (§6.1), or as asked."""
        return parse_ranks(self.ranks or RANKS, count, Random(f"{self.seed} ranks"))

    @property
    def cut_s(self) -> float | None:
        """How much of a file's own time is asked for; None: all, or as much as gives ``num_first`` requests."""
        return self.duration_s if self.rate is None else None

    @property
    def num_first(self) -> int | None:
        """How many of a file's first requests make up the rate for the duration; None: that is not asked for."""
        if self.rate is None or self.duration_s is None:
            return None
        return max(1, round(self.rate * self.duration_s))

    @property
    def limit(self) -> int | None:
        """How many of a file's first requests need be read: one more, which says when the others end."""
        return None if self.num_first is None else self.num_first + 1

    def own_adapters(self) -> Adapters | None:
        """The adapters for the keys that a file has; None where these are not to be used."""
        if self.num_adapters is None or self.popularity is not None:
            return None
        return Adapters.in_turn(self.drawn_ranks(self.num_adapters))

    @property
    def read_all(self) -> ReadOptions:
        """How a whole file is read."""
        adapters = self.own_adapters() or Adapters()
        return ReadOptions(adapters, seed=self.seed, skip_bad_lines=self.skip_bad_lines)

    @property
    def read_part(self) -> ReadOptions:
        """How a file with times is read: no more of it than these options need."""
        return dataclasses.replace(self.read_all, duration_s=self.cut_s, limit=self.limit)


def read_file(path: Path, file_format: str, options: WorkloadOptions) -> Stream:
    """The file as a stream, fitted to the options. Raises ConfigError, in one line."""
    if file_format not in FORMATS:
        known = ", ".join(FORMATS)
        raise ConfigError(
            f"there is no format {file_format!r}; there are {known}{suggestion(file_format, FORMATS)}"
        )
    if not os.path.exists(path):
        raise ConfigError(f"cannot read {path}: there is no such file")
    check_load(
        1.0 if options.rate is None else options.rate,
        1.0 if options.duration_s is None else options.duration_s,
    )
    if options.num_adapters is not None:
        check_adapters(options.num_adapters)
    if options.popularity is not None and options.num_adapters is None:
        raise ConfigError(f"a popularity, {options.popularity}, needs a number of adapters")
    if options.ranks is not None and options.num_adapters is None and not FORMATS[file_format].has_adapters:
        raise ConfigError(f"ranks, {options.ranks}, need a number of adapters")
    stream = FORMATS[file_format].read(path, options)
    if options.popularity is not None and not FORMATS[file_format].has_functions:
        stream = _with_popularity(stream, options.popularity, options)
    stream = _at_rate(stream, options)
    if options.duration_s is None:
        return stream
    kept = tuple(request for request in stream.requests if request.arrival_s < options.duration_s)
    return dataclasses.replace(stream, requests=kept)


def _with_popularity(stream: Stream, popularity: str, options: WorkloadOptions) -> Stream:
    assert options.num_adapters is not None
    draws = Popularity.parse(popularity).draws(options.num_adapters, Random(f"{options.seed} adapters"))
    stream = assign(stream, options.drawn_ranks(options.num_adapters), lambda _first: next(draws))
    return dataclasses.replace(
        stream, notes=(*stream.notes, f"popularity: {popularity}, seed {options.seed}")
    )


def _at_rate(stream: Stream, options: WorkloadOptions) -> Stream:
    if options.rate is None:
        return stream
    if NO_TIMES not in stream.notes:
        return _scaled(stream, options.rate, options.num_first)
    dice = Random(f"{options.seed} arrivals")
    moments = itertools.accumulate(dice.expovariate(options.rate) for _ in itertools.repeat(None))
    lone = all(request.turn == 0 for request in stream.requests)
    stream = with_arrivals(stream, moments, lambda: dice.expovariate(1 / THINK_S))
    note = f"arrivals: at random, {options.rate:g} turns/s"
    if not lone:
        note += f"; from one turn to the next {THINK_S:g} s, exponential, while others can begin (assumed)"
    return dataclasses.replace(stream, notes=(*stream.notes, note))


def _scaled(stream: Stream, rate: float, num_first: int | None) -> Stream:
    """The first ``num_first`` requests, or all, from the first one's arrival on and at this rate."""
    began_s = stream.requests[0].arrival_s
    count, end_s = len(stream.requests), stream.duration_s
    if num_first is not None and num_first < count:
        # Only as many as come within the duration, so that these, not the whole file, have the rate.
        count, end_s = num_first, stream.requests[num_first].arrival_s
    if end_s == began_s:
        raise ConfigError(f"{stream.name}: requests that all come at once have no rate to be scaled")
    return stream.first(count).since(began_s).with_rate(rate * (end_s - began_s) / count)


def _chat(path: Path, options: WorkloadOptions) -> Stream:
    stream = chat.to_stream(chat.read_turns(path))
    if (adapters := options.own_adapters()) is None:
        return stream
    return assign(stream, adapters.ranks, lambda first: adapters.choose(str(first.adapter)))


def _timed(trace: TimedTrace) -> Callable[[Path, WorkloadOptions], Stream]:
    return lambda path, options: trace.load(path, options.read_part)


def _whole(load: Callable[[Path, ReadOptions], Stream]) -> Callable[[Path, WorkloadOptions], Stream]:
    return lambda path, options: load(path, options.read_all)


def _mooncake(path: Path, options: WorkloadOptions) -> Stream:
    return mooncake.load(path, options.read_all, spread_s=MOONCAKE_STEP_S)


def _toppings(path: Path, options: WorkloadOptions) -> Stream:
    count = options.num_adapters if options.popularity is None else None
    ranks = None if count is None else options.drawn_ranks(count)
    return lora_traces.load_toppings(path, ranks, options.read_part)


def _ntrex(path: Path, options: WorkloadOptions) -> Stream:
    """The published folder, a file a language, or a TSV with a column a language."""
    files = parallel_text.ntrex_files(path) if path.is_dir() else {}
    codes = tuple(files) if path.is_dir() else parallel_text.languages(path)
    others = [code for code in codes if code != "eng"]
    pairs = {
        f"{source}-{target}": (source, target)
        for other in others
        for source, target in (("eng", other), (other, "eng"))
    }
    if files and "eng" not in files:
        raise ConfigError(f"{path} has no English file, such as newstest2019-src.eng.txt")

    def read(names: Sequence[str]) -> list[parallel_text.ParallelText]:
        chosen = [pairs[name] for name in names]
        if not files:
            return parallel_text.read_pairs(path, chosen, options.read_all)
        return [_parallel([(files[source], files[target])], options) for source, target in chosen]

    return _translations(list(pairs), read, f"{path} has {len(pairs)} pairs with English", options)


def _opus(folder: Path, options: WorkloadOptions) -> Stream:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder of parallel files")
    pairs = {"-".join(pair): files for pair, files in parallel_text.opus_files(folder).items()}

    def read(names: Sequence[str]) -> list[parallel_text.ParallelText]:
        return [_parallel(pairs[name], options) for name in names]

    return _translations(list(pairs), read, f"{folder} has {len(pairs)} pairs of languages", options)


def _parallel(files: Sequence[tuple[Path, Path]], options: WorkloadOptions) -> parallel_text.ParallelText:
    return parallel_text.joined([parallel_text.read_lines(*sides, options.read_all) for sides in files])


def _translations(
    pairs: Sequence[str],
    read: Callable[[Sequence[str]], Sequence[parallel_text.ParallelText]],
    found: str,
    options: WorkloadOptions,
) -> Stream:
    """As many language pairs as adapters, at random (FastLibra §6.2). ``read``: the texts of pairs."""
    count = options.num_adapters or len(pairs)
    if not pairs or count > len(pairs):
        raise ConfigError(f"{found}, fewer than {max(count, 1)} adapters")
    chosen = Random(f"{options.seed} pairs").sample(pairs, count)
    adapters = Adapters.named(chosen, options.drawn_ranks(count))
    texts = dict(zip(chosen, read(chosen)))
    return parallel_text.load(texts, WHOLE if options.popularity else ReadOptions(adapters))


def _servegen(path: Path, options: WorkloadOptions) -> Stream:
    if path.is_dir():
        clients = servegen.read_folder(path, skip_bad_lines=options.skip_bad_lines)
    else:
        clients = servegen.read_condensed(
            path,
            path.with_name(path.name.replace("rates.csv", "lengths.jsonl")),
            skip_bad_lines=options.skip_bad_lines,
        )
    duration_s = options.duration_s or _SERVEGEN_DURATION_S
    scale, own_rate = 1.0, servegen.mean_rate(clients, duration_s)
    if options.rate is not None and own_rate:
        scale = options.rate / own_rate
    return servegen.generate(
        clients, seed=options.seed, duration_s=duration_s, rate_scale=scale, adapters=options.own_adapters()
    )


_SKEWNESS = {"skewness": Form((Number("functions", 1, 1e6),))}


def _functions_2019(path: Path, options: WorkloadOptions) -> Stream:
    busiest = options.num_adapters if options.popularity is None else None
    calls = azure_functions.load_2019(path, options.read_part, busiest)
    return _functions(calls, options)


def _functions_2021(path: Path, options: WorkloadOptions) -> Stream:
    return _functions(azure_functions.load_2021(path, options.read_all), options)


def _functions(calls: azure_functions.Invocations, options: WorkloadOptions) -> Stream:
    """Function i for adapter i, the busiest of them (FastLibra §6.2), or with ``skewness(k)`` all functions after
    dLoRA §7.1; lengths of first rounds of ShareGPT conversations, as dLoRA takes ShareGPT's."""
    count = options.num_adapters or len(calls.arrivals_s)
    if options.popularity is None:
        calls = calls.busiest(count)
        adapters, mapping = tuple(range(count)), f"the {count} busiest functions, one each"
    else:
        _, (skewness,) = parse_term("a mapping of functions to adapters", options.popularity, _SKEWNESS)
        if not skewness.is_integer():
            raise ConfigError(f"{options.popularity}: functions are a whole number")
        busiest_first = range(len(calls.arrivals_s), 0, -1)
        adapters = mapped_functions(busiest_first, count, int(skewness))
        mapping = f"functions by invocations, {int(skewness)} at a time round and round (dLoRA)"
    dice = Random(f"{options.seed} lengths")
    firsts = [rounds[0] for rounds in extracts.sharegpt_conversations()]

    def requests() -> Iterator[StreamRequest]:
        for number, (moment, function) in enumerate(calls.merged()):
            first = dice.choice(firsts)
            adapter = adapters[function]
            yield lone_request(moment, number, first.new, first.generated, adapter, "azure-functions")

    lengths = "lengths: first rounds of ShareGPT conversations in Llama-2 tokens (Apache-2.0)"
    notes = (*calls.notes, lengths, f"adapters: {mapping}")
    return in_order("azure-functions", requests(), options.drawn_ranks(count), notes)


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """``about`` it, in a line. ``has_functions``: its popularity is a mapping of functions to adapters.

    ``has_adapters``: without a number of adapters the file's own content says how many there are.
    """

    about: str
    read: Callable[[Path, WorkloadOptions], Stream]
    has_functions: bool = False
    has_adapters: bool = False


FORMATS = {
    "chat": Format("multi-turn chat with adapters, JSON lines", _chat),
    "azure-llm": Format("Azure LLM inference traces 2023 and 2024, CSV", _timed(AZURE_LLM)),
    "azure-functions-2019": Format(
        "Azure Functions 2019, invocations by minute, CSV; --popularity skewness(k): dLoRA's mapping",
        _functions_2019,
        has_functions=True,
        has_adapters=True,
    ),
    "azure-functions-2021": Format(
        "Azure Functions 2021, an invocation a line, CSV; likewise",
        _functions_2021,
        has_functions=True,
        has_adapters=True,
    ),
    "mooncake": Format("Mooncake traces with hash_ids, JSON lines", _mooncake),
    "servegen": Format(
        "ServeGen clients: a model's folder, or CSV of rates beside JSON lines of lengths", _servegen
    ),
    lora_traces.TOPPINGS: Format(
        "Toppings artifact's arrivals.csv, with lora_popularity.csv beside it; adapters: 128, 256 or 512",
        _toppings,
    ),
    lora_traces.GENAI: Format(
        "Alibaba's image service with LoRA ids (GenTD26), CSV of lora_requests",
        lambda path, options: lora_traces.load_genai(path, options.read_part),
    ),
    "burstgpt": Format("BurstGPT, CSV", _timed(BURSTGPT)),
    "sharegpt": Format("ShareGPT conversations, JSON; no times", _whole(SHAREGPT.load)),
    "lmsys": Format("LMSYS conversations, JSON; no times", _whole(LMSYS.load)),
    "arena": Format("LMSYS-33k, the Chatbot Arena's conversations and their times, JSON", _whole(load_arena)),
    "taskmaster": Format("Taskmaster dialogs, JSON; no times", _whole(TASKMASTER.load)),
    "alpaca": Format("Alpaca instructions, JSON; no times", _whole(alpaca.load)),
    "ntrex": Format(
        "NTREX-128's folder, or a TSV of languages: an adapter a pair, no times", _ntrex, has_adapters=True
    ),
    "opus": Format(
        "OPUS-100's folder, parallel files at any depth: an adapter a pair, no times",
        _opus,
        has_adapters=True,
    ),
}
"""The formats by the name that ``--format`` takes."""
