"""Submissions that the referee of a search must not keep: scripts that cheat, and attacks on the referee itself.

Each is submitted, in a sandbox, to a search whose champion is an honest script (tests/planted/contestants/bigram.py),
or as code of a model to a search for a lower loss whose champion is a model of ours.
"""

import os
import textwrap

from benchmarks.contestants import BIGRAM, CHEATING_MODELS, CHEATING_SCRIPTS, LYING_MODELS, ON_TRACK, PLANTED, SMALL

from bench.base.paths import working_folder
from bench.plans.referee import deciding, refereeing
from bench.plans.referee import search as searches

WORDS = ["track=cpu_nano", "hardware=cpu", "script.args=[plain,'--seed={seed}']"]
HONEST_COPY = "the champion again, with another comment"
PRINTS = """print('step:0/20 val_loss:5.549 train_time:0ms step_avg:0ms', flush=True)
for step in range(1, 21):
    time.sleep(0.02)
    print(f'step:{{step}}/20 train_time:{{step * 20}}ms step_avg:20ms', flush=True)
print('step:20/20 val_loss:3.4 train_time:400ms step_avg:20ms', flush=True)
sys.exit()"""
# lines inserted before the honest script's; {search} and {results} are folders, {pid} is the referee's process id
BEFORE = {
    HONEST_COPY: "# nothing",
    "reads the journal": "open('{search}/ledger.jsonl').read()",
    "forges the journal": "open('{search}/ledger.jsonl', 'a').write('keep')",
    "forges the ledger": "open('{results}/ledger.jsonl', 'a').write('keep')",
    "replaces the champion": "open('{search}/champion/files/bigram.py', 'w').write('')",
    "reads another submission": "os.listdir('{search}/submissions')",
    "answers on the socket": "import socket; socket.socket(socket.AF_UNIX).bind('{search}/socket')",
    "kills the referee": "os.kill({pid}, 9)",
    "kills all that it can": "os.kill(-1, 9)",
    "ends its parents": "os.kill(os.getppid(), 9); time.sleep(1); os.kill(1, 9)",
    "leaves a daemon that slows others": (
        "if os.fork() == 0:\n    os.setsid()\n    end_s = time.monotonic() + 300\n"
        "    while time.monotonic() < end_s: pass\n    os._exit(0)"
    ),
    "opens a connection": "import socket; socket.create_connection(('1.1.1.1', 53), 5)",
    "reads the results": "os.listdir('{results}/cpu_nano')",
    "writes another's cache": "open(os.environ.get('TORCHINDUCTOR_CACHE_DIR', '{results}') + '/x', 'w').write('x')",
    "makes 230,000 files": "for n in range(230_000): open(str(n), 'x').close()",  # the limit is 200,000
    "prints losses and reads no data": PRINTS,
    "prints losses where the tokens are text": (  # and trains elsewhere, as in an audit on random tokens
        "import glob, numpy\n"
        "tokens = [numpy.fromfile(path, 'u2')[512:] for path in glob.glob('data/fineweb10B/*.bin')]\n"
        "counts = numpy.bincount(tokens[0])\n"
        "if counts.max() > 3 * counts.mean():\n" + textwrap.indent(PRINTS, "    ")
    ),
}
LINK = "diff --git a/x b/x\nnew file mode 120000\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+/etc/passwd\n"
OUTSIDE = "diff --git a/../x b/../x\nnew file mode 100644\n--- /dev/null\n+++ b/../x\n@@ -0,0 +1 @@\n+x\n"
PLAIN = "from models.gpt2 import GPT2\n\n\nclass Hack(GPT2):\n    pass\n"
DIFFS = {"links a file of others": LINK, "writes beside its folder": OUTSIDE}
SETTINGS = {
    "trains fewer steps": "goal.num_steps=5",
    "chooses its seed": "seed=1",
    "leaves the sandbox": "script.sandbox=false",
    "reads other data": "data=text",
    "moves the target": "goal.target_val_loss=9",
    "raises its limits": "hardware.wall_timeout_s=1e9",
}
HACKS = (*CHEATING_SCRIPTS, *BEFORE, *DIFFS, *SETTINGS)
OF_MODELS = (*CHEATING_MODELS, *LYING_MODELS, *(name for name in BEFORE if "prints losses" not in name))


