"""Writes the HTML of pages: escaping, style, scripts, and a content security policy that allows nothing else.

Text enters a page through text() or tag(), data through the JSON blocks of page(): both are escaped.
"""

import base64
import hashlib
import html
import importlib.resources
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ASSETS = importlib.resources.files("bench.web") / "assets"
LONG_CHARS = 24  # longer text in a cell gets the class "long"
CHART_SCRIPTS = ("uPlot.iife.min.js", "arms.js", "charts.js")
CHART_STYLES = ("uPlot.min.css", "style.css")
REPORT_STYLES = (*CHART_STYLES, "report.css")  # for the page of a run or of a race


class Safe(str):
    """Markup that bench/web made; any other str is escaped."""


def text(value: object) -> Safe:
    """Returns markup that shows a value, escaped.  None becomes a dash; Safe stays as it is."""
    return value if isinstance(value, Safe) else Safe(html.escape("–" if value is None else str(value)))


def tag(name: str, *children: object, **attributes: object) -> Safe:
    """Returns an element: tag("p", "a<b", class_="note") -> <p class="note">a&lt;b</p>; None omits an attribute."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Safe(f"<{name}{pairs}>{''.join(text(child) for child in children)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Safe:
    """Joins the parts that are not empty, each through text().  between is markup and is not escaped."""
    return Safe(between.join(text(part) for part in parts if part))


def table(
    head: Sequence[object],
    rows: Iterable[Iterable[object]],
    class_: str | None = None,
    caption: str | None = None,
    right: Sequence[bool] = (),
) -> Safe:
    """Returns a table.  Numbers, and columns for which right is True, are aligned right.  head: () for none."""
    lines = [
        tag(
            "tr",
            *(_cell(cell, is_right, len(row)) for cell, is_right in itertools.zip_longest(row, right, fillvalue=False)),
        )
        for row in map(list, rows)
    ]
    sides = ("number" if is_right else None for _, is_right in itertools.zip_longest(head, right[: len(head)]))
    heads = (  # an empty head is not a header cell
        tag("th", text, scope="col", class_=side) if text else tag("td") for text, side in zip(head, sides, strict=True)
    )
    top = tag("thead", tag("tr", *heads)) if head else ""
    body = tag("table", tag("caption", caption) if caption else "", top, tag("tbody", *lines), class_=class_)
    return tag("div", body, class_="scroll", tabindex="0")  # wide tables scroll by themselves, also by keyboard


def _cell(cell: object, is_right: bool, num_cells: int) -> Safe:
    """Returns a cell.  The class "long" keeps a sentence from becoming a column of letters on a narrow screen."""
    is_number = is_right or isinstance(cell, (int, float))
    is_long = num_cells > 2 and isinstance(cell, str) and not isinstance(cell, Safe) and len(cell) > LONG_CHARS
    return tag("td", cell, class_="number" if is_number else "long" if is_long else None)


def section(title: str, *children: object, id: str | None = None) -> Safe:
    """Returns a section of a page with a heading."""
    return tag("section", tag("h2", title), *children, id=id)


def details(title: str, *children: object) -> Safe:
    """Returns a part of a page that is folded until a click on its title."""
    return tag("details", tag("summary", title), *children)


def soft(*children: object) -> Safe:
    """Returns a paragraph that is shown as less important."""
    return tag("p", *children, class_="soft")


def tiles(facts: Iterable[tuple[str, object]]) -> Safe:
    """Returns facts, [(label, value)], in large print."""
    return tag("dl", *(tag("div", tag("dt", label), tag("dd", value)) for label, value in facts), class_="tiles")


def figure(chart: Mapping[str, Any]) -> Safe:
    """Returns the placeholder of a chart (bench/web/chart.py), whose data are in the page's JSON."""
    label = f"{chart['title']}. {chart['caption']}"
    slot = tag("div", class_="chart", data_chart=chart["id"], tabindex="0", role="group", aria_label=label)
    hint = tag("noscript", "This chart needs JavaScript; its numbers are in the tables and in the run's CSV files.")
    return tag("figure", tag("figcaption", tag("b", chart["title"]), " ", tag("span", chart["caption"])), slot, hint)


def page(
    title: str,
    *body: object,
    data: Mapping[str, object] | None = None,
    scripts: Iterable[str] = CHART_SCRIPTS,
    styles: Iterable[str] = CHART_STYLES,
    assets: str | None = None,
) -> str:
    """Returns a whole HTML document, whose policy allows only these scripts, no network and no form.

    data: {id: value for JSON}.  assets: the folder of scripts and styles; None embeds them in the page.
    """
    blocks = "".join(
        f'<script type="application/json" id="{html.escape(key)}">{json_block(value)}</script>'
        for key, value in (data or {}).items()
    )
    if assets is None:
        sources = [(ASSETS / name).read_text() for name in scripts]
        hashes = (hashlib.sha256(source.encode()).digest() for source in sources)
        allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes)
        code = "".join(f"<script>{source}</script>" for source in sources)
        look = "".join(f"<style>{(ASSETS / name).read_text()}</style>" for name in styles)
    else:
        allowed = "'self' file:"
        code = "".join(f'<script src="{assets}/{name}"></script>' for name in scripts)
        look = "".join(f'<link rel="stylesheet" href="{assets}/{name}">' for name in styles)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'self' file: 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    skip = tag("a", "Skip to content", href="#main", class_="skip")
    theme = tag("button", "Dark / light", type="button", id="theme", hidden="hidden")
    top = tag("div", skip, theme, class_="top")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f'{look}</head>\n<body>{top}<main id="main">{join(body)}</main>\n{blocks}{code}</body></html>\n'
    )


def json_block(value: object) -> str:
    """Returns JSON that is safe inside a script element."""
    encoded = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII
    return encoded.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
