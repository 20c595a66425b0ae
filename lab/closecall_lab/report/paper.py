"""What the paper published, and nothing else: its tables and the figures in its text, each with where it stands.

"Uncertainty-gated selection for block-sparse attention", https://doi.org/10.5281/zenodo.20630587. Its names for models
are kept; its policies and budgets are written as ours (its k_budget is our budget, its backbone our scorer).
"""

from __future__ import annotations

from dataclasses import dataclass

K = 1024
MODELS = {
    "qwen2.5-14b": "Qwen-14B",
    "qwen2.5-7b-1m": "Qwen-7B-1M",
    "mistral-nemo": "Nemo-12B",
    "qwen3.6-35b": "Qwen3.6",
}  # our names for the panel's models, and the paper's
ByModel = dict[str, float]


def _by_model(*figures: float | None) -> ByModel:
    """Names figures by model, in the order of the paper's columns; None stands for its dash."""
    return {model: x for model, x in zip(MODELS.values(), figures, strict=True) if x is not None}


# RULER NIAH-multikey, 3 keys, n = 100: accuracy by policy.
RULER_WHERE = "Table 1, Section 4.2"
RULER: dict[str, ByModel] = {
    "dense": _by_model(1.00, 1.00, 0.96, 1.00),
    "topk": _by_model(0.51, 0.28, 0.29, 0.94),
    "router": _by_model(0.63, 0.39, None, 0.98),
    "quest": _by_model(0.93, 0.94, 0.50, 0.85),
    "router-on-quest": _by_model(0.98, 1.00, 0.66, 0.97),
}

# LongBench-v2 medium, n = 215: accuracy and paired recall by policy, and n_dc.
LONGBENCH_V2_WHERE = "Table 2, Section 4.2"
LONGBENCH_V2_ACCURACY: dict[str, ByModel] = {
    "dense": _by_model(0.19, 0.16, 0.27, 0.41),
    "topk": _by_model(0.19, 0.16, 0.24, 0.41),
    "router": _by_model(0.19, 0.16, 0.26, 0.39),
    "quest": _by_model(0.21, 0.15, 0.26, 0.27),
    "router-on-quest": _by_model(0.21, 0.20, 0.26, 0.32),
}
LONGBENCH_V2_PAIRED: dict[str, ByModel] = {
    "dense": _by_model(1.00, 1.00, 1.00, 1.00),
    "topk": _by_model(0.47, 0.60, 0.50, 0.90),
    "router": _by_model(0.60, 0.66, 0.64, 0.92),
    "quest": _by_model(0.68, 0.66, 0.57, 0.33),
    "router-on-quest": _by_model(0.75, 0.86, 0.69, 0.48),
}
LONGBENCH_V2_N_DC: ByModel = _by_model(40, 35, 58, 88)

# Speed and accuracy: by model the policy it has in the table, and by context (accuracy, wall time over dense's).
PARETO_WHERE = "Table 3, Section 4.3"
PARETO: dict[str, tuple[str, dict[int, tuple[float, float]]]] = {
    "Qwen-7B-1M": ("router-on-quest", {32 * K: (1.00, 1.09), 64 * K: (0.92, 0.87), 128 * K: (0.81, 0.62)}),
    "Qwen3.6": ("router", {32 * K: (0.98, 1.12), 64 * K: (0.92, 1.00), 128 * K: (0.89, 0.80)}),
}
# Attention's share of dense prefill, from the same section: an A100 for the first model, an H200 for the second.
ATTENTION_SHARE: dict[str, dict[int, float]] = {
    "Qwen-7B-1M": {32 * K: 0.31, 64 * K: 0.45, 128 * K: 0.63},
    "Qwen3.6": {32 * K: 0.11, 64 * K: 0.19, 128 * K: 0.37},
}
# The scorer that loses on each model, in the same section's text: accuracy by context.
PARETO_LOSING: dict[str, tuple[str, dict[int, float]]] = {
    "Qwen-7B-1M": ("topk", {32 * K: 0.28, 128 * K: 0.09}),
    "Qwen3.6": ("quest", {32 * K: 0.85, 128 * K: 0.50}),
}

