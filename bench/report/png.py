"""Chart specs on paper: PNG pictures with matplotlib, an optional package."""

from pathlib import Path

from bench.record import run_folder

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#007a5a",
    "#a8437f",
    "#8a6d00",
    "#2b7fab",
    "#555555",
    "#7a3b00",
)  # as assets/style.css
DPI = 160


def of_run(folder, out):
    """Yields the path of each picture."""
    from bench.report.run_page import charts_of

    run_folder.read(folder)  # or a clear error
    for chart in charts_of(folder):
        yield draw(chart, Path(out) / f"{chart['id']}.png")


def of_race(folder, out):
    from bench.report.race_page import charts_of

    for chart in charts_of(folder):
        yield draw(chart, Path(out) / f"{chart['id']}.png")


def draw(chart, path):
    """One spec -> one file.  Raises ValueError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "--png: it needs matplotlib: pip install 'matplotlib>=3.8' into the Python that runs this"
        ) from None
    figure = Figure(figsize=(8, 4), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _series(axes, chart)
    for mark in chart["marks"]:
        axes.axvline(mark["x"], color="#b3330b" if mark["kind"] == "stall" else "#c0c6ce", linewidth=0.8, zorder=0)
    axes.set(title=_plain(chart["title"]), xlabel=_plain(chart["x_label"]), ylabel=_plain(chart["y_label"]))
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart["series"]) > 1:
        figure.legend(loc="outside right upper", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _series(axes, chart):
    kinds = {one["kind"] for one in chart["series"]}
    nan = float("nan")
    columns = [[nan if value is None else value for value in one["y"]] for one in chart["series"]]
    labels = [_plain(one["name"]) for one in chart["series"]]
    if kinds == {"area"}:
        axes.stackplot(chart["x"], columns, labels=labels, colors=COLOURS)
        return
    for number, (one, values) in enumerate(zip(chart["series"], columns)):
        colour = COLOURS[number % len(COLOURS)]
        if one["kind"] == "bars":
            width = chart["x"][1] - chart["x"][0] if len(chart["x"]) > 1 else 1.0
            axes.bar(chart["x"], values, width=0.9 * width, color=colour, label=labels[number])
        elif one["kind"] == "points":
            axes.plot(chart["x"], values, ".", color=colour, markersize=4, label=labels[number])
        else:
            pairs = [(x, y) for x, y in zip(chart["x"], values) if y == y]
            axes.plot([x for x, _ in pairs], [y for _, y in pairs], color=colour, linewidth=1.2, label=labels[number])


def _plain(words):
    """No word of a record is read as a formula."""
    return str(words).replace("$", r"\$")
