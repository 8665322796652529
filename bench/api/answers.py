"""The base class of the answers that this API returns."""

import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.api import plotting
from bench.base import atomic
from bench.base.paths import user_path
from bench.web.document import Document

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE_PX = 640  # the height of a page in a notebook


class Answer:
    """The answer of a command.  print() shows it as the terminal does, a notebook as a page."""

    def __init__(self, document: Document, data: Any = None) -> None:
        self._document, self._data = document, document.data if data is None else data

    def to_dict(self) -> Any:
        """Return what the command prints with --json: dicts and lists of plain values, with numbers not rounded."""
        return self._data

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def to_markdown(self) -> str:
        """Return Markdown for a pull request."""
        return self._document.markdown()

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the answer as an HTML page that opens offline, and also write it to path if that is given."""
        page = self._page().html()
        if path is not None:
            atomic.write_out(user_path(path), page)
        return page

    def plot(self) -> "Figure":
        """Plot the page's charts, one below the other.  Needs matplotlib; raises ValueError if there is none."""
        return plotting.figure(self._page().charts)

    def _page(self) -> Document:
        """Returns the document with the parts that only a page shows."""
        return self._document

    def __str__(self) -> str:
        return self._document.terminal()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._document.title}>"

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{PAGE_PX}px;border:0"
        page = self._page()
        srcdoc, title = html.escape(page.html()), html.escape(page.title)
        return f'<iframe style="{style}" title="{title}" srcdoc="{srcdoc}"></iframe>'