# Budget match on RULER NIAH-multikey, n = 100: by policy and budget the effective budget and the accuracy.
BUDGET_MATCH_WHERE = "Table 4, Section 4.4"
BUDGET_MATCH: dict[tuple[str, int], tuple[float, ByModel]] = {
    ("topk", 33): (66, _by_model(0.51, None, 0.29, 0.94)),
    ("quest", 33): (66, _by_model(0.93, None, 0.51, 0.85)),
    ("quest", 40): (80, _by_model(0.95, None, 0.53, 0.88)),
    ("quest", 47): (94, _by_model(0.96, None, 0.57, 0.93)),
    ("quest", 52): (104, _by_model(0.97, None, 0.58, 0.95)),
    ("quest", 66): (132, _by_model(0.97, None, 0.60, 0.98)),
    ("router-on-quest", 33): (92.4, _by_model(0.98, None, 0.66, 0.97)),
    ("router", 33): (92.4, _by_model(0.63, None, None, 0.98)),
}


@dataclass(frozen=True)
class Lift:
    """The split of router-on-quest's lift over quest, in points of accuracy."""

    lift: float
    budget: float
    selectivity: float


BUDGET_MATCH_LIFT = {"Qwen-14B": Lift(0.05, 0.03, 0.02), "Nemo-12B": Lift(0.15, 0.06, 0.09)}
# Router-on-quest against quest at budget 47 on Qwen-14B: questions only one of the two answers, and exact McNemar.
BUDGET_MATCH_DISCORDANT = (3, 1)
BUDGET_MATCH_MCNEMAR = 0.625

# Pointer chase, 3 hops, Qwen-14B: by context and policy the seconds, the time over dense's, and the hit rate.
PCH_WHERE = "Table 5, Appendix B"
PCH_MODEL = "Qwen-14B"
PCH_BUDGET = {8 * K: 29, 32 * K: 40, 64 * K: 40}
PCH: dict[tuple[int, str], tuple[float, float, float]] = {
    (8 * K, "dense"): (1.4, 1.00, 1.00),
    (8 * K, "topk"): (1.6, 1.14, 0.79),
    (8 * K, "router:q=0.1"): (1.6, 1.14, 1.00),
    (32 * K, "dense"): (6.9, 1.00, 1.00),
    (32 * K, "topk"): (6.05, 0.88, 0.63),
    (32 * K, "router:q=0.1"): (6.6, 0.96, 0.78),
    (64 * K, "dense"): (17.5, 1.00, 1.00),
    (64 * K, "topk"): (14.1, 0.81, 0.42),
    (64 * K, "router:q=0.1"): (14.8, 0.85, 0.54),
}

# The router's q on RULER NIAH-multikey, n = 30: paired recall. The model is not named.
Q_SWEEP_WHERE = "Appendix C, row-grain q sweep"
Q_SWEEP = {"topk": 0.35, "router:q=0.1": 0.38, "router:q=0.2": 0.35, "router:q=0.3": 0.47, "router:q=0.4": 0.53}

# Triggers it rejected, without figures.
PER_CELL_WHERE = "Appendix C, per-cell quantile"
PER_CELL = "no gain over topk is left at any q (no figures given)"
ABSOLUTE_WHERE = "Appendix C, absolute threshold"
ABSOLUTE = "fits one layer's margins but not the others'; worse than the quantile (no figures given)"

# LongBench-v1, n = 30: paired recall by subset; and narrativeqa's F1 of the router over top-k's.
LONGBENCH_V1_WHERE = "Section 4.4, negative control"
LONGBENCH_V1_PAIRED: dict[tuple[str, str], float] = {
    ("musique-2hop", "topk"): 1.00,
    ("musique-4hop", "topk"): 1.00,
    ("qasper", "topk"): 1.00,
    ("narrativeqa", "topk"): 0.89,
    ("narrativeqa", "router"): 1.00,
}
LONGBENCH_V1_F1_GAIN = {"narrativeqa": 0.031}
