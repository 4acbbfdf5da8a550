"""Defines the interface between deciding and doing.

A machine's ``handle(event, now)`` returns commands. A driver has them carried out in order, those for the
device by an ``Executor``, and returns the results as events. Only numbers, strings, tuples and records of
these are exchanged. So a journal of events replays anywhere, and an executor may be another process.
"""
