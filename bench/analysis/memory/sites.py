"""Who asked for memory: the stack of an allocation -> the line of code that a person would name.

Torch's own lines stand innermost in every stack; the first one outside of torch says who it was.
"""

import re

INSIDE_TORCH = re.compile(r"(^|/)torch/|^<(?!eval_with_key)")
PYTHON = re.compile(r"\.py$|^<")  # the rest is C++, where stacks=all recorded it
INDUCTOR = re.compile(r"torchinductor[^/]*/")
NO_STACK = "no Python stack"
BEFORE = "before the recording"
OTHER = "all other places"
MAX_STACK_FRAMES = 60


class Sites:
    """Names of stacks.  It remembers what each source file is: a snapshot has millions of frames, but few files."""

    def __init__(self):
        self._kinds = {}  # file -> "ours", "torch" or "native"
        self.stacks = {}  # name -> one stack that led there, innermost first, as lines of text

    def of(self, frames):
        """[{"filename", "line", "name"}, ...innermost first] -> "models/gpt2.py:45 forward".

        The innermost frame outside of torch; else the innermost of Python; else NO_STACK.
        """
        inside = None
        for frame in frames:
            kind = self._kind(frame.get("filename"))
            if kind == "ours":
                return self._named(line_of(frame, short=True), frames)
            if kind == "torch" and inside is None:
                inside = frame
        return NO_STACK if inside is None else self._named(f"{line_of(inside, short=True)} (torch)", frames)

    def _named(self, name, frames):
        if name not in self.stacks:
            self.stacks[name] = [line_of(frame) for frame in frames[:MAX_STACK_FRAMES]]
        return name

    def _kind(self, filename):
        filename = str(filename)
        if filename not in self._kinds:
            python, torch = PYTHON.search(filename), INSIDE_TORCH.search(filename)
            self._kinds[filename] = "native" if not python else "torch" if torch else "ours"
        return self._kinds[filename]


def line_of(frame, short=False):
    path = str(frame.get("filename", "?"))
    if short:
        path = "compiled " + path.rpartition("/")[2] if INDUCTOR.search(path) else "/".join(path.split("/")[-2:])
    return f"{path}:{frame.get('line', '?')} {frame.get('name', '?')}"
