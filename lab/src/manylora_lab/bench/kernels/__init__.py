"""The rig that measures kernels: ``manylora bench kernels``, its ``--tune``, and Punica's figures of operators."""
