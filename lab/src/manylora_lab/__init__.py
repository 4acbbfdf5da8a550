"""The laboratory beside manylora: simulator, workloads, measurements, the papers' figures."""
