"""Statistics: numbers in, numbers out.  Nothing here knows a run, a file or a unit.

Written without scipy, which is not needed at run time; the tests compare every function with it to 1e-9.
"""

# ruff: noqa: F401  (what this package offers: stats.welch, stats.sd)
from bench.base.stats.describe import cv_pct, mean, mean_interval, median_interval, percentile, sd
from bench.base.stats.distributions import noncentral_t_cdf, normal_cdf, student_t_cdf, student_t_quantile, student_t_sf
from bench.base.stats.hypotheses import (
    Welch,
    equivalence_p,
    holm,
    interval,
    non_inferiority_p,
    one_sample_t_less,
    welch,
    welch_df,
    welch_of_samples,
)
from bench.base.stats.power import ALPHA, WANTED_POWER, needed_n, power, smallest_difference
