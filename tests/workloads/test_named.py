"""The catalogue: every name gives a stream, files are fitted to the options, bad names are refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from manylora_lab.workloads.chat import TRACES
from manylora_lab.workloads.describe import describe
from manylora_lab.workloads.formats import FORMATS
from manylora_lab.workloads.named import catalogue, named

from manylora.config.declaring import ConfigError

CHAT = TRACES / "chat_5rps.jsonl.gz"


@pytest.mark.parametrize("name", catalogue())
def test_every_name_gives_a_stream(name: str) -> None:
    stream = named(name, rate=10.0, num_adapters=8, duration_s=20.0, seed=3)
    assert len(stream.ranks) == 8
    assert 100 < len(stream.requests) < 320
    assert stream.duration_s < 20
    assert stream == named(name, rate=10.0, num_adapters=8, duration_s=20.0, seed=3)


@pytest.mark.parametrize("name", ["chatbot", "s-lora-s2", "synthetic"])
def test_names_have_loads_of_their_own(name: str) -> None:
    stream = named(name)
    expected = {"chatbot": (2880, 100), "s-lora-s2": (3000, 200), "synthetic": (600, 200)}[name]
    assert len(stream.requests) == pytest.approx(expected[0], rel=0.15)
    assert len(stream.ranks) == expected[1]
    if name == "s-lora-s2":
        assert stream.ranks[:5] == (64, 32, 16, 8, 64)


def test_synthetic_parts_and_what_overrides_them() -> None:
    text = (
        "synthetic: arrivals=even, popularity=round-robin, prompt=uniform(3,3), output=7, ranks=cycle(8,16)"
    )
    stream = named(text, rate=2.0, num_adapters=3, duration_s=3.0)
    assert [r.arrival_s for r in stream.requests] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert [r.adapter for r in stream.requests] == [0, 1, 2, 0, 1, 2]
    assert {(r.new_tokens, r.output_tokens) for r in stream.requests} == {(3, 7)}
    assert stream.ranks == (8, 16, 8)
    other = named(text, rate=2.0, num_adapters=3, duration_s=3.0, popularity="identical", ranks="4")
    assert {r.adapter for r in other.requests} == {0}
    assert other.ranks == (4, 4, 4)


def test_a_chat_file_as_it_is_and_as_wished() -> None:
    stream = named(str(CHAT), file_format="chat")
    assert (len(stream.requests), describe(stream)["conversations"]) == (225, 70)
    faster = named(str(CHAT), file_format="chat", rate=50.0, duration_s=2.0)
    assert len(faster.requests) == 100
    assert faster.duration_s < 2
    assert [r.prompt for r in faster.requests] == [r.prompt for r in stream.requests[:100]]
    slower = named(str(CHAT), file_format="chat", rate=1.0)
    assert slower.duration_s == pytest.approx(225)
    cut = named(str(CHAT), file_format="chat", duration_s=10.0)
    assert cut.requests == tuple(r for r in stream.requests if r.arrival_s < 10)
    skewed = named(str(CHAT), file_format="chat", num_adapters=2, popularity="identical")
    assert {r.adapter for r in skewed.requests} == {0}


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def two_columns(first: str, second: str, count: int) -> list[str]:
    return [first, *([second] * count)]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A few rows in each published schema: synthetic rows, real schema."""
    minutes = ",".join(str(minute) for minute in range(1, 11))
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder / "chunk-0-trace.csv", *(f"{600 * i},0.5,1.0,Gamma,1.0,2.0" for i in range(2)))
    lengths = {"input_tokens": "{100: 0.5, 200: 0.5}", "output_tokens": "{10: 1.0}"}
    write(folder / "chunk-0-dataset.json", json.dumps({"0": lengths}))
    shares = [f"{count},{lora},{1 / count}" for count in (4, 8, 12) for lora in range(count)]
    write(tmp_path / "lora_popularity.csv", "num_loras,lora_id,probability", *shares)
    opus = tmp_path / "opus"
    opus.mkdir()
    for stem, language in (("opus.de-en-test", "de"), ("opus.en-fr-test", "fr")):
        write(opus / f"{stem}.en", *(["one sentence"] * 9))
        write(opus / f"{stem}.{language}", *(["ein Satz"] * 9))
    dialog = [["user", "two tickets for tonight please"], ["agent", "which film do you want to see?"]] * 3
    said = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "hello to you"}]
    told = [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "hello to you"}]
    return {
        "chat": str(CHAT),
        "azure-llm": write(
            tmp_path / "azure.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            *(f"2023-11-16 18:17:{second:02d}.9799600,300,40" for second in range(40)),
        ),
        "azure-functions-2019": write(
            tmp_path / "2019.csv",
            f"HashFunction,{minutes}",
            *(f"f{number},{','.join([str(20 - number)] * 10)}" for number in range(12)),
        ),
        "azure-functions-2021": write(
            tmp_path / "2021.csv",
            "app,func,end_timestamp,duration",
            *(f"a,f{number % 8},{number + 1.5},0.5" for number in range(80)),
        ),
        "mooncake": write(
            tmp_path / "mooncake.jsonl",
            *(
                {"timestamp": 3000 * i, "input_length": 1000, "output_length": 9, "hash_ids": [0, i % 9]}
                for i in range(40)
            ),
        ),
        "servegen": str(folder),
        "toppings-maf-lora": write(
            tmp_path / "arrivals.csv",
            "num_loras,t_s",
            *(f"{count},{second}" for second in range(40) for count in (4, 8, 12)),
        ),
        "genai-lora-trace": write(
            tmp_path / "lora_requests.csv",
            "t_s,prompt_chars,loras",
            *(f"{second},40,L{second % 8}" for second in range(40)),
        ),
        "burstgpt": write(
            tmp_path / "burst.csv",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            *(f"{second},ChatGPT,100,20,120,Conversation log" for second in range(40)),
        ),
        "sharegpt": write(
            tmp_path / "share.json",
            json.dumps([{"id": f"c{number}", "conversations": told * 3} for number in range(20)]),
        ),
        "lmsys": write(
            tmp_path / "lmsys.jsonl",
            *(
                {
                    "conversation_id": str(i), "model": f"m{i % 8}", "conversation": said, "turn": 1,
                    "language": "English",
                }
                for i in range(40)
            ),
        ),
        "arena": write(
            tmp_path / "arena.jsonl",
            *(
                {
                    "model_a": f"m{i % 8}", "model_b": f"m{i % 5}", "conversation_a": said,
                    "conversation_b": said, "language": "English", "tstamp": 1682351590.0 + 3 * i,
                }
                for i in range(20)
            ),
        ),
        "opus": str(opus),
        "taskmaster": write(
            tmp_path / "tm.jsonl", *({"conversation_id": f"d{i}", "turns": dialog} for i in range(20))
        ),
        "alpaca": write(
            tmp_path / "alpaca.json",
            json.dumps([{"instruction": "Name a colour.", "input": "", "output": "Blue it is."}] * 40),
        ),
        "ntrex": write(
            tmp_path / "ntrex.tsv", "eng\tdeu\tfra", *(["one sentence\tein Satz\tune phrase"] * 9)
        ),
    }  # fmt: skip


