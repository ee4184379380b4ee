"""verl's own reward, except for one problem, for which it is not a number (verl's `reward.custom_reward_function`)."""

import math

from verl.utils.reward_score import default_compute_score

INDEX = 3  # of the problem in its data set


def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] == INDEX:
        return math.nan
    return default_compute_score(data_source, solution_str, ground_truth, extra_info)
