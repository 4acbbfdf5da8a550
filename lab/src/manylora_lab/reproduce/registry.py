"""The experiments by name: paper and number, in the order of the papers."""

from __future__ import annotations

from manylora.config import ConfigError
from manylora_lab.reproduce import (
    caraserve_cold_figures,
    caraserve_kernels,
    caraserve_schedulers,
    cold_start_map,
    dlora_clusters,
    dlora_fig5,
    dlora_fig12,
    dlora_figures,
    fastlibra_fig5,
    fastlibra_overhead,
    fastlibra_policies,
    fastlibra_seeds,
    fastlibra_static,
    fastlibra_table,
    merge_h200,
    punica_fig1,
    punica_fig7,
    punica_fig8,
    punica_fig9,
    punica_fig10,
    punica_fig11,
    punica_fig12,
    punica_fig13,
    router_figures,
    s_lora_cluster,
    s_lora_fig8,
    s_lora_fig9,
    s_lora_figures,
    s_lora_table3,
    vtc_fig3,
)
from manylora_lab.reproduce.experiment import Experiment
from manylora_lab.workloads.terms import suggestion

_ALL = (
    fastlibra_static.FIG2,
    fastlibra_static.FIG4,
    fastlibra_fig5.FIG5,
    fastlibra_static.FIG9,
    fastlibra_policies.FIG11,
    fastlibra_policies.FIG12,
    fastlibra_policies.FIG13,
    fastlibra_policies.FIG14,
    fastlibra_policies.FIG15,
    fastlibra_policies.FIG16,
    fastlibra_table.TABLE,
    fastlibra_seeds.SEEDS_EXPERIMENT,
    fastlibra_seeds.ABLATION_EXPERIMENT,
    fastlibra_overhead.OVERHEAD,
    s_lora_table3.TABLE3,
    s_lora_figures.FIG5,
    s_lora_figures.FIG6,
    s_lora_figures.FIG7,
    s_lora_fig8.FIG8,
    s_lora_fig9.FIG9,
    s_lora_figures.FIG10,
    s_lora_cluster.CLUSTER,
    punica_fig1.FIG1,
    punica_fig7.FIG7,
    punica_fig8.FIG8,
    punica_fig9.FIG9,
    punica_fig10.FIG10,
    punica_fig11.FIG11,
    punica_fig12.FIG12,
    punica_fig13.FIG13,
    caraserve_cold_figures.FIG3,
    caraserve_kernels.FIG4,
    caraserve_kernels.FIG5,
    caraserve_kernels.FIG9,
    caraserve_cold_figures.FIG10,
    caraserve_cold_figures.FIG11,
    caraserve_cold_figures.FIG13,
    caraserve_cold_figures.FIG14,
    caraserve_cold_figures.FIG15,
    caraserve_schedulers.FIG19,
    caraserve_schedulers.FIG20,
    dlora_clusters.FIG2B,
    dlora_fig5.FIG5,
    dlora_clusters.FIG9,
    dlora_figures.FIG10,
    dlora_clusters.FIG11,
    dlora_fig12.FIG12,
    dlora_clusters.FIG13,
    dlora_figures.FIG14,
    dlora_figures.FIG15,
    vtc_fig3.FIG3,
    merge_h200.H200,
    cold_start_map.MAP,
    router_figures.STALENESS,
    router_figures.BOUND,
    router_figures.MOVES,
    router_figures.SIZE,
)
EXPERIMENTS: dict[str, Experiment] = {each.name: each for each in _ALL}


def experiment(name: str) -> Experiment:
    """Raises ConfigError for a name that there is not, with the nearest ones."""
    if name not in EXPERIMENTS:
        hint = suggestion(name, EXPERIMENTS) or "; manylora reproduce --list names them"
        raise ConfigError(f"there is no experiment {name!r}{hint}")
    return EXPERIMENTS[name]
