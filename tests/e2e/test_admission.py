"""Early abort over HTTP: whoever would get a first token too late gets 503 instead, with the reason."""

from __future__ import annotations

import re

from tests.e2e.process import BASE, Server, assert_error

AT_ONCE = 6


def test_what_comes_too_late_is_refused() -> None:
    """One runs at a time. Its 300 tokens take longer than the 0.1 s that the others may wait."""
    limits = ("--max-num-seqs", "1", "--admission", "early-abort", "--slo-ttft", "0.6")
    with Server(*limits, "--device-pool", "16MiB").wait_ready() as server:
        body = {"model": BASE, "prompt": "Once", "max_tokens": 300, "ignore_eos": True}
        answers = server.complete_all([body] * AT_ONCE)
        served = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert served
        assert refused
        assert all(answer.json()["usage"]["completion_tokens"] == 300 for answer in served)
        for answer in refused:
            error = assert_error(answer, 503)
            assert re.fullmatch(
                r"after \d+\.\d s in the queue, no first token can come within 0\.6 s", error["message"]
            )
        server.wait_quiet()
        assert server.complete(prompt="Once", max_tokens=2).status_code == 200
