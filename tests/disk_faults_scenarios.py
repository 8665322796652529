"""The commands that disk_faults.py disturbs, and what a user types after each.

Sweeps and races use a script that prints two steps, because only the launcher matters in them, and a rank that imports
torch takes four times as long.
"""

from dataclasses import dataclass

TINY = [
    "track=free",
    "model.num_layers=1",
    "model.width=32",
    "model.num_heads=1",
    "goal.val_tokens=4096",
    "hardware=cpu",
]
TINY += ["goal.num_steps=2", "goal.val_every_steps=1", "hardware.num_threads=1", "hardware.stall_timeout_s=30"]
LOG = "".join(f"iter {step}: loss {5 - step / 9:.4f}, time 12.00ms, mfu 1.00%\n" for step in range(9))
SCRIPT = """import time

print("step:0/2 val_loss:5.5000 train_time:0ms step_avg:nanms", flush=True)
began_s = time.perf_counter()
for step in (1, 2):
    time.sleep(0.02)
    passed_ms = 1e3 * (time.perf_counter() - began_s)
    print(f"step:{step}/2 val_loss:{5.5 - step / 4:.4f} train_time:{passed_ms:.0f}ms step_avg:{passed_ms / step:.2f}ms")
"""
SCRIPTED = ("track=free", "script=train.py", "hardware=cpu", "hardware.num_threads=1", "hardware.stall_timeout_s=30")
LIMIT_S = 1200.0  # a command that takes longer hangs; a race of six tiny runs took 300 s on a busy machine


@dataclass(frozen=True)
class Scenario:
    """A command, and the command that a user types next."""

    name: str
    command: tuple[str, ...]
    again: tuple[str, ...]
    num_runs: int = 0  # number of runs that the command trains
    quick: tuple[str, ...] | None = None  # replaces `again` after three faults of four; trains nothing


IMPORT_LOG, ONE_MORE = ("import", "nanogpt", "nanogpt.log"), ("run", *SCRIPTED, "seed=7")
OF_SWEEP = ("run", "-m", *SCRIPTED, "seed=0,1", "--anyway")
OF_RACE = ("race", "A=", "B=script.args=[1]", "n=2", *SCRIPTED, "--anyway")
RESUMED, ABANDONED = ("race", "--resume", "--anyway"), ("race", "--abandon")
RUN = Scenario("run", ("run", *TINY), ONE_MORE, 1, IMPORT_LOG)
PAIR = Scenario("pair", ("run", *TINY, "hardware.num_processes=2"), ONE_MORE, 1, IMPORT_LOG)
SCRIPT_RUN = Scenario("script", ("run", *SCRIPTED), ONE_MORE, 1, IMPORT_LOG)
SWEEP = Scenario("sweep", OF_SWEEP, OF_SWEEP, 2, IMPORT_LOG)
RACE = Scenario("race", OF_RACE, RESUMED, 6, ABANDONED)
RESUME = Scenario("resume", RESUMED, RESUMED, 1)
IMPORT = Scenario("import", IMPORT_LOG, IMPORT_LOG)
PUBLISH = Scenario(
    "publish", ("publish", "results/free", "--name", "mine"), ("publish", "results/free", "--name", "again")
)
SCENARIOS = {scenario.name: scenario for scenario in (RUN, PAIR, SCRIPT_RUN, SWEEP, RACE, RESUME, IMPORT, PUBLISH)}
OF_A_RACE = ("race", "resume")
