"""Reports figures of an engine and of its requests under Prometheus names, as a page or a dict. Knows no
HTTP."""
