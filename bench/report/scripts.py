"""What the page of a run says of a training script: what it claims, and what was seen of it."""

from bench.web.page import Safe, section, soft, table, tag

FROM_OUTSIDE = (
    ("wall_of_lines_s", "its lines came in, s"),
    ("counted_s", "of that it counted, s"),
    ("uncounted_s", "and did not count, s"),
    ("uncounted_at_validations_s", "of that before validations, s"),
    ("unseen_s", "of that with steps that have no line, s"),
    ("overcounted_s", "counted, but not passed, s"),
    ("num_untimed_steps", "first steps that are in no time"),
    ("foreign_cpu_cores", "other programs' load, CPU cores"),
)


def line(run: dict) -> str:
    """What stands below the title; "" for a run of our own model."""
    of = run.get("script")
    return f", script {of['file']}, dialect {of.get('dialect') or 'unknown'}" if of else ""


def words(run: dict) -> str:
    """Behind the times of the sentence that says how the run ended."""
    wall_s = run["measured"].get("wall_of_lines_s")
    if not run.get("script"):
        return ""
    return ", as the script says" + ("" if wall_s is None else f" (its lines came in {wall_s:.2f} s)")


def section_of(run: dict) -> Safe | str:
    """What ran, what was measured from outside, and what it opened; "" for a run of our own model."""
    of, measured = run.get("script"), run["measured"]
    if not of:
        return ""
    facts = {
        "script": tag("code", " ".join([of["file"], *of["args"]])),
        "its interpreter": of.get("python") or "the harness's own",
        "variables": ", ".join(f"{name}={value}" for name, value in of["env"].items()) or None,
        "sources": ", ".join(name.removeprefix("script/") for name in of["sha256_by_file"]),
        "dialect of its lines": of.get("dialect"),
        "steps that it declared": _number(of.get("declared_steps")),
        "its step_avg": of.get("step_avg_meaning"),
        **{name: _number(measured.get(key)) for key, name in FROM_OUTSIDE},
        "data that it opened": ", ".join(of.get("opened") or ()) or "none that was seen",
        "files that it wrote": ", ".join(of.get("files_written") or ()) or None,
        "lines that its log lacks": of.get("num_unkept_lines") or None,
    }
    lines = [(name, value) for name, value in facts.items() if value is not None]
    note = soft(
        "Its time is its own claim; the wall time of its lines was taken by another process.  Seeds are labels."
    )
    return section("The training script", table((), lines, class_="facts"), note)


def _number(value):
    return f"{value:.3f}" if isinstance(value, float) else None if value is None else str(value)
