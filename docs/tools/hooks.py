"""Hooks of MkDocs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

#: Roles of Sphinx in docstrings: editors and Python's help show them as they are, pages only the code.
_ROLE = re.compile(r":(?:class|func|meth|mod):(?=<code>)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page. That of the changelog is CHANGELOG.md, whose links lead to pages."""
    if page.file.src_uri != "changelog.md":
        return markdown
    return (Path(__file__).parents[2] / "CHANGELOG.md").read_text().replace("](docs/", "](")


def on_page_content(html: str, **_: Any) -> str:
    """Return a page's HTML without roles of Sphinx."""
    return _ROLE.sub("", html)