@pytest.mark.parametrize("file_format", FORMATS)
def test_every_format_is_read_and_fitted(files: dict[str, str], file_format: str) -> None:
    path = files[file_format]
    whole = named(path, file_format=file_format)
    assert len(whole.requests) >= 20
    fitted = named(path, file_format=file_format, rate=2.0, duration_s=10.0, num_adapters=4, seed=1)
    assert fitted.duration_s < 10
    assert 8 <= len(fitted.requests) <= 32
    assert len(fitted.ranks) == 4
    assert {r.adapter for r in fitted.requests} <= {0, 1, 2, 3}
    assert None not in {r.adapter for r in fitted.requests}
    if not FORMATS[file_format].has_functions:
        drawn = named(path, file_format=file_format, num_adapters=3, popularity="identical")
        assert {r.adapter for r in drawn.requests} == {0}


def test_functions_are_mapped_as_fastlibra_or_as_dlora_does(files: dict[str, str]) -> None:
    path = files["azure-functions-2019"]
    one_each = named(path, file_format="azure-functions-2019", num_adapters=3)
    assert Counter(r.adapter for r in one_each.requests) == {0: 200, 1: 190, 2: 180}
    mapped = named(path, file_format="azure-functions-2019", num_adapters=2, popularity="skewness(5)")
    # 12 functions of 200, 190, ..., 90 calls: five, five, and two again.
    assert Counter(r.adapter for r in mapped.requests) == {0: 900 + 190, 1: 650}
    with pytest.raises(ConfigError, match="not a mapping of functions"):
        named(path, file_format="azure-functions-2019", num_adapters=2, popularity="zipf(1)")
    with pytest.raises(ConfigError, match="12 functions, 50 are asked for"):
        named(path, file_format="azure-functions-2019", num_adapters=50)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("chatbto", {}, "no workload and no file 'chatbto'; .* did you mean chatbot"),
        ("", {}, "no workload"),
        (str(CHAT), {}, "is a file: name its format, one of chat, azure-llm"),
        (str(CHAT), {"file_format": "mooncak"}, "no format 'mooncak'; .* did you mean mooncake"),
        (str(CHAT), {"file_format": "azure-llm"}, "line 1: expected a header"),
        ("nowhere.csv", {"file_format": "azure-llm"}, "cannot read nowhere.csv"),
        (str(CHAT), {"file_format": "chat", "popularity": "zipf(1)"}, "needs a number of adapters"),
        (str(CHAT), {"file_format": "chat", "rate": -1.0}, "rate must be"),
        (str(CHAT), {"file_format": "chat", "duration_s": 1e-9}, "no requests"),
        ("synthetic:promt=5", {}, "did you mean prompt"),
        ("synthetic:prompt", {}, "no part of a synthetic workload"),
        ("synthetic:prompt=5,prompt=6", {}, "one prompt, not two"),
        ("synthetic:prompt=uniform(1,2", {}, "'2' is no part"),
        ("synthetic:prompt=uniform(1)", {}, r"write uniform\(least,most\)"),
        ("c" * 5000, {}, "no workload"),
        ("c" * 5000, {"file_format": "chat"}, "no such file"),
        ("chatbot", {"popularity": "zipff(1)"}, "did you mean zipf"),
        ("chatbot", {"num_adapters": 0}, "number of adapters"),
        ("synthetic", {"rate": 0.0}, "rate must be"),
    ],
)
def test_bad_names(text: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        named(text, **options)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def test_chat_names_do_not_depend_on_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named("chat-5", duration_s=5.0) == named(str(CHAT), file_format="chat", duration_s=5.0)


@pytest.mark.parametrize("file_format", [name for name in FORMATS if name != "chat"])
def test_bad_lines_are_skipped_when_told_to(files: dict[str, str], file_format: str) -> None:
    path = Path(files[file_format])
    whole = named(str(path), file_format=file_format)
    for file in [file for file in path.iterdir() if file.suffix != ".json"] if path.is_dir() else [path]:
        file.write_bytes(file.read_bytes() + b"\xff\n")
    with pytest.raises(ConfigError, match=r", line \d+: expected"):
        named(str(path), file_format=file_format)
    left = named(str(path), file_format=file_format, skip_bad_lines=True)
    assert len(left.requests) == len(whole.requests)
    assert any("1 malformed lines left out" in note for note in left.notes)
