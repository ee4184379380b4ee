"""The documentation's tables of results, made from benchmarks/results. `tools.docs_tables` puts them into the pages."""

from functools import partial

from tools.result_tables import drafting, engines, jobs, overview, scheduling

TABLES = {
    "headline": jobs.headline,
    "end_to_end": jobs.end_to_end,
    "epochs": jobs.epochs,
    "many_lanes": partial(jobs.end_to_end, "end_to_end_256"),
    "noisy": partial(jobs.end_to_end, "end_to_end_gsm8k_noisy"),
    "separate": partial(jobs.end_to_end, "end_to_end_separate"),
    "own_speed": jobs.own_speed,
    "replayed": drafting.replayed,
    "models": drafting.models,
    "suffix_tuned": drafting.suffix_tuned,
    "variants": drafting.variants,
    "reward_weights": drafting.reward_weights,
    "rollout": engines.rollouts,
    "slower": engines.slower,
    "host": engines.host_time,
    "overhead": engines.overhead,
    "worst_seeds": scheduling.worst_seeds,
    "compat": engines.compat,
    "load": scheduling.load,
    "tiers": scheduling.tiers,
    "simulated": scheduling.simulated,
    "recomputes": scheduling.recomputes,
    "bars": overview.bars,
    "missed_bars": overview.missed_bars,
    "results": overview.results,
}
