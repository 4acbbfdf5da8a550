"""The seam between what decides and what does.

A machine's ``handle(event, now)`` returns commands; a driver has them carried out in order, those for the device
by an ``Executor``, and feeds what happened back as events. Only numbers, strings, tuples and records of these
cross: a journal of events replays anywhere, and an executor may be another process.
"""
