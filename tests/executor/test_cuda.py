"""The worker on a GPU: pages written from side streams, and memory that comes back."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from manylora.devices.cuda import CudaDevice
from manylora.protocol.commands import CopyPages, ReadAdapter
from manylora.protocol.events import AdapterRead
from tests.executor.conftest import Files
from tests.executor.drive import Rig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make(files: Files, tmp_path: Path, num_pages: int = 400) -> Rig:
    return Rig(files.model, tmp_path, num_pages=num_pages, page_bytes=3072, device="cuda", dtype="float32")


def check(rig: Rig, files: Files) -> None:
    for held in rig.sequences.values():
        prompt = held.tokens[: held.num_prompt]
        files.reference.check_greedy(prompt, held.generated, files.path(held.adapter))


def test_tokens_of_mixed_batches(files: Files, tmp_path: Path) -> None:
    rig = make(files, tmp_path)
    assert rig.facts.device.startswith("cuda (")
    for adapter, path in files.adapters.items():
        rig.serve(adapter, path)
    for sequence in range(8):
        rig.open(sequence, [sequence + i for i in range(3 + 2 * sequence)], adapter=sequence % 4)
    rig.step(*(rig.row(sequence, 2) for sequence in range(8)))
    rig.decode(8, *range(8))
    check(rig, files)
    rig.worker.close()


def test_reads_over_pages_that_steps_have_just_used(files: Files, tmp_path: Path) -> None:
    rig = make(files, tmp_path)
    rig.serve(1, files.adapters[1])
    num_pages = rig.direct.add_adapter(2, str(files.adapters[2])).num_pages
    rig.open(1, [5, 6, 7, 8], adapter=1)
    for turn in range(12):
        pages = tuple(rig.take(num_pages))
        # Work on these very pages is still on its way when the read is asked for.
        rig.worker.obey(CopyPages(tuple((0, page) for page in pages) * 20))
        read = ReadAdapter(2, pages)
        rig.direct.begin(read)
        rig.decode(1, 1)
        while not rig.direct.has_landed(read):
            rig.worker.obey(CopyPages(((0, 0),)))
        answer = rig.direct.wait_for(read)
        assert isinstance(answer, AdapterRead)
        assert answer.ok, answer.error
        rig.open(100 + turn, [5 + turn, 6, 7, 8], adapter=2)
        rig.decode(2, 100 + turn)
        rig.direct.evict_adapter(2)
        rig.free[:0] = pages
    check(rig, files)
    rig.worker.close()


def test_downloads_that_are_on_their_way_together() -> None:
    """In any order of reading, of any size, and again with the buffers of those that have been read."""
    device = CudaDevice()
    rng = random.Random(0)
    flying: list[tuple[list[float], Callable[[], np.ndarray]]] = []
    with torch.inference_mode():
        for number in range(60):
            size = rng.choice([0, 1, 7, 128, 20000, 70000])
            tensor = torch.full(
                (size,), number, dtype=rng.choice([torch.int64, torch.float64]), device="cuda"
            )
            flying.append((tensor.tolist(), device.download(tensor)))
            tensor.fill_(-1)
            while len(flying) > number % 4:
                wanted, arrived = flying.pop(rng.randrange(len(flying)))
                assert arrived().tolist() == wanted


def test_a_tensor_holds_what_was_sent_last() -> None:
    device = CudaDevice()
    array, target = np.zeros(5, np.int64), device.zeros((5,), torch.int64)
    for number in range(20):
        array[:] = number
        count = 1 + number % 5
        device.send(array[:count], target[:count])
        array[:] = -1
        assert target[:count].tolist() == [number] * count


def test_close_frees_the_gpu(files: Files, tmp_path: Path) -> None:
    before = 0
    for num_pages in (200, 20000):  # once before, since libraries keep what they take for themselves
        rig = make(files, tmp_path, num_pages=num_pages)
        rig.serve(1, files.adapters[1])
        rig.open(1, [5, 6, 7], adapter=1)
        rig.decode(2, 1)
        assert torch.cuda.memory_allocated() > before + num_pages * 3072
        rig.worker.close()
        gc.collect()
        if num_pages == 200:
            before = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() < before + 2**20
