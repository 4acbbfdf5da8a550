"""Adapters that arrive over time, each in the place of one that no conversation begins with any more."""

from __future__ import annotations

import dataclasses

from manylora_lab.workloads.stream import Stream


def renewed(stream: Stream, num_new: int) -> Stream:
    """The same requests over ``num_new`` adapters more, of which as many as before can be asked for at a time.

    One after the other, evenly over the stream's time, the oldest adapter gives way to a new one, which is as
    popular and has the same rank. A conversation keeps the adapter that it began with.
    """
    num_active = len(stream.ranks)
    chosen: dict[int, int | None] = {}
    requests = []
    for request in stream.requests:
        if request.conversation not in chosen:
            adapter = request.adapter
            if adapter is not None:
                oldest = int(num_new * request.arrival_s / stream.duration_s)
                adapter = oldest + (adapter - oldest) % num_active
            chosen[request.conversation] = adapter
        requests.append(dataclasses.replace(request, adapter=chosen[request.conversation]))
    ranks = tuple(stream.ranks[number % num_active] for number in range(num_active + num_new))
    note = f"{num_new} of {len(ranks)} adapters arrive over time, each in the place of the oldest"
    return dataclasses.replace(stream, requests=tuple(requests), ranks=ranks, notes=(*stream.notes, note))
