"""The verbs: one file a verb, parse, call, print, exit code."""

VERBS = {  # verb: (module in bench/cli/, what it does)
    "run": ("run", "run once, or a sweep with -m (the default verb)"),
    "speedrun": ("speedrun", "data, preflight, the track's repeats, table, verdict"),
    "race": ("race", "which of several is faster? planned, interleaved, judged"),
    "ladder": ("ladder", "what did each record bring? the speedrun's records raced as a staircase"),
    "compare": ("compare", "is B faster than A? runs, races or logs"),
    "calibrate": ("calibrate", "the smallest difference this machine can measure"),
    "table": ("table", "the results table"),
    "analyze": ("analyze", "what Kineto traces say: time, kernels, gaps, ranks, and what changed"),
    "explain": ("explain", "why a step takes as long as it does, and where the next millisecond is"),
    "report": ("report", "pages and pictures of a run, a race or all results"),
    "memory": ("memory", "what held the memory: a page for each memory snapshot"),
    "dashboard": ("dashboard", "finished runs into TensorBoard, Weights & Biases or MLflow"),
    "judge": ("judge", "does a claim hold by the rules of its track?"),
    "audit": ("audit", "check a run for leaks and false losses: run it again on random and held-out tokens"),
    "replay": ("replay", "run a record again from itself alone, and certify what came out"),
    "bisect": ("bisect", "which commit made it slower, or worse?"),
    "publish": ("publish", "runs, a race or a claim as evidence for git: results/published/"),
    "import": ("import_logs", "logs of modded-nanogpt, nanochat, nanogpt, kempnerforge, llm.c -> records"),
    "export": ("export", "records as csv, parquet, MLPerf log lines or a modded-nanogpt log"),
    "verify": ("verify", "check a run folder against its own record"),
    "data": ("data", "fetch, make or show data"),
    "doctor": ("doctor", "is this machine fit to measure?"),
    "init": ("init", "make this folder a project: an own model, experiment and track to start from"),
    "bench-self": ("bench_self", "what this harness itself costs"),
    "completion": ("completion", "completion for a shell: source <(./run.sh completion bash)"),
}
CHECKOUT_VERBS = {  # run.sh's own
    "test": "run the tests (./run.sh test [--all] [pytest arguments])",
    "lint": "check the style and the types of the code, as CI does",
}
