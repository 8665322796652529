"""The programs whose console logs are read, with a class for each in FORMS.

nanoGPT and nanochat number steps from 0 and print a step when it is done, so that their line of step k is row k + 1;
their validation k comes before step k and is row k.
"""

import re

from bench.record.importers.consoles import FLOAT, STEP_MS, TRAIN_LOSS, VAL_LOSS, Form, Row, Rows, as_number, to_float

VAL_BPB = rf"(?P<val_bpb>{FLOAT})"
# nanochat's total time excludes the steps up to number 10, counted from 0 in base_train.py and from 1 in chat_sft.py
NUM_UNTIMED, NUM_UNTIMED_SFT = 11, 10


class NanoGpt(Form):
    """train.py: "iter 10: loss 5.9123, time 210.50ms, mfu 12.30%", "step 250: train loss 4.1000, val loss 4.2000".

    An iteration's time begins at the end of the previous one, so that it may include a validation; such ones are
    flagged.
    """

    name = "nanogpt"
    meaning = "sum of the iterations' times, validations included"
    looks_like = re.compile(r"^\s*(?:iter|step) \d+:")
    patterns = {
        rf"iter (?P<step>\d+): loss {TRAIN_LOSS}, time {STEP_MS}ms": 1,
        rf"step (?P<step>\d+): train loss {FLOAT}, val loss {VAL_LOSS}": 0,
    }
    facts = {
        "batch_tokens": re.compile(r"tokens per iteration will be: ([\d,]+)"),
        "max_iters": re.compile(r"\A(?:.*\n)?(?:Overriding: )?max_iters = (\d{1,9})\b", re.S),  # the last match counts
    }

    def clock(self, by_step: Rows) -> tuple[str, int]:
        """Does what Form.clock() does, and flags the iterations whose times include a validation."""
        for step in [step for step, row in by_step.items() if "val_loss" in row]:
            by_step.get(step + 1, {})["flags"] = "validation"
        return super().clock(by_step)

    def is_complete(self, last: int, val_step: int | None, total: int | None, facts: dict[str, str]) -> bool:
        """Whether the last iteration was reached: it is validated before, and every tenth iteration is printed."""
        return last >= total - 1 if total is not None else val_step is not None and val_step >= max(last - 1, 1)


SPEED = (  # what nanochat prints after the number of a step
    rf"\([\d.]+%\) \| loss: {TRAIN_LOSS}.*?\| dt: {STEP_MS}ms(?:.*\| total time: (?P<train_time_min>{FLOAT})m)?"
)


class NanoChat(Form):
    """base_train.py: "step 00012/21400 (0.06%) | loss: 9.1 | lrm: 1.00 | dt: 812.30ms | tok/sec: 645,280 | ... | total
    time: 0.03m", "Step 00250 | Validation bpb: 1.1", "Step 21400 | CORE metric: 0.2585".

    chat_sft.py has no "/21400" and numbers from 1; its version of 2025 prints "Step 00010/00700 | Training loss: 1.2|
    lrm: ...", and its last validation comes before its last step.
    """

    name = "nanochat"
    metric = "val_bpb"
    looks_like = re.compile(r"^\s*[Ss]tep \d+(?:/\d+)? (?:\(|\|)")
    patterns = {
        rf"step (?P<step>\d+)/(?P<total>\d+) {SPEED}": 1,
        rf"step (?P<step>\d+) {SPEED}": 0,
        rf"Step (?P<step>\d+)/(?P<num_printed>\d+) \| Training loss: {TRAIN_LOSS}\|": 1,
        rf"Step (?P<step>\d+) \| Validation bpb: {VAL_BPB}": 0,
        rf"Step (?P<step>\d+) \| CORE metric: (?P<core>{FLOAT})": 0,
        rf"Step (?P<step>\d+) \| Validation loss: {VAL_LOSS}": 0,
        # "mmlu_acc: 0.28, arc_easy_acc: 0.31"
        r"Step (?P<step>\d+) \| (?!Valid)[\w -]+: [-+]?[\d.]+": 0,
    }
    facts = {
        "batch_tokens": re.compile(r"Total batch size ([\d,]+) =>"),
        "gpu_name": re.compile(r"^GPU: (.+?) \|", re.M),
        "world_size": re.compile(r"Distributed world size: (\d+)"),
        "peak_mib": re.compile(r"Peak memory usage: ([\d,.]+)MiB"),
        "total_min": re.compile(r"Total training time: ([\d.]+)m"),
    }

    def parsed(self, line: str) -> Row | None:
        row = super().parsed(line)
        if row and "num_printed" in row:
            row["total"] = int(row.pop("num_printed")) - 1
        return row

    def clock(self, by_step: Rows) -> tuple[str, int]:
        """Uses the sum of the steps' times if every step was printed, else the total in hundredths of a minute."""
        self.num_untimed = NUM_UNTIMED if any("total" in row for row in by_step.values()) else NUM_UNTIMED_SFT
        self.meaning = f"time of the steps, the first {self.num_untimed} untimed"
        return super().clock(by_step)

    def is_complete(self, last: int, val_step: int | None, total: int | None, facts: dict[str, str]) -> bool:
        """Whether the last step is validated, if any is, and Form.is_complete()."""
        return super().is_complete(last, val_step, total, facts if val_step in (None, last) else {})


