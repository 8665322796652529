"""How often a referee's search keeps what is no better, and what a gain of 0.5 % costs it, on made-up run times.

Runs have 0.3 % of noise.  n=10 a side takes 22 runs with its warm-ups, and as many again to confirm what it found.
"""

import random

from bench.base import text_table


def main(num="60"):
    """Prints the table and returns the exit code."""
    from test_searching import EFFECT, SD, search_of

    rows = []
    cases = [("nothing better", 0.0, 1000, {}), ("the same, three times the noise", 0.0, 1000, {"sd": 3 * SD})]
    cases += [("the same, a drift of 0.6 % within a round", 0.0, 1000, {"drift": 2 * SD})]
    cases += [("one in ten gains 0.5 %", 0.1, 100, {}), ("a gain of 0.5 %, at the first try", 1.0, 1, {})]
    for about, share, num_tries, noise in cases:
        num_searches = int(num) * (100 if num_tries == 1 else 1)
        chance, searches = random.Random(about), []
        for _ in range(num_searches):
            gains = [EFFECT if chance.random() < share else 0.0 for _ in range(num_tries)]
            searches.append(list(zip(gains, search_of(chance, gains, **noise), strict=True)))
        tries = [outcome for search in searches for outcome in search]
        false = [any(keep and not gain for gain, (keep, _) in search) for search in searches]
        keeps = sum(keep for _, (keep, _) in tries)
        true = [(keep, num_runs) for gain, (keep, num_runs) in tries if gain]
        wrong = sum(keep and not gain for gain, (keep, _) in tries)
        rows.append(
            [
                about,
                f"{sum(false) / num_searches:.3f}",
                f"{wrong} of {keeps}",
                f"{sum(keep for keep, _ in true) / len(true):.3f}" if true else "",
                f"{sum(num_runs for _, num_runs in true) / len(true):.1f}" if true else "",
                f"{sum(num_runs for _, (_, num_runs) in tries) / len(tries):.1f}",
            ]
        )
    heads = [
        "submissions",
        "searches with a false keep",
        "false keeps",
        "gains kept",
        "runs of a gain",
        "runs of a try",
    ]
    print(text_table.render(heads, rows, [False] + [True] * 5))
    return 0
