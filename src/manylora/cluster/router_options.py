"""What users give of a router: its parameters by name, and what CaraServe's has from a profile."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from manylora.config import EngineSettings
from manylora.config.cluster import ClusterOptions
from manylora.config.routing import CaraServeParameters
from manylora.inspection import model_shape
from manylora.policy.routing import find_router
from manylora.pricing.caraserve import caraserve_settings, slo_of
from manylora.pricing.fit import fit_profile
from manylora.pricing.profile import load_profile


def with_profile(cluster: ClusterOptions, engine: EngineSettings) -> ClusterOptions:
    """The options with CaraServe's coefficients and objective among its parameters, where it is the router.

    Raises ConfigError where there are none, or where the profile is of another model or another number of ranks.
    """
    if find_router(cluster.router).parameters is not CaraServeParameters:
        return cluster
    profile = slo_s = None
    if cluster.profile is not None:
        profile = load_profile(Path(cluster.profile))
        profile.expect(
            model_shape(engine, profile.model.itemsize), tensor_parallel_size=engine.tensor_parallel_size
        )
        slo_s = slo_of(cluster.slo_tpot, fit_profile(profile))
    pairs = caraserve_settings(cluster.router, cluster.router_config().settings, profile, slo_s)
    texts = tuple(f"{cluster.router}.{key}={value}" for key, value in pairs)
    return dataclasses.replace(cluster, settings=(*cluster.settings, *texts))
