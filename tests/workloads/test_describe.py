"""Statistics of streams, against numbers counted by hand; and the picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from manylora_lab.workloads.describe import describe, summary, text, zipf_exponent
from manylora_lab.workloads.picture import draw
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest, in_order

from manylora.config.declaring import ConfigError

SYSTEM = Piece("system", 100)


def request(at_s: float, adapter: int | None, conversation: int, turn: int, *prompt: Piece) -> StreamRequest:
    return StreamRequest(at_s, adapter, conversation, turn, prompt, 10)


@pytest.fixture
def stream() -> Stream:
    return in_order(
        "by hand",
        [
            request(0.0, 0, 1, 0, SYSTEM, Piece("a", 20)),
            request(1.0, 0, 2, 0, SYSTEM, Piece("b", 30)),  # shares 100 with the first
            request(2.0, 1, 3, 0, SYSTEM, Piece("a", 20)),  # another adapter: shares nothing
            request(3.0, 0, 1, 1, Piece("a", 5)),  # history 130
            request(4.0, 0, 4, 0, SYSTEM, Piece("a", 20), Piece("c", 1)),  # shares 120
            request(6.0, None, 5, 0, Piece("a", 7)),  # does not begin like others
        ],
        (8, 8, 16),
        ("a note",),
    )


def test_by_hand(stream: Stream) -> None:
    found = describe(stream)
    prompts = [120, 130, 120, 135, 121, 7]
    assert found["requests"] == 6
    assert found["duration_s"] == 6.0
    assert found["rate"] == 1.0
    # Gaps 1, 1, 1, 1, 2: mean 1.2, standard deviation 0.4.
    assert found["interarrival_cv"] == pytest.approx(1 / 3)
    assert found["conversations"] == 5
    assert found["turns_per_conversation"] == {"mean": 1.2, "p50": 1, "p90": 2, "p99": 2}
    assert found["prompt_tokens"]["mean"] == pytest.approx(sum(prompts) / 6)
    assert found["prompt_tokens"]["p50"] == 120
    assert found["prompt_tokens"]["p90"] == 135
    assert found["output_tokens"]["p99"] == 10
    assert found["history_share"] == pytest.approx(130 / sum(prompts))
    assert found["shared_prefix_share"] == pytest.approx((100 + 120) / sum(prompts))
    assert (found["adapters_used"], found["adapters_served"], found["base_requests"]) == (2, 3, 1)
    assert found["top_share"] == pytest.approx(4 / 6)
    assert found["zipf_exponent"] == pytest.approx(2.0)  # 4 to 1 over ranks 1 to 2
    assert found["ranks"] == {"8": 2, "16": 1}
    assert json.loads(json.dumps(found)) == found
    shown = text(found)
    assert "by hand" in shown
    assert "a note" in shown


def test_one_request_has_no_rate_and_no_gaps() -> None:
    found = describe(in_order("one", [request(0.0, None, 1, 0, SYSTEM)], (), ()))
    assert found["rate"] is found["interarrival_cv"] is found["zipf_exponent"] is found["top_share"] is None
    assert "- a second" in text(found)


def test_a_zipf_law_is_found_again() -> None:
    assert zipf_exponent([round(1e9 / rank**1.3) for rank in range(1, 50)]) == pytest.approx(1.3, abs=1e-4)
    assert zipf_exponent([5, 5, 5]) == 0.0
    assert zipf_exponent([5]) is None


def test_percentiles() -> None:
    assert summary(range(1, 101)) == {"mean": 50.5, "p50": 50, "p90": 90, "p99": 99}
    assert summary([3]) == {"mean": 3.0, "p50": 3, "p90": 3, "p99": 3}


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_drawn(stream: Stream, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"picture.{ending}"
    draw(stream, path)
    assert path.read_bytes()[:4] in (b"\x89PNG", b"<?xm")
    draw(in_order("base", [request(0.0, None, 1, 0, SYSTEM)], (), ()), path)


def test_pictures_that_cannot_be_drawn(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="name it"):
        draw(stream, tmp_path / "picture.txt")
    with pytest.raises(ConfigError, match="cannot write"):
        draw(stream, tmp_path / "nowhere" / "picture.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="needs matplotlib"):
        draw(stream, tmp_path / "picture.png")
