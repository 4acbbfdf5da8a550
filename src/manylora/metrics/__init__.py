"""Figures by Prometheus names, of an engine and of the requests to it. Serves a page or a dict; knows no HTTP."""
