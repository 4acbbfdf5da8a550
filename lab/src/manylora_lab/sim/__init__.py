"""Runs the engine's own policy in virtual time: no device, no clock, the same commands."""
