"""Measurements: of servers and engines under a workload, of steps for the simulator, of kernels."""
