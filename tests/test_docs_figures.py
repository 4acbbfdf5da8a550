"""Figures in README and docs are what their records say, and the tool that fills them in does nothing else."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import figures
from tools.expressions import Figure
from tools.figures import ROOT, main
from tools.origins import Origin, origin_of, origins_of
from tools.records import FigureError, Found, Records
from tools.tables import PAGES, TABLES

RECORD: dict[str, Any] = {
    "command": "python -m benchmarks.one --out one.json",
    "commit": "abc1234",
    "plain": 4.2409,
    "big": 6503.25,
    "tiny": -0.0001,
    "zero": 0,
    "null": None,
    "flag": True,
    "word": "fast",
    "list": [1.0, 2.0, 6.0],
    "twice": [2.0, 4.0, 6.0],
    "with/slash": 7,
    "runs": [
        {"policy": "lru", "rate": 20.0, "ms": 60.1, "command": "the run's own", "commit": "fff0000"},
        {"policy": "manylora", "rate": 20.0, "ms": 33.8},
        {"policy": "manylora", "rate": 5.0, "ms": 15.0, "extra": 1},
    ],
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    (results / "one.json").write_text(json.dumps(RECORD))
    (results / "nan.json").write_text('{"a": NaN}')
    (results / "infinite.json").write_text('{"a": -Infinity, "b": 1}')
    (results / "large.json").write_text('{"a": 1e999}')
    (results / "deep.json").write_text("[" * 100_000)
    (results / "broken.json").write_text('{"a": ')
    return tmp_path


def fig(name: str, rest: str, value: str = "") -> str:
    return f"<!--fig {name}: {rest}-->{value}<!--/-->"


GOOD = f"Ours is {fig('a', 'one.json:plain; .1f', '4.2')} times theirs."
STALE = f"It was {fig('stale', 'one.json:big; ,.0f', '9,999')} tokens/s."


# This repository


def test_the_pages_say_what_the_records_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_a_line_for_a_shell(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = site / "README.md"
    markers = (
        ("whole", "one.json:plain; .1f"), ("part", "one.json:runs/0/ms; .1f"), ("none", "two.json:a; .1f"),
    )  # fmt: skip
    (site / "docs" / "results" / "two.json").write_text('{"a": 1.0, "command": "x --report-only"}')
    page.write_text("".join(f"It is {fig(name, rest)}.\n\n" for name, rest in markers))
    assert main(["--command", "whole"], site) == 0
    assert capsys.readouterr().out.endswith(" && python -m benchmarks.one --out one.json )\n")
    assert main(["--command", "part"], site) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("( git worktree add --detach ../manylora-fff0000 fff0000 && ")
    assert printed.endswith(" && the run's own )\n")
    assert main(["--command", "none"], site) == 1
    assert capsys.readouterr().err == "two.json tells no command and commit of none\n"
    assert main(["--command", "missing"], site) == 1
    assert capsys.readouterr().err == "there is no marker missing\n"
    again = Origin("x --store s --report-only --out o", "abc1234").shell()
    assert again is not None
    assert again.endswith(" && x --store s --out o")
    assert Origin("x", "abc1234+").shell() is None


def headings(text: str) -> list[tuple[str, str]]:
    """Level and text of each, without markers and links; what stands in code is none."""
    text = re.sub(r"<!--.*?-->|^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^(#+) (.+)$", text, re.MULTILINE)
    return [(level, re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)) for level, title in found]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = [title for _, title in headings(page.read_text(encoding="utf-8"))]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


OTHER_PAGES = ("CONTRIBUTING.md", "demo/README.md", "lab/README.md")
"""Without figures of records."""


def test_links_between_pages_lead_somewhere() -> None:
    dead = []
    for page in (*figures.Site(ROOT).pages(), *(ROOT / name for name in OTHER_PAGES)):
        text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"))
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text):
            other = page.parent / target if target else page
            if not other.exists() or (anchor and other.suffix == ".md" and anchor not in anchors(other)):
                dead.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert not dead


# Filling in


@pytest.mark.parametrize(
    ("marker", "value"),
    [
        ("one.json:plain; .1f", "4.2"),
        ("one.json:big; ,.0f", "6,503"),
        ("one.json:big; ,.-2f", "6,500"),
        ("one.json:plain; x-100 .0f", "-424"),
        ("one.json:plain; +.1f", "+4.2"),
        ("one.json:tiny; .1f", "0.0"),
        ("one.json:tiny; x1e4 .1f", "-1.0"),
        ('one.json:"with/slash"; .0f', "7"),
        ("one.json:list/2; .0f", "6"),
        ("one.json:runs/[policy=lru]/ms; .1f", "60.1"),
        ("one.json:runs/[policy=manylora & rate=5.0]/ms; .0f", "15"),
        ("one.json:runs/[policy=manylora & rate!=5.0]/ms; .1f", "33.8"),
        ("one.json:runs/[extra]/ms; .0f", "15"),
        ("one.json:runs/[policy=manylora & !extra]/ms; .1f", "33.8"),
        ("mean one.json:list/*; .1f", "3.0"),
        ("median one.json:list/*; .1f", "2.0"),
        ("min one.json:list/*; .0f", "1"),
        ("max one.json:{plain,zero}; .1f", "4.2"),
        ("sum one.json:list/*; .0f", "9"),
        ("count one.json:runs/*/ms; .0f", "3"),
        ("ratio one.json:runs/0/ms; :runs/1/ms; .2f", "1.78"),
        ("change one.json:runs/1/ms; one.json:runs/0/ms; .0f", "-44"),
        ("diff one.json:runs/0/ms; :runs/1/ms; .1f", "26.3"),
        ("share one.json:list/0; :list/1; x100 .0f", "33"),
        ("max ratio one.json:list/*; :twice/*; .1f", "1.0"),
        ("mean change one.json:twice/*; :list/*; .1f", "66.7"),
        ("min ratio one.json:list/*; :list/2; .2f", "0.17"),
        ("sum equal one.json:list/*; :twice/*; .0f", "1"),
        ("ratio mean one.json:list/*; mean :twice/*; .2f", "0.75"),
    ],
)
def test_a_marker_is_filled_in(site: Path, marker: str, value: str) -> None:
    page = site / "README.md"
    page.write_text(f"Here {fig('a', marker)} stands.\n")
    assert main([], site) == 0
    assert page.read_text() == f"Here {fig('a', marker, value)} stands.\n"


def test_a_changed_digit_in_a_page_is_told_and_restored(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = site / "docs" / "page.md"
    page.write_text(f"# Page\n\n{GOOD}\n")
    assert main(["--check"], site) == 0
    page.write_text(f"# Page\n\n{GOOD.replace('>4.2<', '>4.3<')}\n")
    assert main(["--check"], site) == 1
    assert capsys.readouterr().err.startswith("docs/page.md:3: ")
    assert ">4.3<" in page.read_text()  # a check writes nothing
    assert main([], site) == 0
    assert page.read_text() == f"# Page\n\n{GOOD}\n"


def test_a_changed_digit_in_a_record_is_told(site: Path) -> None:
    (site / "README.md").write_text(GOOD)
    (site / "docs" / "results" / "one.json").write_text(json.dumps({**RECORD, "plain": 4.3409}))
    assert main(["--check"], site) == 1


def test_a_table_is_written_by_its_function(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "runs", lambda record: f"| {record['plain']} |\n|---|\n")
    page = site / "README.md"
    page.write_text("Before.\n\n<!--table t: one.json; runs-->\n| old |\n<!--/table-->\n\nAfter.\n")
    assert main(["--check"], site) == 1
    assert main([], site) == 0
    text = "Before.\n\n<!--table t: one.json; runs-->\n| 4.2409 |\n|---|\n<!--/table-->\n\nAfter.\n"
    assert page.read_text() == text
    assert main(["--check"], site) == 0


def test_a_table_of_what_is_no_number_is_told(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[Callable[[Any], str], str]] = [
        (lambda record: f"{1 / record['zero']}", "has not what the table needs: ZeroDivisionError"),
        (lambda record: f"{statistics.fmean([])}", "has not what the table needs: StatisticsError"),
        (lambda record: f"| {record['plain'] * 1e308:.1f} |", "the table of one.json would have inf"),
    ]
    page = site / "README.md"
    page.write_text("x\n<!--table t: one.json; runs-->\n<!--/table-->\n")
    for function, reason in made:
        monkeypatch.setitem(TABLES, "runs", function)
        assert main([], site) == 1
        error = capsys.readouterr().err
        assert error.startswith("README.md:2: ")
        assert reason in error


def test_a_change_and_its_other_side_are_one_figure() -> None:
    """A record keeps four digits of a change, which round to less than the change itself does."""
    columns = {"invalid_share": 0.0, "adapter_reads": 1.0, "case": "load", "best_simple": "lru-ahead"}
    lines = TABLES["seeds"](
        {
            "rows": [
                {**columns, "policy": policy, "share": share, "ttft_mean_ms": ms, "ttft_ms_by_seed": [ms] * 3}
                | {"change": change, "change_low": change, "change_high": change}
                for share in (0.4, 0.0)
                for policy, ms, change in (("manylora", 99.5497, -0.0045), ("lru-ahead", 100.0, 0.0))
            ]
        }
    ).splitlines()
    assert lines[4].split(" | ")[2].startswith("-0.5 (")
    assert lines[4].split(" | ")[2] == lines[5].split(" | ")[3]


def test_the_table_of_a_router_s_speed() -> None:
    times = {"p50": 40.4, "p99": 58.6, "p999": 190.0}
    row = {
        "router": "manylora", "replicas": 1000, "adapters": 100_000, "asked_us": times, "asked_cpu_us": times,
        "report_us_per_changed_adapter": {"p99": 2.61},
    }  # fmt: skip
    lines = TABLES["router-speed"]({"rows": [row, {**row, "memory_mib": 87.4}]}).splitlines()
    assert lines[2] == "| `manylora` | 1,000 x 100,000 | 40 | 59 | 190 | 59 | 2.6 | - |"
    assert lines[3].endswith("| 2.6 | 87 |")


def test_a_page_may_be_written_as_a_whole(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAGES, "docs/results/whole.md", ("one.json", lambda record: f"# {record['word']}\n"))
    page = site / "docs" / "results" / "whole.md"
    page.write_text("# slow\n")
    assert main(["--check"], site) == 1
    assert main([], site) == 0
    assert page.read_text() == "# fast\n"


def test_markers_in_code_are_text(site: Path) -> None:
    page = site / "README.md"
    text = "Write `<!--fig a: one.json:plain; .1f--><!--/-->` or\n\n```\n<!--fig b: nothing-->\n```\n"
    page.write_text(text)
    assert main([], site) == 0
    assert page.read_text() == text


_PLAIN = st.text(alphabet="ab 1.|*_#\r\n\t€,-", max_size=30)


@given(
    pieces=st.lists(_PLAIN, min_size=1, max_size=6),
    stale=st.sampled_from(["", "0.0", "4.2", "a typed figure"]),
)
def test_nothing_else_changes(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], stale: str
) -> None:
    root = tmp_path_factory.mktemp("site")
    (root / "docs" / "results").mkdir(parents=True)
    (root / "docs" / "results" / "one.json").write_text(json.dumps(RECORD))

    def page_with(value: str) -> bytes:
        marked = [
            f"{piece}is {fig(f'n{place}', 'one.json:plain; .1f', value)}"
            for place, piece in enumerate(pieces)
        ]
        return "".join(marked).encode()

    page = root / "README.md"
    page.write_bytes(page_with(stale))
    assert main([], root) == 0
    assert page.read_bytes() == page_with("4.2")
    assert main([], root) == 0
    assert page.read_bytes() == page_with("4.2")


# What is wrong


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (fig("a", "none.json:plain; .1f"), "no record none.json"),
        (fig("a", "broken.json:a; .1f"), "broken.json is no JSON"),
        (fig("a", "one.json:not/there; .1f"), "one.json has no not/there"),
        (fig("a", "one.json:runs/[policy=s-lora]/ms; .1f"), "nothing at [policy=s-lora]"),
        (fig("a", "one.json:list/3; .1f"), "has no list/3"),
        (fig("a", "nan.json:a; .1f"), "nan.json is no JSON: it has NaN"),
        (fig("a", "infinite.json:b; .1f"), "infinite.json is no JSON: it has -Infinity"),
        (fig("a", "large.json:a; .1f"), "large.json is no JSON: it has 1e999"),
        (fig("a", "deep.json:a; .1f"), "deep.json is no JSON: maximum recursion depth"),
        ("x\n<!--table a: large.json; kernels-lora-->\n<!--/table-->", "large.json is no JSON: it has 1e999"),
        ("x\n<!--table a: nan.json; kernels-lora-->\n<!--/table-->", "nan.json is no JSON: it has NaN"),
        (fig("a", "one.json:null; .1f"), "no number but null"),
        (fig("a", "one.json:flag; .1f"), "no number but true"),
        (fig("a", "one.json:word; .1f"), 'no number but "fast"'),
        (fig("a", "one.json:runs/0; .1f"), "no number but {"),
        (fig("a", "one.json:list/*; .1f"), "3 values, where one is needed"),
        (fig("a", "ratio one.json:list/*; :runs/*/ms; .1f"), "3 values, where one is needed"),
        (fig("a", "mean ratio one.json:list/*; :runs/[rate=20.0]/ms; .1f"), "3 and 2 values make no pairs"),
        (fig("a", "ratio one.json:plain; :zero; .1f"), "division by zero"),
        (fig("a", "most one.json:list/*; .1f"), "no operation 'most'"),
        (fig("a", "ratio one.json:plain; .1f"), "do not fit"),
        (fig("a", "mean one.json:plain; :plain; .1f"), "do not fit"),
        (fig("a", "one.json:plain"), "malformed"),
        (fig("a", "one.json:plain; {x}"), "malformed format"),
        (fig("a", "one.json:list/[; .1f"), "malformed path"),
        ("<!--fig a one.json:plain; .1f-->1<!--/-->", "malformed marker"),
        ("<!-- fig a: one.json:plain; .1f -->1<!--/-->", "malformed marker"),
        ("<!--fig a: one.json:plain; .1f\n-->1<!--/-->", "does not end in its line"),
        ("<!--fig a: one.json:plain; .1f-->1", "a does not end"),
        ("<!--fig a: one.json:plain; .1f-->1\n<!--/-->", "a does not end"),
        ("<!--fig a: one.json:plain; .1f-->1 <!--fig b: one.json:plain; .1f-->2<!--/-->", "a does not end"),
        ("<!--fig a: one.json:plain; .1f-->1<!--/table-->", "a does not end"),
        ("1<!--/-->", "ends that did not begin"),
        (f"x\n{fig('a', 'one.json:plain; .1f')} x", "begins its line"),
        (f"x\n  - {fig('a', 'one.json:plain; .1f')} x", "begins its line"),
        ("x <!--table a: one.json; nothing-->\n<!--/table-->", "does not begin its line"),
        ("x\n<!--table a: one.json; nothing-->\n<!--/table-->", "no table 'nothing'"),
        ("x\n<!--table a: one.json; npu-bandwidth-half-->\n<!--/table-->", "has not what the table needs"),
        (
            f"{fig('a', 'one.json:plain; .1f')} and {fig('a', 'one.json:big; .1f')}",
            "a is named in docs/page.md:",
        ),
    ],
)
def test_what_is_wrong_is_told_and_nothing_is_written(
    site: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    readme, page = site / "README.md", site / "docs" / "page.md"
    readme.write_text(STALE)
    page.write_text(f"# Page\n\nSome text: {text}\n")
    assert main([], site) == 1
    lines = capsys.readouterr().err.splitlines()
    assert any(re.match(r"docs/page\.md:[34]: ", line) and reason in line for line in lines), lines
    assert readme.read_text() == STALE
    assert page.read_text() == f"# Page\n\nSome text: {text}\n"


def test_a_page_that_is_no_text_is_told(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "README.md").write_text(STALE)
    (site / "docs" / "page.md").write_bytes(b"# Page\n\xff\n")
    assert main([], site) == 1
    assert capsys.readouterr().err.startswith("docs/page.md:2: no UTF-8")
    assert (site / "README.md").read_text() == STALE


def test_a_name_stands_for_one_figure_in_all_pages(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "README.md").write_text(GOOD)
    (site / "docs" / "page.md").write_text(f"Again:\n{GOOD}")
    assert main([], site) == 1
    assert capsys.readouterr().err == "docs/page.md:2: a is named in README.md:1 already\n"


def test_every_error_is_told_at_once(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "README.md").write_text(f"x {fig('a', 'none.json:a; .1f')}\nx {fig('b', 'one.json:b; .1f')}\n")
    assert main([], site) == 1
    assert [line.split(": ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "README.md:1",
        "README.md:2",
    ]


# Repeating a figure


def test_a_figure_is_listed_with_its_command_and_commit(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    near = fig("near", "one.json:runs/[policy=lru]/ms; .1f", "60.1")
    (site / "README.md").write_text(f"{GOOD} {near}")
    assert main(["--list", "near"], site) == 0
    listed = capsys.readouterr().out
    assert "near = 60.1    README.md:1" in listed
    assert "one.json: the run's own    (commit fff0000)" in listed
    assert "abc1234" not in listed
    assert main(["--list", "a"], site) == 0
    assert "one.json: python -m benchmarks.one --out one.json    (commit abc1234)" in capsys.readouterr().out
    assert main(["--list", "none"], site) == 1


def test_a_figure_of_two_runs_names_both(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "README.md").write_text(f"Of {fig('a', 'ratio one.json:runs/0/ms; :runs/1/ms; .1f', '1.8')}")
    assert main(["--list"], site) == 0
    listed = capsys.readouterr().out
    assert "(commit fff0000)" in listed
    assert "(commit abc1234)" in listed


def test_a_part_of_a_record_may_have_its_own_origin(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "provenance": [
            {"command": "first", "commit": "1"},
            {"part": "churn", "command": "second", "commit": "2"},
        ],
        "shapes": {"b": 1.0},
        "churn": {"b": 1.0},
    }
    (site / "docs" / "results" / "two.json").write_text(json.dumps(record))
    shapes, churn = fig("shapes", "two.json:shapes/b; .0f", "1"), fig("churn", "two.json:churn/b; .0f", "1")
    (site / "README.md").write_text(f"Of both {shapes} and {churn}.")
    assert main(["--list", "shapes"], site) == 0
    assert "first    (commit 1)" in capsys.readouterr().out
    assert main(["--list", "churn"], site) == 0
    assert "second    (commit 2)" in capsys.readouterr().out


def test_a_part_s_name_that_begins_another_s_is_not_it() -> None:
    provenance = [{"part": "runs/1", "command": "first", "commit": "1"}]
    record = {"provenance": provenance, "runs": [0.0] * 11}
    assert origin_of(record, Found(0.0, (record, record["runs"]), ("runs", "1"))).command == "first"
    assert origin_of(record, Found(0.0, (record, record["runs"]), ("runs", "10"))).command is None


def test_a_table_of_a_record_in_parts_has_the_commands_of_all() -> None:
    parts = [{"part": f"runs/{place}", "command": f"run {place}", "commit": f"{place}"} for place in range(2)]
    record = {"provenance": parts, "runs": [1.0, 2.0]}
    assert origins_of(record) == [Origin("run 0", "0"), Origin("run 1", "1")]
    assert origins_of({**record, "command": "both", "commit": "3"}) == [Origin("both", "3")]
    assert origins_of([1.0]) == [Origin(None, None)]


def test_every_figure_can_be_made_again() -> None:
    site = figures.Site(ROOT)
    site.restore()
    assert site.filled
    for _, marker, _ in site.filled:
        assert all(origin.shell() for _, origin in site.origins(marker)), marker.name


def test_a_figure_of_two_records_names_both(site: Path) -> None:
    figure = Figure.parse("ratio one.json:plain; two.json:plain; .1f")
    assert [operand.record for operand in figure.operands] == ["one.json", "two.json"]
    with pytest.raises(FigureError, match=r"two\.json"):
        figure.text(Records(site / "docs" / "results"))