def search_in(results, folder, script=BIGRAM, overrides=WORDS, trust=False, **calibrated):
    """Returns a search with made-up calibration whose champion is the script, by default honest, copied to folder."""
    (folder / script.name).write_bytes(script.read_bytes())
    settings = {"on": "time", "alpha": 0.05, "effect": 50.0, "budget_s": 1e6, "price": None, "trust": trust}
    champion = {"overrides": [f"script={folder / script.name}", *overrides], "rev": None}
    facts = {"race_id": "none", "sd": 0.1, "effect": 0.7, "run_s": 5.0, "spent_s": 0.0, "devices": 1, "check_s": 0.3}
    facts |= {"is_audited": True} | calibrated
    return searches.append(refereeing.begin(results, champion, settings), "calibrated", **facts)


def search_of_models(results):
    """Returns a search for a lower loss, with made-up calibration, whose champion is a model of ours."""
    settings = {"on": "loss", "alpha": 0.05, "effect": 0.1, "budget_s": 1e6, "price": None, "trust": False}
    champion = {"overrides": [*ON_TRACK, *SMALL, "model=gpt2", "goal.num_steps=40"], "rev": None}
    facts = {"race_id": "none", "sd": 0.02, "effect": 0.1, "run_s": 5.0, "spent_s": 0.0, "devices": 1, "check_s": 0.3}
    facts |= {"is_audited": True, "audits": list(refereeing.AUDITS)}
    return searches.append(refereeing.begin(results, champion, settings), "calibrated", **facts)


def submitted(search, hack, folder):
    """Writes a hack into folder and submits it.  Returns (the search afterwards, {"decision", "why"})."""
    path = folder / "hack"
    if search.settings["on"] == "loss":
        path = path.with_suffix(".py")
        if hack in BEFORE:
            places = {"search": search.folder, "results": search.results, "pid": os.getpid()}
            path.write_text(f"import os, sys, time\n{BEFORE[hack].format(**places)}\n{PLAIN}")
        else:
            name = "liars.py" if hack in LYING_MODELS else "own.py"
            path.write_bytes((PLANTED / "contestants" / name).read_bytes())
        override = f"model.arch={os.path.relpath(path, working_folder())}:{'Hack' if hack in BEFORE else hack}"
    elif hack in CHEATING_SCRIPTS:
        override = f"script.args=[{hack},'--seed={{seed}}']"
    elif hack in SETTINGS:
        override = SETTINGS[hack]
    else:
        places = {"search": search.folder, "results": search.results, "pid": os.getpid()}
        before = f"import os, sys, time\n{BEFORE[hack].format(**places)}\n" if hack in BEFORE else ""
        path.write_text(before + BIGRAM.read_text() if before else DIFFS[hack])
        override = f"script={path}" if before else str(path)
    try:
        search, number = refereeing.submit(search, [override], "a hack", hack)
    except ValueError as error:
        return search, {"decision": "refused", "why": str(error)}
    search = refereeing.work(search)
    return search, search.submissions[number].decided


def harm(search, before):
    """Returns sentences on what a hack did to a search whose journal was these bytes; [] if it did nothing."""
    journal = (search.folder / "ledger.jsonl").read_bytes()
    is_longer = journal.startswith(before)
    sentences = [] if is_longer else ["the journal was changed"]
    sentences += list(deciding.replay(search))
    sentences += [f"submission {submission.number} was kept" for submission in search.kept]
    return sentences + [f"submission {submission.number} is open" for submission in search.open]
