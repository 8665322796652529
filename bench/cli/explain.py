"""./run.sh explain RUN|TRACE... [--json] [--rules FILE] [--include-last-step]

One step as a waterfall: what the device's limit explains, then what lies above it and why, in parts that add up to the
measured step exactly; for several ranks who delays whom; last where the next millisecond is.

Several trace files are the ranks of one job; folders, and the windows of a run, are explained one by one, in --json as
{TITLE: account}.  A run without a trace is explained from its record, more coarsely.  Needs no torch.
"""

from bench.cli import trace_jobs
from bench.explain import account, from_record, garbage, text
from bench.trace import load
from bench.trace.source import NoTrace


def main(argv):
    """Exit codes: 0 explained, 2 wrong use, or nothing that could be explained."""
    args = _parser().parse_args(argv)
    answers = trace_jobs.answers(args, lambda *job: _answers(*job, args.include_last_step))
    if not args.json:
        print("\n\n".join(text.as_text(answer, title) for title, answer in answers.items()))
    return 0


def _answers(title, paths, rules, include_last_step):
    """Paths of one job -> {title: account}, one for each window."""
    is_run = len(paths) == 1 and (paths[0] / "run.json").is_file()
    try:
        files = [file for path in paths for file in load.find(path)]
    except NoTrace:
        if not is_run:
            raise
        return {title: from_record.of(paths[0])}
    windows, answers = load.by_window(files), {}
    for name, ranks in windows.items():
        if is_run:
            garbage.add(ranks, paths[0])
        label = title + (f", window {name}" if len(windows) > 1 else "")
        answers[label] = account.of_ranks(ranks, rules, include_last_step)
    return answers


def _parser():
    return trace_jobs.parser("explain", main)
