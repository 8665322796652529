"""The page of a run: links that lead somewhere, what was watched for, and what nobody knows of an imported run."""

import re

import pytest
from browser import Browser, needs_browser
from kept_records import COMPLETE, add, results  # noqa: F401  a fixture

from bench.analysis.diagnosis import between_runs
from bench.cli import import_logs
from bench.cli import report as cli
from bench.record import failures, run_folder, step_files
from bench.report import run_facts, run_page


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """The folder of a run imported from a log: 60 steps of 100 ms, one of them of 400 ms."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    lines, time_ms = ["step:0/60 val_loss:10.8258 train_time:0ms step_avg:nanms"], 0
    for step in range(1, 61):
        time_ms += 400 if step == 30 else 100
        lines.append(
            f"step:{step}/60 train_loss:{8 - step / 20:.4f} train_time:{time_ms}ms step_avg:{time_ms / step:.2f}ms"
        )
    lines.append(f"step:60/60 val_loss:5.1000 train_time:{time_ms}ms step_avg:{time_ms / 60:.2f}ms")
    log = tmp_path / "theirs" / "a-log.txt"
    log.parent.mkdir()
    log.write_text("\n".join(lines) + "\n")
    import_logs.main(["modded-nanogpt", str(log)])
    (folder,) = run_folder.find_runs([tmp_path / "results"])
    return folder


def links_of(html):
    return [link for link in re.findall(r'href="([^"]+)"', html) if link[0] not in "#d"]


def test_an_imported_run_says_so_whence_it_is_and_what_is_unknown(imported):
    html, run = run_page.html(imported), run_folder.read(imported)
    title, text = re.search("<title>(.*?)</title>", html)[1], html[html.index("<main") : html.index("</main>")]
    assert title == "a-log, imported, imported"  # its name, its track, and that it is one
    assert "None" not in text and "./run.sh" not in text and "badge good" not in text
    assert '<span class="badge doubt">imported</span>' in text and "as its log says" in text
    assert run["imported"]["sha256"] in text and "imported from a log of modded-nanogpt: a-log.txt" in text
    unknown = text[text.index("<h2>Unknown</h2>") :]
    assert all(f"<li>{label}</li>" in unknown for label in ("seed", "commit", "command", "GPUs", "optimizer"))
    block = run_page.block(imported)
    assert "imported" in block and "None" not in block and "valid" not in block.replace("validation", "")


def test_the_stalls_of_an_imported_run_are_those_that_compare_counts(imported):
    run, rows = run_folder.read(imported), step_files.read(imported)
    costs = run_facts.costs_of(run, rows)
    assert costs == {"stall": {"count": 1, "ms": 300.0}}
    stall = between_runs.diagnose([(run, rows)], [(run, rows)])["costs"]["stall"]
    assert (stall["count"], stall["ms"]) == ([1, 1], [300.0, 300.0])
    html = run_page.html(imported)
    assert "Not watched, so unknown: gc, recompile, graph break, allocator retry (a log does not say)." in html
    assert "No stall" not in html


def test_a_run_names_what_it_was_watched_for(results):
    folder = add(results, 3, costs={"stall": {"count": 0, "ms": 0.0}, "gc": {"count": 2, "ms": 1.5}})
    html = run_page.html(folder)
    assert "None of these occurred: stall." in html
    assert "Not watched, so unknown: recompile, graph break, allocator retry" in html
    assert re.search(r"<td>gc</td><td class=\"number\">2</td><td class=\"number\">1.5</td>", html)


def test_files_are_links_where_they_are_there_and_only_there(results):
    folder = add(
        results,
        4,
        artifacts=[{"path": name, "role": "x", "num_bytes": 1, "sha256": "ab"} for name in ("steps.csv", "gone.csv")],
    )
    links = links_of(run_page.html(folder))
    assert "steps.csv" in links and "run.json" in links and "gone.csv" not in links
    elsewhere = folder.parent / "pages"
    links = links_of(run_page.html(folder, at=elsewhere))
    assert f"../{folder.name}/steps.csv" in links
    assert all((elsewhere.parent / link.removeprefix("../")).exists() for link in links)


def test_a_run_of_a_race_leads_to_the_page_of_the_race(results):
    folder = add(results, 5, race={"race_id": "a-race", "arm": "B", "discarded": True})
    assert "race.html" not in run_page.html(folder) and "a-race, warm-up of arm B" in run_page.html(folder)
    (results / "races" / "a-race").mkdir(parents=True)
    (results / "races" / "a-race" / "race.json").write_text("{}")
    assert "../../races/a-race/race.html" in links_of(run_page.html(folder))


def test_the_loss_comes_first_and_then_the_step_time():
    assert [spec["id"] for spec in run_page.document(COMPLETE).charts][:2] == ["loss", "step-time"]


def test_a_killed_run_reads_well(results):
    failure = {"kind": "rank_killed", "message": "rank 0 was ended by SIGKILL", "rank": 0, "step": 3}
    failure |= {"hint": failures.HINTS["rank_killed"]}
    run = run_folder.read(add(results, 6, status="failed", validity="invalid", failure=failure))
    assert run_page.sentence(run) == (
        "It ended at step 3 (rank_killed): rank 0 was ended by SIGKILL. "
        "Hint: look into the kernel log (dmesg): after its out-of-memory killer free memory or lower "
        "hardware.micro_batch_seqs; if it has no such line, somebody or the job's scheduler ended it: start it again."
    )


def test_a_stall_is_said_in_words():
    event = {"event": "stall", "step": 3, "ms": 37.4, "step_ms": 94.8, "usual_ms": 57.4, "what": "after_validation"}
    event |= {"causes": [], "where": {}}
    assert run_facts.details(event) == "37.4 ms above the usual 57.4 ms, cause: after validation"
    event["causes"] = [{"what": "foreign_load", "ms": 30.125}, {"what": "gc", "ms": None}]
    event["where"] = {"forward_ms": 25.2}
    assert run_facts.details(event).endswith(", cause: foreign load 30.12 ms, gc, in forward 25.2 ms")


@needs_browser
def test_a_run_has_two_columns_where_there_is_room_and_its_numbers_on_the_first_screen(results):
    path = add(results, 7) / run_page.NAME
    cli.main([str(path.parent)])
    lefts = "[...document.querySelectorAll('.columns figure')].map(one => one.getBoundingClientRect().left)"
    with Browser() as browser:
        for width, height, num_columns in ((1300, 900, 2), (800, 900, 1), (400, 800, 1)):
            shown = browser.open(path, width=width, height=height)
            assert shown.errors == [] and shown.js(f"new Set({lefts}).size") == num_columns
            assert shown.js("document.documentElement.scrollWidth <= innerWidth")
            assert shown.js("document.querySelector('.tiles').getBoundingClientRect().bottom < innerHeight")
