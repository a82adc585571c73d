"""Links of the pages: every file and every heading that one names is there. Nothing is asked of the network."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "labs/**/*.md", "tests/*.md", ".github/**/*.md")
    for page in ROOT.glob(pattern)
)
_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\))?)\)|(?:src|href)=\"([^\"]+)\"")
_ELSEWHERE = re.compile(r"[a-z]+:")


def prose(text: str) -> str:
    """The text without its blocks of code."""
    return _FENCE.sub("", text)


def links(text: str) -> list[str]:
    """Where the links and pictures of a page lead, but for other sites."""
    found = [one or other for one, other in _LINK.findall(_CODE.sub("", prose(text)))]
    return [link for link in found if not _ELSEWHERE.match(link)]


def slugs(text: str) -> Iterator[str]:
    """The anchors that GitHub gives the headings of a page."""
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        yield f"{slug}-{seen[slug]}" if seen[slug] else slug
        seen[slug] += 1


@cache
def anchors(page: Path) -> frozenset[str]:
    return frozenset(slugs(page.read_text()))


def broken(page: Path, root: Path = ROOT) -> list[str]:
    """The links of a page that lead to no file below the root, or to no heading of one."""
    found = []
    for link in links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        inside = target.is_relative_to(root.resolve()) and target.exists()
        if not inside or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: Path) -> None:
    assert broken(page) == []


def test_every_page_of_docs_can_be_reached_from_the_readme() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links((ROOT / "README.md").read_text())}
    assert {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - linked == set()


def test_every_page_of_labs_can_be_reached_from_its_readme() -> None:
    labs = ROOT / "labs"
    linked = {(labs / link.partition("#")[0]).resolve() for link in links((labs / "README.md").read_text())}
    assert {page for page in PAGES if page.is_relative_to(labs)} - linked == {labs / "README.md"}


def test_links_to_what_is_not_there_are_found_outside_of_code(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# A `b`: c, d\n\n```\n# e\n```\n\n# A `b`: c, d\n")
    good = "[x](b.md) [x](b.md#a-b-c-d) [x](b.md#a-b-c-d-1) [x](https://a.b/no) `[x](no)`\n```\n[x](no)\n```\n"
    bad = '[x](no.md) [x](b.md#e) ![x](no.png) <img src="no_(1).png"> [x](../b.md) [x](#no)\n'
    (tmp_path / "a.md").write_text(good + bad)
    assert broken(tmp_path / "a.md", tmp_path) == ["no.md", "b.md#e", "no.png", "no_(1).png", "../b.md", "#no"]
