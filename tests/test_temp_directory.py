"""However a run ends, nothing of it stays in the temp directory.

Ended launchers are looked after in test_rainy_days.py, the doctor in test_doctor.py.
"""

import real_runs

from bench.record import run_folder


def test_neither_a_complete_nor_a_failed_run_leaves_anything_in_the_temp_directory(two_rank_run, diverged_run):
    assert real_runs.left_in_temp(two_rank_run.parents[2]) == []
    assert not [name for name in run_folder.files(two_rank_run) if "attempt" in name or "elastic" in name]
    assert real_runs.run_json(diverged_run)["failure"]["kind"] == "non_finite_loss"
    assert real_runs.left_in_temp(diverged_run.parents[2]) == []
