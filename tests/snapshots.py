"""Synthetic memory snapshots in the format of torch.cuda.memory._snapshot() (2.13), made by a small allocator.

It places blocks by first fit in segments of a fixed size, rounds up to 512 bytes as torch does, and merges free blocks.
"""

from bench.analysis.memory import lives

MIB = 2**20
STEP_US = 1000.0


def frames(*lines):
    """Converts lines such as "models/gpt2.py:45 forward" to frames in torch's format."""
    stack = []
    for line in lines:
        place, _, name = line.rpartition(" ")
        filename, _, number = place.rpartition(":")
        stack.append({"filename": filename, "line": int(number), "name": name})
    return stack


FORWARD = frames(
    "/site-packages/torch/nn/functional.py:2200 linear",
    "models/gpt2.py:45 forward",
    "bench/training/trainer.py:85 step",
)
WEIGHTS = frames("/site-packages/torch/nn/modules/linear.py:100 __init__", "models/gpt2.py:12 __init__")
LOGITS = frames("models/gpt2.py:70 forward", "bench/training/trainer.py:85 step")


class Allocator:
    """The allocator of a device number.  Each call adds an entry to the trace, 1 ms after the previous one."""

    def __init__(self, device=0, segment_bytes=20 * MIB, start_us=1.7e15):
        self.device, self._segment_bytes, self._now_us = device, segment_bytes, start_us
        self.trace, self._segments, self._next = [], [], 0x7F0000000000
        self.recording = True

    def alloc(self, size, stack=()):
        """Allocates a block and returns its address."""
        rounded = -(-size // 512) * 512
        segment, block = self._fitting(rounded) or self._grow(rounded)
        rest = block["size"] - rounded
        if rest:
            free = self._block(block["address"] + rounded, rest)
            segment["blocks"].insert(segment["blocks"].index(block) + 1, free)
        block |= {"size": rounded, "requested_size": size, "state": "active_allocated", "frames": list(stack)}
        self._say("alloc", block["address"], size, stack)
        return block["address"]

    def free(self, address, completed=True):
        segment, block = next((s, b) for s in self._segments for b in s["blocks"] if b["address"] == address)
        self._say("free_requested", address, block["requested_size"])
        block["state"] = "active_awaiting_free"
        if completed:
            self._say("free_completed", address, block["requested_size"])
            block |= {"state": "inactive", "requested_size": 0, "frames": []}
            self._merge(segment)

    def oom(self, size, device_free, stack=()):
        self._say("oom", None, size, stack, device_free=device_free)

    def snapshot(self, **fields):
        for segment in self._segments:
            used = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
            segment["allocated_size"] = sum(block["size"] for block in used)
            segment["active_size"] = sum(block["size"] for block in segment["blocks"] if block["state"] != "inactive")
            segment["requested_size"] = sum(block["requested_size"] for block in used)
        traces = [[] for _ in range(self.device)] + [self.trace]
        settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False}
        settings["roundup_power2_divisions"] = {"1": 0}
        return {
            "segments": self._segments,
            "device_traces": traces,
            "allocator_settings": settings,
            "external_annotations": [],
            **fields,
        }

    @property
    def now_us(self):
        return self._now_us

    def _say(self, action, address, size, stack=(), **fields):
        if self.recording:
            entry = {
                "action": action,
                "size": size,
                "stream": 0,
                "time_us": self._now_us,
                "compile_context": "N/A",
                "user_metadata": "",
                "pool_id": (0, 0),
                "frames": list(stack),
                **fields,
            }
            self.trace.append(entry | ({} if address is None else {"addr": address}))
        self._now_us += STEP_US

    def _fitting(self, size):
        for segment in self._segments:
            for block in segment["blocks"]:
                if block["state"] == "inactive" and block["size"] >= size:
                    return segment, block
        return None

    def _grow(self, size):
        total = max(self._segment_bytes, -(-size // (2 * MIB)) * 2 * MIB)
        block = self._block(self._next, total)
        segment = {
            "device": self.device,
            "address": self._next,
            "total_size": total,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [block],
        }
        self._segments.append(segment)
        self._say("segment_alloc", self._next, total)
        self._next += total + 2 * MIB
        return segment, block

    @staticmethod
    def _block(address, size):
        return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}

    @staticmethod
    def _merge(segment):
        merged = []
        for block in segment["blocks"]:
            if merged and merged[-1]["state"] == block["state"] == "inactive":
                merged[-1]["size"] += block["size"]
            else:
                merged.append(block)
        segment["blocks"][:] = merged


def training(num_steps=3, num_layers=6, weights_before=True):
    """Returns a snapshot of some training steps: weights, and activations that are allocated and freed."""
    gpu = Allocator()
    gpu.recording = not weights_before
    for _ in range(num_layers):
        gpu.alloc(3 * MIB, WEIGHTS)
    gpu.recording = True
    marks = []
    for step in range(num_steps):
        marks.append((gpu.now_us, f"step {step + 1}"))
        marks.append((gpu.now_us, "forward"))
        kept = [gpu.alloc(2 * MIB + 100 * layer, FORWARD) for layer in range(num_layers)]
        kept.append(gpu.alloc(9 * MIB, LOGITS))
        marks.append((gpu.now_us, "backward"))
        for address in reversed(kept):
            gradient = gpu.alloc(3 * MIB)
            gpu.free(address)
            gpu.free(gradient)
    return gpu.snapshot(speedrun={"rank": 0, "window": "steps", "marks": [list(mark) for mark in marks]})


def held(snapshot, device=0):
    """Returns the timeline of a device's memory by place of allocation."""
    return lives.held_by(lives.from_snapshot(snapshot, device), lives.by_place(lives.Sites()))
