"""A histogram whose observations may count for several, as one delta of many tokens does."""

from __future__ import annotations

import bisect
import itertools
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenHistogram(Collector):
    """One series. prometheus_client's Histogram takes one observation at a time, which would cost every token."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        """``buckets``: upper bounds, rising."""
        self._name = name
        self._text = text
        self._labels = dict(labels)
        self._bounds = (*buckets, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._created_s = time.time()
        self._lock = threading.Lock()

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, so many times. Thread-safe."""
        place = bisect.bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += times
            self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        with self._lock:
            counts, total = self._counts[:], self._sum
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        bounds = map(floatToGoString, self._bounds)
        buckets = list(zip(bounds, map(float, itertools.accumulate(counts))))
        family.add_metric(list(self._labels.values()), buckets, total)
        family.add_sample(f"{self._name}_created", self._labels, self._created_s)
        yield family
