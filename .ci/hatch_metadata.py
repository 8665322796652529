"""What a wheel says of itself that depends on where the repository lives: its URLs, and the README with absolute links.

Taken from `git remote get-url origin`, or SPEEDRUN_URL=https://github.com/OWNER/NAME; without either a wheel has no
URLs, and its README links to the pages that are installed with it by their names alone.
"""

import os
import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def repository(root: Path) -> str | None:
    """https://HOST/OWNER/NAME without credentials; None where no web address is known."""
    url = os.environ.get("SPEEDRUN_URL")
    if not url:
        asked = subprocess.run(["git", "remote", "get-url", "origin"], cwd=root, capture_output=True, text=True)
        url = asked.stdout.strip() if asked.returncode == 0 else ""
    url = re.sub(r"^(?:ssh://)?git@([\w.-]+)[:/]", r"https://\1/", url)
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname or parts.path.count("/") < 2:
        return None
    return f"https://{parts.hostname}{parts.path.removesuffix('/').removesuffix('.git')}"


def readme(text: str, url: str | None) -> str:
    """The README as a package index shows it, which has no other file of the repository."""

    def absolute(match: re.Match[str]) -> str:
        image, label, path = match.groups()
        if url is None:
            return "" if image else f"{label} (`{path}`)" if label != path else f"`{path}`"
        return f"{image}[{label}]({url}/{'raw' if image else 'blob'}/HEAD/{path})"

    return LINK.sub(absolute, text)


class Metadata(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        root = Path(self.root)
        url = repository(root)
        text = readme((root / "README.md").read_text(), url)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {"Benchmark": "https://github.com/KellerJordan/modded-nanogpt"}
        if url is not None:
            pages = {"Documentation": "docs/start.md", "Changelog": "CHANGELOG.md"}
            metadata["urls"] |= {"Repository": url, "Issues": f"{url}/issues"}
            metadata["urls"] |= {name: f"{url}/blob/HEAD/{path}" for name, path in pages.items()}
