"""Saves the charts of a page as PNG files: a headless Chromium opens each on its own and takes a screenshot."""

import math
import os
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.base import atomic
from bench.web.chart import Spec
from bench.web.document import Drawn
from bench.web.page import REPORT_STYLES, figure, page, tag

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--force-device-scale-factor=2")
WIDTH_PX, HEIGHT_PX = 960, 318  # size of a chart without its legend in CSS pixels; the picture is twice as large
LEGEND_PX, CHAR_PX, GAP_PX = (
    24,
    9,
    40,
)  # height of a line of the legend; widths of a character, of what is between names
TIMEOUT_S = 60
# after a picture's signature and IHDR, a tEXt chunk that shows whose it is (PNG specification, 5.3 and 11.3)
HEADER_BYTES, SOFTWARE = 8 + 25, b"tEXtSoftware\0speedrun"
MARK = struct.pack(">I", len(SOFTWARE) - 4) + SOFTWARE + struct.pack(">I", zlib.crc32(SOFTWARE))
# hides what needs a cursor: the button, and the legend's values
STYLE = tag("style", ".top, .u-value, .u-series:first-child { display: none } figure { margin: .5rem 0 }")


def write(charts: Iterable[Spec], out: Path, drawings: Iterable[Drawn] = (), is_own: bool = False) -> Iterator[Path]:
    """Saves drawings and charts as out/ID.png and yields each path.

    is_own: out is a folder in a record, where all pictures are replaced.  Raises ValueError without a Chromium.
    """
    if CHROMIUM is None:
        raise ValueError("--png: no chromium or google-chrome on PATH: install one, or open the page in a browser")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".pictures.", ignore_cleanup_errors=True) as folder:
        for drawing in drawings:
            html = page(drawing.title, STYLE, drawing.markup, styles=REPORT_STYLES)
            yield _take(html, drawing.height_px, Path(folder), out / f"{drawing.id}.png", is_own)
        for chart in charts:
            html = page(chart["title"], STYLE, figure(chart), data={"charts": [chart]})
            names = [str(line["name"]) for line in chart.get("arms") or chart["series"]]
            num_lines = math.ceil(sum(CHAR_PX * len(name) + GAP_PX for name in names) / WIDTH_PX)
            yield _take(html, HEIGHT_PX + LEGEND_PX * num_lines, Path(folder), out / f"{chart['id']}.png", is_own)


def _take(source: str, height_px: int, folder: Path, path: Path, is_own: bool) -> Path:
    html, shot = folder / "chart.html", folder / "chart.png"
    atomic.write_text(html, source, durable=False)
    files = (f"--user-data-dir={folder}/profile", f"--screenshot={shot}", html.resolve().as_uri())
    command = [str(CHROMIUM), *FLAGS, f"--window-size={WIDTH_PX},{height_px}", *files]
    if os.geteuid() == 0:  # as root, Chromium does not start with its sandbox
        command.insert(1, "--no-sandbox")
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        if not is_own:
            atomic.refuse_other(path, MARK, "--png")
        picture = shot.read_bytes()
        atomic.write_bytes(path, picture[:HEADER_BYTES] + MARK + picture[HEADER_BYTES:], durable=False)
    except (OSError, subprocess.SubprocessError) as error:
        why = str(getattr(error, "stderr", None) or error).strip()[-300:]
        raise ValueError(f"--png {path}: {CHROMIUM} took no picture ({why}): open the page in a browser") from None
    return path
