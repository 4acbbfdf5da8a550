"""What cold starts take on this machine, for a profile: products on CPU threads, how
a step's time is shared out among its layer groups, and what awaited copies cost their steps.

Builds one engine, and closes it. Does not know the profile's other measurements.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from manylora.config.cold_start import ColdStartConfig, num_cores
from manylora.config.declaring import ConfigError
from manylora.config.policy import PolicyConfig
from manylora.devices.device import open_device
from manylora.executor.build import build_worker
from manylora.executor.cpu_lora import CpuLora, CpuLoraLate, TimedProduct
from manylora.executor.worker import Worker
from manylora.flags import build_settings
from manylora.kernels.shapes import AdapterGeometry, adapter_geometry
from manylora.memory.gates import layer_groups
from manylora.memory.pool import HostPool
from manylora.models.load import resolve_dtype
from manylora.models.spec import ModelConfig
from manylora_lab.bench.profile_grid import Batch
from manylora_lab.bench.profile_rig import ProfileRig, rounded, undisturbed
from manylora_lab.pricing.cold import fit_cpu, gate_lines
from manylora_lab.pricing.profile import CpuPoint, GatePoint, Profile

TOKENS = (1, 4, 8, 16, 32, 64, 96, 128, 256)
RANKS = (8, 16, 32, 64)
_HELD_OUT = 4
_ROUNDS = 3
_GROUPS = ColdStartConfig("layerwise").num_groups
_PROMPT = 64
"""Of the step whose layers are timed."""
GATE_TURNS = 3
"""Times the repeats: a step is many times what is looked for."""


class ColdTimes(NamedTuple):
    """See Profile."""

    cores: int
    cpu_products: tuple[CpuPoint, ...]
    handover_s: float
    num_products: int
    group_shares: tuple[float, ...]
    gates: tuple[GatePoint, ...]


def measure_cold(
    engine: Mapping[str, Any],
    config: ModelConfig,
    write_adapters: Callable[[Path], list[Path]],
    repeats: int,
    progress: Callable[[str, int, int], None],
) -> ColdTimes:
    """``engine``: settings by flag name. ``write_adapters``: into a folder. Raises ConfigError."""
    progress("cold starts", 0, 2)
    with tempfile.TemporaryDirectory() as folder:
        asked = {"cuda_graphs": "off", "cold_start": "layerwise"}
        worker, policy, info = build_worker(build_settings({**engine, **asked})[0])
        try:
            rig = ProfileRig(worker, policy)
            rig.serve(write_adapters(Path(folder) / "adapters"), 0.3)
            shares = _group_shares(worker, rig, policy)
            # What is captured has gates of another kind.
            gates = rig.gates(GATE_TURNS * repeats) if info.device == "cpu" else []
        finally:
            worker.close()
    progress("cold starts", 1, 2)
    dtype = resolve_dtype(info.dtype, "cpu", config.dtype)
    page = config.page_shape(policy.page_tokens, dtype.itemsize)
    geometry = adapter_geometry(page, config.layer_groups)
    needed = TimedProduct(geometry, max(RANKS)).num_pages
    host = HostPool(needed, page, dtype, open_device("cpu"))
    try:
        cores = num_cores()
        points, handover_s = measure_products(
            host, geometry, sorted({1, max(1, cores // 2), max(1, cores - 1)})
        )
    finally:
        host.close()
    progress("cold starts", 2, 2)
    num_products = sum(len(groups) for groups in geometry.layers)
    return ColdTimes(cores, points, handover_s, num_products, shares, tuple(gates))


def measure_products(
    host: HostPool,
    geometry: AdapterGeometry,
    counts: Sequence[int],
    tokens: Sequence[int] = TOKENS,
    ranks: Sequence[int] = RANKS,
) -> tuple[tuple[CpuPoint, ...], float]:
    """Products on so many threads each, and what handing one over takes beside: the least of some rounds, each of
    a few runs. Raises ConfigError where the threads are late."""
    products = {rank: TimedProduct(geometry, rank) for rank in ranks}
    busy: dict[tuple[int, int, int], list[float]] = {}
    besides: list[float] = []
    for _ in range(_ROUNDS):
        for count in counts:
            cpu = CpuLora(geometry, host, count)
            try:
                _time_all(cpu, products, tokens, count, busy, besides)
            except CpuLoraLate as error:
                raise ConfigError(f"products on the CPU could not be measured: {error}") from error
            finally:
                cpu.close()
    points = tuple(
        CpuPoint(
            number, products[rank].num_bytes, count, rounded(min(seconds)), place % _HELD_OUT == _HELD_OUT - 1
        )
        for place, ((count, rank, number), seconds) in enumerate(busy.items())
    )
    return points, rounded(max(statistics.median(besides), 0.0))


def _time_all(
    cpu: CpuLora,
    products: Mapping[int, TimedProduct],
    tokens: Sequence[int],
    count: int,
    busy: dict[tuple[int, int, int], list[float]],
    besides: list[float],
) -> None:
    for rank, number in itertools.product(products, tokens):
        if number < count:
            continue
        own_s, whole_s = products[rank].seconds(cpu, number, count)
        busy.setdefault((count, rank, number), []).append(own_s)
        besides.append(whole_s - own_s)


@contextlib.contextmanager
def _watching(worker: Worker, note: Callable[[int], None]) -> Iterator[None]:
    """Have steps run eagerly, and ``note`` called before each layer."""
    forward, graphs = worker._forward, worker._graphs
    assert forward is not None
    worker._graphs = None
    worker._forward = copy.copy(forward)
    worker._forward.compute = functools.partial(forward.compute, before_layer=note)  # type: ignore[method-assign]
    try:
        yield
    finally:
        worker._forward, worker._graphs = forward, graphs


def _group_shares(worker: Worker, rig: ProfileRig, policy: PolicyConfig) -> tuple[float, ...]:
    """Of a prompt's step: from before a group's first layer until before the next one's; the last one's with what
    comes after the layers."""
    length = min(_PROMPT, policy.max_batch_tokens, policy.max_model_len - 1)
    batch = Batch(prefills=((0, length),), adapters=(0,))
    moments: list[tuple[int, float]] = []

    def note(layer: int) -> None:
        worker.synchronize()
        moments.append((layer, time.perf_counter()))

    parts: dict[int, list[float]] = {}
    for _ in range(2 * _ROUNDS):
        moments.clear()
        with _watching(worker, note):
            rig.rehearse(batch)
        end = time.perf_counter()
        groups = layer_groups(len(moments), _GROUPS)
        for number, (first, last) in enumerate(groups):
            until = moments[last][1] if last < len(moments) else end
            parts.setdefault(number, []).append(until - moments[first][1])
    taken = [undisturbed(each) for each in parts.values()]
    return tuple(rounded(seconds / sum(taken)) for seconds in taken) if len(taken) > 1 else ()


def describe_cold(profile: Profile) -> list[str]:
    """What cold starts take, and how well that fits."""
    if not profile.cpu_products:
        return []
    line, gates = fit_cpu(profile.cpu_products), gate_lines(profile)
    error = line.held_out
    return [
        f"CPU LoRA      {1e6 * line.fixed_s:.0f} us a product, {1e-9 / max(line.byte_s, 1e-15):.3g} GB/s, "
        f"{1e-9 / max(line.token_byte_s, 1e-15):.3g} G byte-tokens/s a core; held out: mean "
        f"{100 * error.mean:.1f} %, largest {100 * error.largest:.1f} %, {error.num_points} products",
        f"hand-over     {1e6 * profile.handover_s:.0f} us, {profile.num_products} a step; {profile.cores} cores",
        f"layer groups  {', '.join(f'{share:.3f}' for share in profile.group_shares)} of a step",
        f"gates         {1e6 * gates.issue[0]:.0f} us before a step that awaits a copy, "
        f"{1e6 * gates.step[0]:.0f} us of it",
    ]
