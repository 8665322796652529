"""Scripts that need no torch, good and bad: python train.py WHAT.  For tests/test_scripts.py."""

import glob
import os
import subprocess
import sys
import time

WHAT = sys.argv[1]
NUM_STEPS, STEP_S, VAL_EVERY = 6, 0.06, 3
rank = int(os.environ.get("RANK", 0))


def read(pattern):
    for path in sorted(glob.glob(pattern)):
        with open(path, "rb") as file:
            file.read(1024)


def say(step, train_s, val_loss=None):
    val = "" if val_loss is None else f" val_loss:{val_loss:.4f}"
    print(
        f"step:{step}/{NUM_STEPS}{val} train_time:{1e3 * train_s:.0f}ms step_avg:{1e3 * train_s / max(step, 1):.2f}ms"
    )


def train(first_loss=6.0, num_steps=NUM_STEPS, counted_frac=1.0, compile_s=0.0):
    """Takes steps of which counted_frac is counted, validates and compiles outside of its clock."""
    train_s = 0.0
    for step in range(num_steps + 1):
        if step % VAL_EVERY == 0:
            time.sleep(0.05)
            say(step, train_s, first_loss - 0.4 * min(step, NUM_STEPS))
        if step < num_steps:
            time.sleep(0.0 if step else compile_s)
            started_s = time.perf_counter()
            time.sleep(STEP_S)
            train_s += counted_frac * (time.perf_counter() - started_s)
            say(step + 1, train_s)


def train_on_val():
    """Looks once at the training shards; then each step reads the validation shard, and only half of it counts."""
    step_s = 1.0  # so long that no late reader explains either
    for step in range(NUM_STEPS + 1):
        if step % VAL_EVERY == 0:
            read("data/fineweb10B/*_val_*.bin")
            time.sleep(0.05)
            say(step, step * step_s / 2, 6.0 - 0.4 * step)
        if step < NUM_STEPS:
            time.sleep(step_s / 2)
            read("data/fineweb10B/*_val_*.bin")
            time.sleep(step_s / 2)
            say(step + 1, (step + 1) * step_s / 2)


def validates_longer():
    """Validates for 0.1 s at step 0 and 1.2 s once it trains; opens the shard each time, as modded-nanogpt does."""
    train_s = 0.0
    for step in range(13):
        if step % 4 == 0:
            time.sleep(1.1 if step else 0.0)
            read("data/fineweb10B/*_val_*.bin")
            time.sleep(0.1)
            say(step, train_s, 6.0 - 0.1 * step)
        if step < 12:
            started_s = time.perf_counter()
            time.sleep(0.05)
            train_s += time.perf_counter() - started_s
            say(step + 1, train_s)


def untimed_first_steps():
    """As modded-nanogpt did in 2024: the clock begins after ten steps, which are compiled meanwhile."""
    train_s = 0.0
    for step in range(31):
        if step == 10:
            train_s = 0.0
        if step % 10 == 0:
            time.sleep(0.02)
            average = f"{1e3 * train_s / (step - 10):.2f}" if step > 10 else "nan"
            print(f"step:{step}/30 val_loss:{6 - 0.1 * step:.4f} train_time:{1e3 * train_s:.0f}ms step_avg:{average}ms")
        if step < 30:
            started_s = time.perf_counter()
            time.sleep(0.1 if step < 2 else 0.03)
            train_s += time.perf_counter() - started_s
            average = f"{1e3 * train_s / (step - 9):.2f}" if step > 9 else "nan"
            print(f"step:{step + 1}/30 train_time:{1e3 * train_s:.0f}ms step_avg:{average}ms")


def leave_what_no_record_can_hold():
    """Leaves holes of 4 TiB, pipes, folders without end, a name that is not UTF-8 and a device beside its lines."""
    for name in ("work/holes.bin", "logs/holes.log"):
        with open(f"../{name}", "wb") as file:
            file.truncate(2**42)
    os.mkfifo("../logs/pipe.log")
    os.symlink("/dev/zero", "zero.bin")
    os.symlink("loop.bin", "loop.bin")
    with open(b"not_\xff.txt", "w") as file:
        file.write("kept by nobody")
    top = os.getcwd()
    for _ in range(1500):
        os.mkdir("deep")
        os.chdir("deep")
    os.chdir(top)


