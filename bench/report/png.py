"""The charts of a page as pictures: a headless Chromium opens each on a page of its own and takes the picture."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench import atomic
from bench.web.page import figure, page, tag

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--window-size=960,400",  # CSS pixels; a picture has twice as many each way
    "--force-device-scale-factor=2",
)
TIMEOUT_S = 60
# without what only a cursor needs: the button, and the legend's values
STYLE = tag("style", ".top, .u-value, .u-series:first-child { display: none } figure { margin: .5rem 0 }")


def write(charts: Iterable[dict], out: Path) -> Iterator[Path]:
    """Chart specs, folder -> yields the path of each picture, out/ID.png.  ValueError without a Chromium."""
    if CHROMIUM is None:
        raise ValueError("--png: no chromium or google-chrome on PATH: install one, or open the page in a browser")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".pictures.", ignore_cleanup_errors=True) as folder:
        for chart in charts:
            yield _take(chart, Path(folder), out / f"{chart['id']}.png")


def _take(chart, folder, path):
    html, shot = folder / "chart.html", folder / "chart.png"
    atomic.write_text(html, page(chart["title"], STYLE, figure(chart), data={"charts": [chart]}), durable=False)
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}/profile", f"--screenshot={shot}", html.resolve().as_uri()]
    if os.geteuid() == 0:  # Chromium refuses its sandbox to root
        command.insert(1, "--no-sandbox")
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        os.replace(shot, path)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()[-300:]
        raise ValueError(f"--png {path}: {CHROMIUM} took no picture ({said}): open the page in a browser") from None
    return path
