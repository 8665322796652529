"""Which steps the memory history shows: windows out of settings, and what is refused before a run starts.  No torch."""

from dataclasses import dataclass

from bench.config import windows

FIELDS = ("name", "first_step", "active_steps", "ranks", "max_entries", "stacks")
TAKEN = "oom"  # what snapshots of an out-of-memory are called


@dataclass(frozen=True, kw_only=True)
class Window(windows.Window):
    """max_entries and stacks: of torch's memory history, as _record_memory_history takes them."""

    max_entries: int
    stacks: str


def windows_of(settings: dict) -> list[Window]:
    """Settings of the instrument memory_history -> its windows in order: one, or those listed."""
    where = "instruments.memory_history"
    result = [_window(here, values) for here, values in windows.each(where, settings, FIELDS)]
    result.sort(key=lambda window: window.first_step)
    for window, later in zip(result, result[1:]):
        if later.first_step <= window.last_step:
            raise ValueError(
                f"{where}.windows: {later.name} begins at step {later.first_step} and {window.name} ends at step "
                f"{window.last_step}: there is one memory history only, let it begin after step {window.last_step}"
            )
    names = [window.name for window in result]
    for name in names:
        if names.count(name) > 1:
            words = f"two windows are called {name} and would write the same files: rename one"
            raise ValueError(f"{where}.windows: {words}")
    return result


def _window(where, values):
    windows.check(where, values)
    if values["name"].startswith(TAKEN) or "." in values["name"]:
        remedy = f"file names begin with it: no dot in it, and no {TAKEN} in front"
        raise ValueError(f"{where}.name={values['name']}: {remedy}")
    return Window(**values | {"ranks": windows.ranks_of(values["ranks"])})
