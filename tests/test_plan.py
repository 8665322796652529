"""The plan of a race: its order, its looks, its hash; and what a user may type."""

import itertools
import shlex

import claimed
import pytest

from bench.cli import race
from bench.compare import eligibility
from bench.config import compose
from bench.plans.race import plan


def arms(*names):
    return {name: {"config_id": name * 8} for name in names}


def made(n=5, names="AB", **settings):
    return plan.make(arms(*names), n, "2026-11-21T08:00:00.123Z", **settings)


def blocks(order, size):
    run = [place["arm"] for place in order if not place["discarded"]]
    return ["".join(run[start : start + size]) for start in range(0, len(run), size)]


WHOLE = {"ABBABAAB", "BAABABBA", "ABABBABA", "BABAABAB"}  # s r r s and s s r r
CUT = {0: {""}, 1: {"AB", "BA"}, 2: {"ABBA", "BAAB"}, 3: {block[:6] for block in WHOLE}}


@pytest.mark.parametrize("n", range(2, 21))
def test_two_arms_run_in_blocks_of_four_rounds_and_the_last_may_be_cut_short(n):
    orders = [blocks(plan.order(["A", "B"], n, order_seed=seed), 8) for seed in range(100)]
    num_whole = n // 4
    assert {block for order in orders for block in order[:num_whole]} == (WHOLE if num_whole else set())
    assert {"".join(order[num_whole:]) for order in orders} == CUT[n % 4]


def test_all_orders_of_a_block_happen():
    orders = {blocks(plan.order(["A", "B", "C"], 2, order_seed=seed), 6)[0] for seed in range(100)}
    assert orders == {"".join(arms + arms[::-1]) for arms in itertools.permutations("ABC")}


