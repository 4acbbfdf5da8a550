"""Traces that name LoRA adapters: the Toppings artifact's arrivals and popularity, and Alibaba's image service.

Neither states a licence, so nothing of them is shipped. Neither has lengths of texts: what is missing is drawn
from first rounds of ShareGPT conversations. Sources and columns: docs/workloads.md.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

import msgspec

from manylora.config.declaring import ConfigError
from manylora_lab.workloads import extracts
from manylora_lab.workloads.assembly import BYTES_PER_TOKEN, lone_request
from manylora_lab.workloads.rows import Count, Number, Positive, RowType
from manylora_lab.workloads.stream import Stream, StreamRequest, in_order
from manylora_lab.workloads.text_file import BadLine, TextFile, decimal, string, whole
from manylora_lab.workloads.traces import WHOLE, ReadOptions

TOPPINGS, GENAI = "toppings-maf-lora", "genai-lora-trace"
_LENGTHS = "first rounds of ShareGPT conversations in Llama-2 tokens (Apache-2.0)"


class _Arrival(msgspec.Struct, frozen=True):
    num_loras: Positive
    t_s: Number


class _Popularity(msgspec.Struct, frozen=True):
    num_loras: Positive
    lora_id: Count
    probability: Number


def load_toppings(
    path: Path | str, ranks: Sequence[int] | None = None, options: ReadOptions = WHOLE
) -> Stream:
    """The arrivals of the file's set of as many adapters as there are ``ranks``, the most popular first; None:
    of its smallest set, and all requests are the base's.

    ``path``: ``arrivals.csv`` (num_loras, t_s) with ``lora_popularity.csv`` (num_loras, lora_id, probability)
    beside it, or their folder; either may be gzipped. As in the artifact each request's adapter is drawn by
    popularity alone. Raises ConfigError.
    """
    arrivals_path, popularity_path = _toppings_files(Path(path))
    arrivals, weights = (TextFile(each, options.skip_bad_lines) for each in (arrivals_path, popularity_path))
    moments: dict[int, list[float]] = collections.defaultdict(list)
    for arrival in arrivals.rows(RowType(_Arrival).columns, RowType(_Arrival)):
        moments[arrival.num_loras].append(arrival.t_s)
    shares: dict[int, list[float]] = collections.defaultdict(list)
    for popular in weights.rows(RowType(_Popularity).columns, RowType(_Popularity)):
        shares[popular.num_loras].append(popular.probability)
    sizes = sorted(moments.keys() & shares.keys())
    if not sizes:
        raise ConfigError(f"{arrivals_path} and {popularity_path} have no number of adapters in common")
    chosen = sizes[0] if ranks is None else len(ranks)
    if chosen not in sizes:
        raise ConfigError(f"{arrivals_path} is of {' or '.join(map(str, sizes))} adapters, not {chosen}")
    popularity = sorted(shares[chosen], reverse=True)
    if len(popularity) != chosen:
        raise ConfigError(f"{popularity_path} has {len(popularity)} probabilities for {chosen} adapters")
    if not sum(popularity):
        raise ConfigError(f"{popularity_path}: no adapter of the {chosen} is ever asked for")
    draws, lengths = Random(f"{options.seed} adapters"), Random(f"{options.seed} lengths")
    cumulated = list(itertools.accumulate(popularity))
    firsts = [rounds[0] for rounds in extracts.sharegpt_conversations()]
    began_s = min(moments[chosen])
    requests: list[StreamRequest] = []
    for number, moment in enumerate(sorted(moments[chosen])[: options.limit]):
        (adapter,) = draws.choices(range(chosen), cum_weights=cumulated)
        first = lengths.choice(firsts)
        served = None if ranks is None else adapter
        requests.append(lone_request(moment - began_s, number, first.new, first.generated, served, TOPPINGS))
    notes = (
        f"Toppings artifact, no licence stated: arrivals and popularity of {chosen} adapters",
        f"lengths: {_LENGTHS}",
        *arrivals.notes,
        *weights.notes,
    )
    return in_order(TOPPINGS, requests, ranks or (), notes)


def _toppings_files(path: Path) -> tuple[Path, Path]:
    if not path.is_dir():
        return path, path.with_name(path.name.replace("arrivals", "lora_popularity"))
    found = []
    for name in ("arrivals", "lora_popularity"):
        each = [path / f"{name}.csv{end}" for end in ("", ".gz") if (path / f"{name}.csv{end}").exists()]
        if not each:
            raise ConfigError(f"{path} has no {name}.csv")
        found.append(each[0])
    return found[0], found[1]


class _Job(msgspec.Struct, frozen=True):
    """``lora``: the first of the request's; "": it has none."""

    t_s: float
    prompt_chars: int
    lora: str


_COLUMNS = ("t_s", "prompt_chars", "loras")


def load_genai(path: Path | str, options: ReadOptions = WHOLE) -> Stream:
    """The requests with a time: t_s, prompt_chars (may be empty), loras (adapters' names, a semicolon between).

    Key of a request: the first of its adapters; those without any are the base's. A token for every four
    characters of the prompt; replies, which an image service has not, are drawn. Raises ConfigError.
    """
    file = TextFile(path, options.skip_bad_lines)
    untimed = 0
    lengths = Random(f"{options.seed} lengths")
    replies = [rounds[0].generated for rounds in extracts.sharegpt_conversations()]

    def requests() -> Iterator[StreamRequest]:
        nonlocal untimed
        began_s: float | None = None
        number = 0
        for job in file.rows(_COLUMNS, _job):
            if job is None:
                untimed += 1
                continue
            began_s = job.t_s if began_s is None else began_s
            after_s = job.t_s - began_s
            if number == options.limit or (options.duration_s is not None and after_s >= options.duration_s):
                break
            adapter = options.adapters.choose(job.lora) if job.lora else None
            num_tokens = max(-(-job.prompt_chars // BYTES_PER_TOKEN), 1)
            yield lone_request(after_s, number, num_tokens, max(lengths.choice(replies), 1), adapter, GENAI)
            number += 1

    found = list(requests())
    notes = (
        "Alibaba's image service (GenTD26), no licence stated: real arrivals and adapters",
        f"lengths: a token for every {BYTES_PER_TOKEN} characters; replies of {_LENGTHS}",
        *((f"{untimed} requests without a time left out",) if untimed else ()),
        *file.notes,
    )
    return in_order(GENAI, found, options.adapters.ranks, notes)


def _job(row: Mapping[str, str]) -> _Job | None:
    """None: without a time."""
    if not row["t_s"]:
        return None
    chars = whole(row, "prompt_chars") if row["prompt_chars"] else 0
    lora = string(row, "loras").partition(";")[0].strip()
    if row["loras"] and not lora:
        raise BadLine("loras, names with a semicolon between", row["loras"])
    return _Job(decimal(row, "t_s"), chars, lora)
