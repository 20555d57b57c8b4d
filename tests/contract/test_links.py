"""What the documentation points at is there: files, and the headings within them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def test_every_link_leads_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    local = [(page, link) for page, link in links if not re.match(r"[a-z]+:", link)]
    assert len(local) > 50
    assert [f"{page.name}: {link}" for page, link in local if not is_there(page, link)] == []


def is_there(page: Path, link: str) -> bool:
    name, _, heading = link.partition("#")
    target = page.parent / name if name else page
    return target.exists() and (not heading or heading in anchors(target.read_text()))


def anchors(text: str) -> Iterator[str]:
    """The names that GitHub gives to headings: those of equal ones are numbered."""
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        yield f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor
        seen[anchor] += 1
