"""The bar of a race's running run: which step it is at, and no number that is measured."""

from bench.launch.progress import Progress


class Bar:
    """tick() draws it.  The run is another process's, perhaps of another revision: its folder is known by its name.

    folder: of the track's runs.
    """

    def __init__(self, folder, config_id, seed, series):
        self._folder, self._pattern, self._series = folder, f"*-{config_id}-s{seed}*", series
        self._before = set(folder.glob(self._pattern))
        self._progress = None

    def tick(self):
        if not self._series.bars.are_live:
            return
        self._series.tick()
        if self._progress is None and (new := set(self._folder.glob(self._pattern)) - self._before):
            self._progress = Progress(min(new), None, self._series.bars, blind=True)
        if self._progress:
            self._progress.show()