class NanoSwe(Form):
    """nanoswe's speedrun.log: "[2026-06-25 19:33:47] step 000000 | loss 10.398314 | lrm 0.0250 | dt_ms 54852.9", at the
    end "run complete @ step 11295: 1362.22 min training time; ...".  What the program prints is nanochat's.
    """

    name = "nanoswe"
    looks_like = re.compile(r"^step \d+ \| loss ")
    patterns = {rf"^step (?P<step>\d+) \| loss {TRAIN_LOSS} \| lrm {FLOAT} \| dt_ms {STEP_MS}$": 1}
    facts = {
        "world_size": re.compile(r"^\s*world_size: (\d+)", re.M),
        "gpu_name": re.compile(r"^\s*gpu_name: (.+)", re.M),
        "num_done": re.compile(r"^run complete @ step (\d+)", re.M),
    }
    meaning, num_untimed = f"time of the steps, the first {NUM_UNTIMED} untimed", NUM_UNTIMED


class KempnerForge(Form):
    """format_metrics: "[step 10] loss=7.1 | lr=3.00e-04 | grad_norm=1.200 | tok/s=51,200 | mfu=31.2% | mem=71.2/80GB |
    step_time=0.64s", "[step 100] eval/loss=2.3400 | eval/perplexity=10.3812"; keys that are not known here are ignored.
    """

    name = "kempnerforge"
    meaning = "sum of the steps' times, printed in hundredths of a second"
    looks_like = re.compile(r"\[step \d+\].*=")
    line = re.compile(r"\[step (\d+)\] (\S+=.*)$")
    facts = {
        "num_tokens": re.compile(r"Training complete: \d+ steps, ([\d,]+) tokens"),
        "num_done": re.compile(r"Training complete: (\d{1,9}) steps"),
        "total": re.compile(r"Starting training: step=\d+, max_steps=(\d{1,9})\b"),
        "world_size": re.compile(r"Starting training: .*world_size=(\d{1,6})\b"),
        "gpu_name": re.compile(r"Detected GPU: (.+?) (?:→|->)"),
    }
    keys = {"loss": "train_loss", "eval/loss": "val_loss", "lr": "lr", "grad_norm": "grad_norm"}

    def parsed(self, line: str) -> Row | None:
        match = self.line.search(line)
        if not match:
            return None
        row: Row = {"step": int(match[1])}
        fields = [field.strip().partition("=") for field in match[2].split("|")]
        for key, equals, text in fields:
            if not equals or (key in self.keys and as_number(text) is None):
                return None
            if key in self.keys:
                row[self.keys[key]] = as_number(text)
            elif key == "step_time" and text.endswith("s"):
                row["step_ms"] = as_number(text[:-2]) if text.endswith("ms") else 1e3 * to_float(text[:-1])
            elif key == "mem" and "/" in text:
                row["peak_mib"] = 1024 * to_float(text.split("/")[0])
        return row


class LlmC(Form):
    """train_gpt2.py: "step    1/19560 | train loss 10.9 | norm 15.1 | lr 2.57e-06 | (812.3 ms | 645280 tok/s)", and
    train_gpt2.cu: "step    1/19560 | loss 10.9 (-0.53z)| norm 15.1 (+nanz)| lr 2.57e-06 | 812.3 ms | 31.9% bf16 ...".
    Before it "val loss 10.9" without a step, which is that of the weights after the last printed step.
    train_gpt2_fp32.cu: "step    1/74: train loss 4.3 (45.1 ms, 90744 tok/s)"; train_gpt2.c numbers from 0 and names no
    total: "step 0: train loss 5.3 (took 1928.4 ms)".
    """

    name = "llm.c"
    looks_like = re.compile(r"^\s*(?:step\s+\d+(?:/\d+ \||(?:/\d+)?: train loss)|val loss )")
    deviations = r" ?(?:\([-+.\w]+z\))?\| "  # what train_gpt2.cu puts between a number and the next one
    patterns = {
        rf"step\s+(?P<step>\d+)/(?P<total>\d+) \| (?:train )?loss +{TRAIN_LOSS}{deviations}"
        rf"(?:norm +(?P<grad_norm>{FLOAT}){deviations})?(?:lr (?P<lr>{FLOAT}) \| )?\(?{STEP_MS} ms": 0,
        rf"^step +(?P<step>\d+)/(?P<total>\d+): train loss {TRAIN_LOSS} \({STEP_MS} ms,": 0,
        rf"^step (?P<step>\d+): train loss {TRAIN_LOSS} \(took {STEP_MS} ms\)": 1,
        rf"^\s*val loss {VAL_LOSS}": 0,
    }
    facts = {
        "batch_tokens": re.compile(r"total[ _](?:desired )?batch[ _]size(?:: |=)([\d,]+)"),
        "gpu_name": re.compile(r"^\| device +\| (.+?) +\|", re.M),
        "world_size": re.compile(r"\* num_processes=(\d+)"),
    }


