"""Pages of the site that are files of the repository's top: README.md is its home, CHANGELOG.md its list of changes."""

import re
from pathlib import Path

from mkdocs.structure.files import File

TOP = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
WIDE = ".md-grid { max-width: 84rem } .md-typeset pre > code { white-space: pre-wrap }"
OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+(?!CHANGELOG|docs/)([^)\s]+)\)")  # of a page, to a file that is no page


def on_files(files, config):
    for source, name in PAGES.items():
        text = (TOP / source).read_text().replace("](docs/", "](")
        for top, page in PAGES.items():
            text = text.replace(f"]({top})", f"]({page})")
        text = re.sub(r"\[([^\]]*)\]\((CITATION\.cff|LICENSE|AGENTS\.md)\)", r"`\2`", text)
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "wide.css", content=WIDE))
    return files


def on_page_markdown(markdown, page, config, files):
    depth = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)+CHANGELOG\.md", f"]({depth}changelog.md", markdown)
    return OUTSIDE.sub(r"\1 (`\2`)", markdown)
