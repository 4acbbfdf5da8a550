"""Streams of requests: read from published traces, generated, or made of scenarios. Knows nothing of engines, nor
of what serving takes."""