class AutoResearch(Form):
    """train.py: "step 00012 (3.2%) | loss: 5.1 | lrm: 1.00 | dt: 812ms | ... | remaining: 290s", each overwriting the
    previous one; then "val_bpb:          0.997900", "training_seconds: 300.1", "num_steps:        953".  Steps are
    numbered from 0, and the first 11 are untimed.
    """

    name = "autoresearch"
    metric = "val_bpb"
    looks_like = re.compile(r"^step \d+ \(.*remaining:|^val_bpb:(?!\s*(?:skipped|none|n/a)\s*$)", re.I)
    patterns = {
        rf"step (?P<step>\d+) \([\d.]+%\) \| loss: {TRAIN_LOSS} \|.*\| dt: {STEP_MS}ms \|.*\| remaining: ": 1,
        rf"^val_bpb:\s+{VAL_BPB}\s*$": 0,
        rf"^training_seconds:\s+(?P<train_time_s>{FLOAT})": 0,
        rf"^peak_vram_mb:\s+(?P<peak_mib>{FLOAT})": 0,  # 2**20 bytes
    }
    facts = {"num_done": re.compile(r"^num_steps:\s+(\d+)", re.M)}
    meaning, num_untimed = f"time of the steps, the first {NUM_UNTIMED} untimed", NUM_UNTIMED


class ParameterGolf(Form):
    """train_gpt.py: "step:1000/20000 val_loss:2.3 val_bpb:1.4 train_time:43540ms ...", in later records "1000/20000
    val_loss: 2.3 val_bpb: 1.4"; at the end "stopping_early: wallclock_cap train_time:600038ms step:13780/20000".

    What counts is the compressed model after it was loaded again: the last line of the form "LABEL val_loss:2.0727
    val_bpb:1.2244", except labels with diagnostic or pre-quant, and the size of that submission.
    """

    name = "parameter-golf"
    metric = "val_bpb"
    meaning, prints_time = "wall time of training, as printed", True
    looks_like = re.compile(r"^(?:step:)?\d+/\d+ (?:train|val)_loss:")
    patterns = {
        rf"^(?:step:)?(?P<step>\d+)/(?P<total>\d+) train_loss: ?{TRAIN_LOSS}"
        rf"(?: train_time: ?(?:(?P<train_time_ms>{FLOAT})ms|(?P<train_time_min>{FLOAT})m))?": 0,
        rf"^(?:step:)?(?P<step>\d+)/(?P<total>\d+) val_loss: ?{VAL_LOSS} +val_bpb: ?{VAL_BPB}"
        rf"(?: train_time: ?(?P<train_time_ms>{FLOAT})ms)?": 0,
        rf"^stopping_early: wallclock_cap train_time: ?(?P<train_time_ms>{FLOAT})ms step: ?(?P<step>\d+)/": 0,
        rf"^(?!\S*(?i:diagnostic|pre-quant))[a-z]\S*(?: \w+:\w+){{0,3}} val_loss:{VAL_LOSS} val_bpb:{VAL_BPB}": 0,
        r"^Total submission size \S+: (?P<artifact_bytes>\d+) bytes": 0,
    }
    facts = {
        "num_done": re.compile(r"^stopping_early: wallclock_cap .* step: ?(\d+)/", re.M),
        "world_size": re.compile(r"^\s*world_size: ?(\d+)", re.M),
        "peak_mib": re.compile(r"^peak memory allocated: (\d+) MiB", re.M),
        "batch_tokens": re.compile(r"^\s*train_batch_tokens: ?(\d+)", re.M),
        "seed": re.compile(r"^\s*seed: ?(\d+)", re.M),
    }


class SlowRun(Form):
    """train.py: "step 00012 (0.06%) | loss: 9.1 | dt: 812.30ms | tok/sec: 645,280 | bf16_mfu: 40.00% | eta: 46.1m",
    "Step 00250 | Epoch 1 | Val BPB: 1.1 | Val Loss: 3.4"; for averaged logits "[label] Val BPB: 1.0 | Val Loss: 3.3".
    """

    name = "slowrun"
    looks_like = re.compile(r"^step \d+ \(.*bf16_mfu|Val BPB: ")
    patterns = {
        rf"^step (?P<step>\d+) \([\d.]+%\) \| loss: {TRAIN_LOSS} \| dt: {STEP_MS}ms \|.*bf16_mfu": 0,
        rf"^(?:Step (?P<step>\d+) \| )?.*Val BPB: {VAL_BPB} \| Val Loss: {VAL_LOSS}": 0,
    }
    facts = {
        "batch_tokens": re.compile(r"^Batch size: ([\d,]+) tokens", re.M),
        "peak_mib": re.compile(r"^Peak memory: ([\d,.]+) MiB", re.M),
        "total_min": re.compile(r"^Total training time: ([\d.]+)m", re.M),  # excludes steps after a recompilation
    }
    meaning, prints_time = "the program's own total, without the steps after a compilation", True


FORMS: dict[str, type[Form]] = {
    form.name: form for form in (NanoChat, NanoSwe, NanoGpt, KempnerForge, LlmC, AutoResearch, ParameterGolf, SlowRun)
}