def main():
    if WHAT == "silent":
        return
    if WHAT == "garbage":
        os.write(1, bytes(range(256)) * 40 + b"\nstep:nan/x loss\nstep:3/\x00 train_time:ms\n")
        return
    if WHAT == "raises":
        raise KeyError("planted")
    if WHAT == "exits":
        print("no data here: run prepare.py", flush=True)
        sys.exit(3)
    if WHAT == "lacks_a_variable":
        read(os.environ["PLANTED_DIR"])
    if WHAT == "out_of_memory":
        raise MemoryError("planted")
    if WHAT == "asks_for_a_gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        import torch

        torch.cuda.set_device(0)
    if WHAT == "a_gpu_is_full":
        import types

        snapshot = {"segments": [], "device_traces": [[]], "allocator_settings": {}}
        memory = types.SimpleNamespace(_snapshot=lambda: snapshot)
        sys.modules["torch"] = types.SimpleNamespace(
            cuda=types.SimpleNamespace(is_initialized=lambda: True, memory=memory)
        )
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
    if WHAT == "daemon":  # its parent gone, in a session of its own, without the run's variables; sys.argv[2] is a mark
        subprocess.Popen(
            f"setsid env -i sleep {sys.argv[2]} & setsid env -i sh -c 'sleep {sys.argv[2]} & exit'", shell=True
        )
    if WHAT == "hangs":
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        for step in range(6000):
            say(step, 0.1 * step, 6.0)
            time.sleep(0.1)
    if WHAT == "own_data":
        read(sys.argv[2])
        beside = sys.argv[2].removesuffix("bin")
        read(beside + "txt")
        if os.path.isdir(beside + "folder"):
            open(beside + "out", "w").close()
            os.system(f"echo x | tee -a {beside}tee >/dev/null")
            os.rename(beside + "folder", beside + "moved")
            os.makedirs(beside + "made", exist_ok=True)
    if WHAT == "validates_longer":
        read("data/fineweb10B/*_train_*.bin")
    elif WHAT not in ("other_data", "own_data"):
        read("data/fineweb10B/*_train_*.bin")
        read("data/fineweb10B/*_val_*.bin")
    if WHAT == "other_data":
        with open("other_train.bin" if os.path.exists("other_train.bin") else sys.argv[2], "rb") as file:
            file.read(1)
        read("data/fineweb10B/*_train_*.bin")
    if WHAT == "sets_inductor_flags":
        import torch._inductor.config as inductor

        inductor.max_autotune = True
    if WHAT == "trains_on_val_and_claims_less":
        train_on_val()
    elif WHAT == "validates_longer":
        validates_longer()
    elif WHAT == "claims_more":  # a log of another run, printed at once
        for step in range(NUM_STEPS + 1):
            say(step, 91.0 * step / NUM_STEPS, 6.0 - 0.4 * step)
    elif WHAT == "hides_steps":  # no line of a step, and half of the time uncounted
        for step in range(0, NUM_STEPS + 1, VAL_EVERY):
            say(step, 0.1 * step, 6.0 - 0.4 * step)
            time.sleep(0.1 * VAL_EVERY + 0.5)
    elif WHAT == "trained_before":
        train(first_loss=2.6)
    elif WHAT == "goes_back":
        train()
        train(first_loss=5.0)
    elif WHAT == "diverges":
        say(0, 0.0, 6.0)
        say(1, 0.1, float("nan"))
    elif WHAT == "trains_beyond_its_end":
        train(num_steps=NUM_STEPS + 3)
    elif WHAT == "stops_early":
        for step in range(3):
            say(step, 0.06 * step, 6.0 if step < 2 else None)
            time.sleep(0.06)
    elif WHAT == "untimed_first_steps":
        untimed_first_steps()
    elif WHAT == "edits_itself":
        train()
        with open(__file__, "a") as file:
            file.write("# edited\n")
    elif WHAT == "prints_much":
        line = "x" * 1000 + "\n"
        for _ in range(64):
            sys.stdout.write(line * 1000)
        train()
    elif WHAT == "goes_on":  # and stays a while when it is asked to end
        train(num_steps=600)
    elif WHAT == "names_little_time":
        train(num_steps=600, counted_frac=0.001)
    elif WHAT == "compiles_for_long":
        train(num_steps=600, compile_s=5.0)
    elif WHAT in ("stops_naming_its_time", "validates_never"):
        train() if WHAT == "stops_naming_its_time" else say(1, 0.1)
        time.sleep(60)
    elif WHAT == "leaves_what_no_record_can_hold":
        train()
        leave_what_no_record_can_hold()
    elif WHAT == "leaves_much":
        train()
        with open("much.bin", "wb") as file:
            file.write(bytes(2**23))
    elif WHAT == "lies_of_its_failure":
        with open("../logs/rank0.failure.json", "w") as file:
            file.write('{"kind": 7, "failed_at_s": "y", "message": []}')
        os.kill(os.getpid(), 9)
    elif WHAT == "own_words":
        for number in range(NUM_STEPS):
            if number % 3 == 0:
                print(f"eval at {number}: {6.0 - number:.3f}")
            time.sleep(STEP_S)
            print(f"it {number} of {NUM_STEPS}: nll {6.0 - number:.3f} after {STEP_S * (number + 1):.3f} s")
        print(f"eval at {NUM_STEPS}: 3.5")
    elif WHAT == "a_child_prints":
        subprocess.run([sys.executable, "-c", "print('a child was here')"], check=True)
        train()
    else:
        train()


if rank == 0 or WHAT in ("raises", "hangs"):
    main()
else:
    read("data/fineweb10B/*.bin")
