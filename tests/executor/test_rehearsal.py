"""What runs before anybody asks leaves nothing behind."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from manylora.executor.rehearsal import rehearse
from tests.executor.drive import Rig
from tests.executor.tiny import Reference, write_model


def test_served_tokens_are_the_same_after_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_model(tmp_path / "model")
    rig = Rig(model, tmp_path, max_batch_tokens=100, max_num_seqs=8, max_model_len=40)
    try:
        with caplog.at_level(logging.INFO):
            assert rehearse(rig.worker, rig.policy) == [100]  # in prompts of 40, 40 and 20
        assert "rehearsed steps of [100] tokens" in caplog.text
        prompt = [7, 8, 9, 10, 11]
        rig.open(1, prompt)
        rig.decode(6, 1)
        Reference(model).check_greedy(prompt, rig.sequences[1].generated)
        # More than its tables hold: said, not raised.
        caplog.clear()
        rehearse(rig.worker, dataclasses.replace(rig.policy, max_model_len=10**4, max_batch_tokens=10**4))
        assert "failed before serving began" in caplog.text
    finally:
        rig.worker.close()
