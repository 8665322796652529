"""The plan of a race, out of what was asked: every arm checked by its own code, fresh seeds, a random order, a hash in the ledger."""

import secrets

from bench import atomic, utc
from bench.paths import REPO
from bench.race import arm_process, plan, worktrees
from bench.race import state as race_state
from bench.record import ledger


def begin(request, results):
    """Check every arm, write the plan and put its hash into the ledger.  Returns the race's folder; nothing has run yet."""
    asked = request.pop("arms")
    commits = {name: worktrees.commit_of(REPO, arm["rev"]) for name, arm in asked.items() if arm["rev"] is not None}
    settings = {"n": plan.N, **request}
    plan.make({name: {} for name in asked}, made_at=utc.now(), **settings)  # refuse before any work
    with worktrees.of(
        REPO, {f"facts-{secrets.token_hex(4)}-{name}": commit for name, commit in commits.items()}
    ) as paths:
        folders = dict(zip(commits, paths.values(), strict=True))
        found = {name: facts(name, folders.get(name, REPO), arm["overrides"], results) for name, arm in asked.items()}
    arms = {name: asked[name] | _kept(one) for name, one in found.items()}
    first = next(iter(found.values()))
    others = {one["track"] for one in found.values()} - {first["track"]}
    if others:
        raise ValueError(f"track={first['track']} and {', '.join(others)}: the arms of a race run on one track")
    settings.setdefault("first_seed", _fresh_seed(arms, results))
    made = plan.make(
        arms,
        made_at=utc.now(),
        track=first["track"],
        order_seed=secrets.randbits(32),
        session_id=first["session_id"],
        **settings,
    )
    folder = race_state.folder_of(results, made["race_id"])
    try:
        folder.mkdir(parents=True)
        atomic.write_json(folder / "plan.json", made)
        ids = {name: [arm["config_id"], arm["source_sha256"]] for name, arm in arms.items()}
        ledger.append(
            results, "plan", race_id=made["race_id"], plan_sha256=plan.sha256(made), baseline=made["baseline"], arms=ids
        )
    except OSError as error:
        raise ValueError(
            f"{results}: no race can be written there ({error.strerror}): free space, or set SPEEDRUN_RESULTS=/path"
        ) from None
    return folder


def _fresh_seed(arms, results):
    """The first seed that no started run of these configs has had."""
    ids = {arm["config_id"] for arm in arms.values()}
    return (
        max(
            (line["seed"] for line in ledger.read(results) if line["event"] == "start" and line["config_id"] in ids),
            default=-1,
        )
        + 1
    )


def facts(name, folder, overrides, results):
    try:
        return arm_process.facts(folder, overrides, results)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _kept(found):
    return {key: found[key] for key in ("name", "config_id", "source_sha256", "commit", "dirty", "deviations")}
