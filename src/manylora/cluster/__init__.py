"""Runs a cluster: front ends, one router, replicas and a supervisor, each a process, and the links between
them."""
