"""Traces of requests, read from files. Knows nothing of engines and of what serving them takes."""
