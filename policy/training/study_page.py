"""A study as Markdown and as one HTML file: sections of sentences, tables and pictures."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .benchmark_page import html_head, html_picture, html_table, markdown_table


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        heading: Its heading.
        sentences: Paragraphs.
        tables: Rows of which the first names the columns.
        pictures: PNGs.
    """

    heading: str
    sentences: list[str] = field(default_factory=list)
    tables: list[list[list[str]]] = field(default_factory=list)
    pictures: list[Path] = field(default_factory=list)


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    """The page to read beside its pictures."""
    parts = [f"# {title}"]
    for section in sections:
        parts += [f"## {section.heading}", *section.sentences]
        parts += [f"![{path.stem}]({path.name})" for path in section.pictures]
        parts += map(markdown_table, section.tables)
    return "\n\n".join(parts) + "\n"


def as_html(title: str, sections: Sequence[Section]) -> str:
    """The page in one file that needs no network."""
    parts = [html_head(title)]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.heading)}</h2>")
        parts += [f"<p>{html.escape(sentence)}</p>" for sentence in section.sentences]
        parts += map(html_picture, section.pictures)
        parts += map(html_table, section.tables)
    return "\n".join(parts) + "\n"
