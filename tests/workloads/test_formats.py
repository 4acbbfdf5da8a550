"""Files by the name of their format: synthetic rows, real schema."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from manylora_lab.workloads.formats import FORMATS, WorkloadOptions, read_file
from manylora_lab.workloads.stream import Stream

from manylora.config.declaring import ConfigError


def read(path: Path, name: str, **options: object) -> Stream:
    return read_file(path, name, WorkloadOptions(**options))  # type: ignore[arg-type]


@pytest.fixture
def opus(tmp_path: Path) -> Path:
    """As OPUS-100 is unpacked: two files a pair, line i the translation of line i."""
    for stem, sides in {
        "opus.de-en-test": {"de": "Guten Tag\nDanke\n", "en": "Good day\nThanks a lot\n"},
        "opus.en-fr-test": {"en": "Yes\n", "fr": "Oui\n"},
    }.items():
        for language, text in sides.items():
            (tmp_path / f"{stem}.{language}").write_text(text)
    (tmp_path / "LICENSE.txt").write_text("one file alone is no pair")
    return tmp_path


def test_parallel_files_are_adapters(opus: Path) -> None:
    stream = read(opus, "opus")
    assert len(stream.ranks) == 4  # two pairs, both ways
    assert len(stream.requests) == 2 * 2 + 2 * 1
    assert len({request.adapter for request in stream.requests}) == 4
    assert len(read(opus, "opus", num_adapters=2).ranks) == 2


def test_opus_as_unpacked_is_an_adapter_a_pair(tmp_path: Path) -> None:
    for pair in ("supervised/de-en", "supervised/en-fr", "zero-shot/de-fr"):
        folder = tmp_path / pair
        folder.mkdir(parents=True)
        for split in ("train", "dev", "test") if pair.startswith("supervised") else ("test",):
            for language in folder.name.split("-"):
                (folder / f"opus.{folder.name}-{split}.{language}").write_text(f"{split} 1\n{split} 2\n")
    (tmp_path / "supervised" / "README.txt").write_text("no pair")
    stream = read(tmp_path, "opus")
    assert len(stream.ranks) == 3 * 2
    assert len(stream.requests) == 3 * 2 * 2
    assert len(read(tmp_path / "supervised", "opus").ranks) == 2 * 2
    assert len(read(tmp_path / "supervised" / "de-en", "opus").ranks) == 2


def test_ntrex_as_published_is_a_file_a_language(tmp_path: Path) -> None:
    texts = {"src.eng": "Yes\nGood day\n", "ref.deu": "Ja\nGuten Tag\n", "ref.zho-CN": "Y\nG\n"}
    for name, text in texts.items():
        (tmp_path / f"newstest2019-{name}.txt").write_text(text)
    (tmp_path / "DOCUMENT_IDS.tsv").write_text("a\nb\n")
    stream = read(tmp_path, "ntrex")
    assert len(stream.ranks) == 2 * 2
    assert len(stream.requests) == 2 * 2 * 2
    (tmp_path / "newstest2019-src.eng.txt").unlink()
    with pytest.raises(ConfigError, match="has no English file"):
        read(tmp_path, "ntrex")
    with pytest.raises(ConfigError, match="0 pairs with English"):
        read(tmp_path.parent, "ntrex")


MOONCAKE = '{{"timestamp": {}, "input_length": 8, "output_length": 2, "hash_ids": [{}]}}\n'
BURSTGPT = "{},ChatGPT,8,2,10,API log\n"
CHAT = (
    '{{"arrival_s": {}, "conversation": {}, "turn": 0, "adapter": 0, "rank": 8, "history_tokens": 0, '
    '"user_tokens": 8, "reply_tokens": 2}}\n'
)


@pytest.mark.parametrize(
    ("name", "header", "line", "ticks"),
    [
        ("mooncake", "", MOONCAKE, 1000),
        ("burstgpt", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n", BURSTGPT, 1),
        ("chat", "", CHAT, 1),
    ],
)
def test_a_file_that_begins_late_is_spread_over_the_duration(
    tmp_path: Path, name: str, header: str, line: str, ticks: int
) -> None:
    path = tmp_path / "late"
    path.write_text(header + "".join(line.format(ticks * (10**6 + 7 * i), i) for i in range(100)))
    stream = read(path, name, rate=2.0, duration_s=20.0)
    assert len(stream.requests) == 40
    assert stream.requests[0].arrival_s < 2
    assert stream.requests[20].arrival_s == pytest.approx(10, abs=2)
    if name != "chat":  # whose times are those of its own beginning
        assert len(read(path, name, duration_s=70.0).requests) in range(9, 11)


def test_a_file_of_malformed_lines_alone_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("{}\n[]\n")
    with pytest.raises(
        ConfigError, match=r"mooncake has no requests \(bad.jsonl: 2 malformed lines left out\)"
    ):
        read(path, "mooncake", skip_bad_lines=True)


def test_the_rate_of_conversations_without_times(tmp_path: Path) -> None:
    said = [{"from": speaker, "value": "word " * 9} for speaker in ("human", "gpt")] * 12
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"id": str(i), "conversations": said} for i in range(60)]))
    for duration_s in (30.0, 120.0):
        stream = read(path, "sharegpt", rate=4.0, duration_s=duration_s)
        assert len(stream.requests) == pytest.approx(4 * duration_s, rel=0.25)
    whole = read(path, "sharegpt", rate=4.0)
    assert len(whole.requests) == 60 * 12
    assert 60 * 12 / whole.duration_s == pytest.approx(4, rel=0.1)
    assert max(request.turn for request in whole.first(200).requests) > 0  # turns before all have begun


def test_bad_folders_are_one_line(opus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"4 pairs .* fewer than 9 adapters"):
        read(opus, "opus", num_adapters=9)
    with pytest.raises(ConfigError, match="not a folder"):
        read(opus / "LICENSE.txt", "opus")
    (opus / "opus.en-fr-test.fr").write_text("Oui\nNon\n")
    with pytest.raises(ConfigError, match=r"opus.en-fr-test.en, line 2: expected as many lines"):
        read(opus, "opus")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="0 pairs"):
        read(empty, "opus")


def test_the_arena_has_times_and_models(tmp_path: Path) -> None:
    def dialog(reply: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": reply}]

    rows = [
        {
            "question_id": str(number), "model_a": "koala", "model_b": "gpt", "winner": "tie", "turn": 1,
            "conversation_a": dialog("Hi"), "conversation_b": dialog("Good day"), "language": "English",
            "tstamp": 100.0 + 3 * number, "anony": True,
        }
        for number in range(2)
    ]  # fmt: skip
    path = tmp_path / "arena.json"
    path.write_text(json.dumps(rows))
    stream = read(path, "arena", num_adapters=2)
    assert [request.arrival_s for request in stream.requests] == [0.0, 0.0, 3.0, 3.0]
    assert len(stream.ranks) == 2


def test_gzipped_parallel_files(opus: Path) -> None:
    for path in opus.glob("opus.*"):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert len(read(opus, "opus").requests) == 6


def test_braces_in_a_path(tmp_path: Path) -> None:
    path = tmp_path / "{0}.tsv"
    path.write_text("eng\tdeu\nYes\tJa\n")
    assert len(read(path, "ntrex").requests) == 2
    with pytest.raises(ConfigError, match=r"\{0\}.tsv has 2 pairs with English, fewer than 3 adapters"):
        read(path, "ntrex", num_adapters=3)
    path.write_text("eng\tdeu\tdeu\nYes\tJa\tJa\n")
    with pytest.raises(ConfigError, match="line 1: expected a header that has each language once"):
        read(path, "ntrex")


@pytest.mark.parametrize("name", FORMATS)
def test_adapters_and_ranks_that_make_no_sense(name: str, opus: Path) -> None:
    for count in (0, -1):
        with pytest.raises(ConfigError, match=f"number of adapters must be .* got {count}"):
            read(opus, name, num_adapters=count)
    if not FORMATS[name].has_adapters:
        with pytest.raises(ConfigError, match="ranks, 16, need a number of adapters"):
            read(opus, name, ranks="16")


def test_a_mapping_takes_whole_functions(tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    path.write_text("function,1,2\na,3,1\nb,1,1\n")
    with pytest.raises(ConfigError, match="functions are a whole number"):
        read(path, "azure-functions-2019", num_adapters=2, popularity="skewness(1.5)")


def test_a_rate_needs_no_more_of_a_day_than_its_requests(tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    minutes = range(1, 1441)
    path.write_text(f"function,{','.join(map(str, minutes))}\na{',100000' * 1440}\nb{',2' * 1440}\n")
    stream = read(path, "azure-functions-2019", rate=2.0, duration_s=50.0, num_adapters=1)
    assert len(stream.requests) == 100
    path.write_text("function,1,2\na,100,1000000\nb,5,1\n")
    assert len(read(path, "azure-functions-2019", duration_s=60.0).requests) == 105
    assert read(path, "azure-functions-2019", duration_s=30.0).duration_s < 30


def test_servegen_at_a_rate_makes_only_that(tmp_path: Path) -> None:
    rates, lengths = tmp_path / "m_client_rates.csv", tmp_path / "m_client_lengths.jsonl"
    rows = [f"0,{start},{rate},1,Gamma,1,1" for start, rate in ((0, 100000), (600, 50000))]
    rates.write_text("\n".join(["client,t_s,rate_rps,cv,pattern,p0,p1", *rows]))
    lengths.write_text('{"client": 0, "input_tokens": {"q": [1, 9]}, "output_tokens": {"q": [1, 9]}}')
    stream = read(rates, "servegen", rate=2.0, duration_s=1200.0)
    assert len(stream.requests) == pytest.approx(2400, abs=2)
    with pytest.raises(ConfigError, match="100000 requests a second for 600 seconds are more than"):
        read(rates, "servegen")