@pytest.mark.parametrize("seed", range(20))
def test_a_linear_drift_and_a_disturbance_of_every_fourth_run_hit_both_arms_alike(seed):
    """A B B A A B B A, which was possible before, is hit by the latter in one arm alone."""
    order = plan.order(["A", "B"], 12, order_seed=seed)
    signs = [{"A": 1, "B": -1}[place["arm"]] for place in order if not place["discarded"]]
    assert sum(minute * sign for minute, sign in enumerate(signs)) == 0
    assert [sum(signs[phase::4]) for phase in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize("num_arms", range(2, 6))
def test_every_order_counts_as_interleaved(num_arms):
    names = list("ABCDE"[:num_arms])
    for n, seed in itertools.product(range(2, 21), range(10)):
        starts = {name: [] for name in names}
        for minute, place in enumerate(plan.order(names, n, order_seed=seed)):
            if not place["discarded"]:
                starts[place["arm"]].append({"started_at": claimed.at(minute)})
        for a, b in itertools.combinations(names, 2):
            assert eligibility._are_interleaved(starts[a], starts[b]), (n, seed, a, b)


def test_each_arm_has_one_discarded_warm_up_before_all_else_and_n_runs_with_the_same_seeds():
    order = plan.order(["A", "B", "C"], 4, first_seed=7, order_seed=1)
    assert [place["discarded"] for place in order] == [True] * 3 + [False] * 12
    for arm in "ABC":
        assert [place["seed"] for place in order if place["arm"] == arm] == [7, 7, 8, 9, 10]


@pytest.mark.parametrize(("n", "m", "groups"), [(4, 2, "0011"), (6, 3, "001122"), (3, 3, "012"), (5, 1, "00000")])
def test_runs_are_made_in_equal_groups_of_consecutive_rounds_that_share_a_compilation(n, m, groups):
    order = made(n=n, compilations=m)["order"]
    for arm in "AB":
        compilations = [place["compilation"] for place in order if place["arm"] == arm]
        assert compilations == [0, *map(int, groups)]  # the warm-up's first


@pytest.mark.parametrize(
    ("n", "is_sequential", "m"),
    [(2, False, 2), (3, False, 3), (5, False, 5), (6, False, 3), (10, False, 5), (20, True, 20)],
)
def test_a_gpu_compiles_at_least_three_times_and_anew_in_each_round_that_may_be_the_last(n, is_sequential, m):
    assert plan.fewest_compilations(n, is_sequential) == m


def test_a_race_of_unknown_length_looks_after_every_round():
    request = plan.parse_request(["n=auto:3-20"])
    assert request == {"arms": {}, "n": 20, "sequential": {"first": 3, "last": 20}}
    design = made(n=request["n"], sequential=request["sequential"])
    assert (design["n"], design["looks"], design["sequential"]) == (20, list(range(3, 21)), {"first": 3, "last": 20})
    due = [plan.look_after(design, position) for position in range(len(design["order"]))]
    assert [look for look in due if look] == design["looks"]
    assert made()["sequential"] is None and made()["compilations"] == 1


def test_the_hash_is_that_of_every_word_of_the_plan():
    base, changes = made(), ({"n": 4}, {"looks": [3]}, {"alpha": 0.01}, {"order_seed": 1}, {"names": "BA"})
    assert plan.sha256(base) == plan.sha256(made())
    assert len({plan.sha256(base), *(plan.sha256(made(**change)) for change in changes)}) == 6
    assert base["race_id"].startswith("20261121T080000Z-race-") and base["baseline"] == "A"


def test_a_look_is_due_when_every_arm_has_that_many_runs_and_the_last_after_all_of_them():
    assert made()["looks"] == [5] and made(looks=[3])["looks"] == [3, 5]
    design = made(n=4, looks=[2])
    due = [plan.look_after(design, position) for position in range(len(design["order"]))]
    assert due == [None, None, None, None, None, 2, None, None, None, 4]


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"n": 1}, "n=1: one run has no spread"),
        ({"names": "A"}, "A: a race needs two arms"),
        ({"looks": [6]}, "looks=5,6: give numbers of runs from 2 to n=5"),
        ({"looks": [1]}, "looks=1,5"),
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"compilations": 2}, "compilations=2: n=5 does not divide into 2 equal groups: use n=4"),
        ({"compilations": 0}, "compilations=0"),
        ({"compilations": 9}, "use n=9"),
        ({"n": 3, "sequential": {"first": 3, "last": 3}}, "n=auto:3-3: give a first look, 2 or more, and a"),
        ({"sequential": {"first": 1, "last": 5}}, "n=auto:1-5"),
        ({"looks": [3], "sequential": {"first": 2, "last": 5}}, "looks=3: n=auto:2-5 looks after every round"),
        ({"margin": 0}, "margin=0"),
        ({"first_seed": -1}, "seed=-1"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_what_would_be_right(settings, sentence):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        made(**settings)


def arm(*overrides, rev=None):
    return {"overrides": list(overrides), "rev": rev}


@pytest.mark.parametrize(
    ("arguments", "arms"),
    [
        (
            ["A=", "B=model=modern optim=muon", "C.rev=HEAD~1", "C=optim.lr=0.01", "track=free"],
            {
                "A": arm("track=free"),
                "B": arm("track=free", "model=modern", "optim=muon"),
                "C": arm("track=free", "optim.lr=0.01", rev="HEAD~1"),
            },
        ),
        (  # an interpreter is a setting of the arm's script
            ["B.python=/opt/py", "script=train.py", "A=", "B=seq=1"],
            {"A": arm("script=train.py"), "B": arm("script=train.py", "seq=1", "script.python=/opt/py")},
        ),
        (["A=data.train_glob='my books/*.txt' seq=1"], {"A": arm("data.train_glob=my books/*.txt", "seq=1")}),
        (["HEAD~1", "HEAD"], {"A": arm(rev="HEAD~1"), "B": arm(rev="HEAD")}),  # revisions alone, in their order
        (
            ["v1", "v2", "v3", "track=free"],
            {name: arm("track=free", rev=rev) for name, rev in (("A", "v1"), ("B", "v2"), ("C", "v3"))},
        ),
        (  # of the script's own repository
            ["HEAD~1", "v2", "script=train.py"],
            {
                "A": arm("script=train.py", "script.root=.", "script.rev='HEAD~1'"),
                "B": arm("script=train.py", "script.root=.", "script.rev=v2"),
            },
        ),
    ],
)
def test_words_become_arms(arguments, arms):
    settings = {"n": 3, "looks": [2, 3], "margin": 0.01, "alpha": 0.1, "name": "try"}
    options = ["n=3", "looks=2,3", "margin=0.01", "alpha=0.1", "name=try"]
    assert plan.parse_request([*arguments, *options]) == {"arms": arms, **settings}


@pytest.mark.parametrize(
    "argument, sentence",
    [
        ("A", "'A': write key=value"),
        ("HEAD B=optim=muon", "'HEAD': write key=value, or A=... for an arm"),
        ("B=seed=3", "the race sets the seeds"),
        ("n=many", "n=many: it must be a number of runs up to 10,000, or auto:3-20"),
        ("n=1000000000", "it must be a number of runs up to 10,000"),
        ("n=auto:3-1000000000", "it must be a number of runs up to 10,000"),
        ("looks=3;5", "looks=3;5: it must be numbers of runs"),
        ("A='open", "No closing quotation"),
        ("B.goal.num_steps=40", "write B='goal.num_steps=40'"),
        ("B=optim=muon B.optim.lr=1", "write B='optim=muon optim.lr=1'"),
        ("b=optim=muon", "begins with a capital letter: write B='optim=muon'"),
        ("B.python=py", "has no arm B: write B='script=...' too"),
        ("name=a/b", "it becomes part of a folder's name"),
    ],
)
def test_a_word_that_means_nothing_is_refused(argument, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan.parse_request(argument.split())


def test_the_examples_of_the_help_can_be_raced():
    commands = [line.strip().partition("   ")[0] for line in race.__doc__.splitlines() if "./run.sh race " in line]
    examples = [shlex.split(command)[2:] for command in commands[1:] if "--from-sweep" not in command]
    assert len(examples) == 4
    for arguments in examples:
        own = arguments[: arguments.index("--fail-on")] if "--fail-on" in arguments else arguments
        arms = plan.parse_request(own)["arms"]
        assert list(arms) == ["A", "B"]
        for arm in arms.values():
            compose.compose(arm["overrides"])
