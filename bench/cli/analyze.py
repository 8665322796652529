"""./run.sh analyze PATH... [--json] [--rules FILE]      ./run.sh analyze diff A B

PATH: a run folder, a Kineto trace (.json, .json.gz), or a folder of ranks' traces, also of other programs.
Several files are the ranks of one job; several folders, and the windows of a run, are answered one by one, in --json as
{PATH: answer}.  Of a run folder it also writes analysis.json and summary.md into it, of its first window.  Needs no
torch.
"""

import json
import os
import sys

from bench import atomic
from bench.cli import arguments, trace_jobs
from bench.record import named
from bench.trace import analysis, diff, diff_text, load
from bench.trace.text import as_markdown, as_text


def main(argv):
    """Exit codes: 0 analysed, 2 wrong use or no trace."""
    if argv[:1] == ["diff"]:
        return _diff(argv[1:])
    args = _parser().parse_args(argv)
    trace_jobs.answers(args, lambda *job: _answers(*job, args))
    return 0


def _answers(whole, paths, rules, args):
    """Paths of one job -> {title: analysis}, one for each window."""
    by_window = load.by_window([file for path in paths for file in load.find(path)])
    answers = {}
    for name, ranks in by_window.items():
        title = whole + (f", window {name}" if len(by_window) > 1 else "")
        answers[title] = analysis.of_ranks(ranks, rules, args.include_last_step)
        if not args.json:
            print(as_text(answers[title], title))
    if (paths[0] / "run.json").is_file():
        _keep(paths[0], next(iter(answers.values())))
    return answers


def _keep(folder, answer):
    """Beside the run's record, for reports."""
    try:
        atomic.write_json(folder / "analysis.json", answer)
        if not (folder / "summary.md").exists() or (folder / "summary.md").read_text().startswith("# Trace analysis"):
            atomic.write_text(folder / "summary.md", as_markdown(answer, folder.name))
        print(f"analyze: wrote {os.path.relpath(folder / 'analysis.json')}", file=sys.stderr)
    except OSError as error:
        print(f"analyze: {folder}/analysis.json could not be written ({error.strerror})", file=sys.stderr)


def _diff(argv):
    parser = arguments.Parser("./run.sh analyze diff", description="What changed from A to B, per step.")
    parser.add_argument("a", metavar="A", help="a trace, a folder of traces or a run")
    parser.add_argument("b", metavar="B")
    hint = "match kernels by name, or operators by name and shape; kernels where there are some"
    parser.add_argument("--by", choices=["kernel", "operator"], help=hint)
    parser.add_argument("--rank", type=int, help="the rank to compare in a folder of several; default: the lowest")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    ranks = [_one_rank(word, args.rank) for word in (args.a, args.b)]
    by = args.by or diff.by_default(ranks)
    for word, rank in zip((args.a, args.b), ranks):
        if by == "kernel" and not len(rank.device_rows()):
            raise ValueError(f"--by kernel: {word} has no kernels, it is a trace of the CPU alone: match by operator")
    answer = {"by": by} | diff.compare(*(diff.profile(rank, by) for rank in ranks))
    print(json.dumps(answer, indent=1) if args.json else diff_text.as_text(answer, args.a, args.b))
    return 0


def _one_rank(word, number):
    ranks = load.load_all(load.find(named.path(word)))
    for rank in ranks:
        if number is None or rank.rank == number:
            return rank
    raise ValueError(f"--rank {number}: {word} has ranks {', '.join(str(rank.rank) for rank in ranks)}")


def _parser():
    return trace_jobs.parser("analyze", main)
