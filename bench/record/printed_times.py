"""What a script says its training took, against when its lines came: pure, from the rows of its steps.csv.

Row k has the time that the script printed at step k (train_time_ms; train_time_at_val_ms where its validation printed
another one) and when that line came (line_t_ns, val_line_t_ns; time.perf_counter_ns of another process).

Between two lines of steps a script that is honest counts what passed.  Before a validation's line it need not: its
clock stands still while it validates (nanoGPT's does not: its next iteration holds the validation).  So time that no
line counts may lie only there; and a script can never count more time than has passed.  Lines come late on a busy
machine, and each edge of a validation may do so: hence the tolerances.
"""

from itertools import pairwise

TOLERANCE_S, TOLERANCE_FRAC, VALIDATION_TOLERANCE_S = 0.1, 0.002, 0.02  # assumed: late lines of a busy machine
MAX_UNTIMED_STEPS, RESTART_MS = 10, 1.0
UNSEEN_FRAC = 0.1  # of the counted time: what may pass uncounted before a validation whose steps have no lines


def events(rows: list[dict]) -> list[tuple[int, int, bool, float]]:
    """[(t_ns, step, whether of a validation, printed ms)] of every line with a time, in the order of coming."""
    result = []
    holders = {row["step"] for row in rows if row.get("flags") == "validation"}  # whose own time holds the validation
    for row in rows:
        time_ms = row.get("train_time_ms")
        if row.get("line_t_ns") is not None and time_ms is not None:
            result.append((row["line_t_ns"], row["step"], False, time_ms))
        at_val_ms = row.get("train_time_at_val_ms")
        at_val_ms = time_ms if at_val_ms is None else at_val_ms
        at_val_ms = 0.0 if at_val_ms is None and not row["step"] else at_val_ms
        if row.get("val_line_t_ns") is not None and at_val_ms is not None and row["step"] + 1 not in holders:
            result.append((row["val_line_t_ns"], row["step"], True, at_val_ms))
    return sorted(result)


def restarted_at(rows: list[dict]) -> int:
    """The step, of the first ten, at which the clock was set back to its beginning once: those before are in no time.

    As modded-nanogpt did until 2025.  0: it was not.
    """
    back = [b for a, b in pairwise(events(rows)) if b[3] < a[3]]
    return back[0][1] if len(back) == 1 and back[0][1] <= MAX_UNTIMED_STEPS and back[0][3] <= RESTART_MS else 0


def account(rows: list[dict], num_untimed_steps: int = 0) -> dict:
    """{"wall_of_lines_s", "counted_s", "uncounted_s", "uncounted_at_validations_s", "unseen_s", "overcounted_s"}.

    From the first line after the untimed steps to the last.  uncounted_s: what passed and was not counted;
    uncounted_at_validations_s: of it before a validation's line; unseen_s: of that, where steps passed since the line
    before, so that it may be training; overcounted_s: the most that was counted in a row and had not passed (of single
    lines, late or rounded, nothing adds up).  All None without two times.
    """
    timed = [event for event in events(rows) if event[1] >= num_untimed_steps]
    starts = [number for number, (a, b) in enumerate(pairwise(timed), 1) if b[3] < a[3]]
    timed = timed[starts[-1] :] if starts and num_untimed_steps else timed
    names = ("wall_of_lines_s", "counted_s", "uncounted_s", "uncounted_at_validations_s", "unseen_s", "overcounted_s")
    if len(timed) < 2:
        return dict.fromkeys(names)
    result, most_s = dict.fromkeys(names, 0.0), 0.0
    for (a_ns, a_step, _, a_ms), (b_ns, b_step, is_val, b_ms) in pairwise(timed):
        wall_s, counted_s = (b_ns - a_ns) / 1e9, (b_ms - a_ms) / 1e3
        result["wall_of_lines_s"] += wall_s
        result["counted_s"] += counted_s
        result["uncounted_s"] += wall_s - counted_s
        if is_val:
            result["uncounted_at_validations_s"] += wall_s - counted_s
            result["unseen_s"] += wall_s - counted_s if b_step > a_step + 1 else 0.0
        most_s = max(most_s, result["uncounted_s"])
        result["overcounted_s"] = max(result["overcounted_s"], most_s - result["uncounted_s"])
    return result


def doubts(rows: list[dict], num_untimed_steps: int = 0) -> list[str]:
    """Sentences: why the printed times cannot be what training took; [] where they can."""
    result, said = account(rows, num_untimed_steps), []
    if result["wall_of_lines_s"] is None:
        return ["fewer than two lines name a time: what the script counted cannot be checked"]
    num_vals = sum(is_val for _, _, is_val, _ in events(rows))
    tolerance_s = TOLERANCE_S + TOLERANCE_FRAC * abs(result["counted_s"]) + VALIDATION_TOLERANCE_S * num_vals
    wall_s, counted_s = result["wall_of_lines_s"], result["counted_s"]
    lines = f"its lines came in {wall_s:.2f} s and count {counted_s:.2f} s"
    between_s = result["uncounted_s"] - result["uncounted_at_validations_s"]
    if result["overcounted_s"] > tolerance_s:
        said.append(f"it counts more time than passed: {lines}; they were not printed as it trained")
    elif between_s > tolerance_s:
        passed = f"{between_s:.2f} s passed between steps, where no validation is, uncounted"
        said.append(f"it claims less time than its lines took: {lines}; {passed}")
    if result["unseen_s"] > tolerance_s + UNSEEN_FRAC * abs(counted_s):
        passed = f"{result['unseen_s']:.2f} s passed uncounted between lines that are several steps apart"
        said.append(f"{passed}: whether it validated or trained is not to be seen")
    timed = [event for event in events(rows) if event[1] >= num_untimed_steps]
    back = [b for a, b in pairwise(timed) if b[1] < a[1] or (b[3] < a[3] and not num_untimed_steps)]
    if back:
        said.append(f"its lines are out of order: at step {back[0][1]} the step or the time goes back")
    return said
