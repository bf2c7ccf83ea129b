"""A benchmark's tables, pictures and notes as text, as Markdown, and as one HTML file."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

Table = tuple[str, list[list[str]]]
"""A heading, and rows of which the first names the columns."""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as plain text in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of which the first names the columns."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines)


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of which the first names the columns."""
    parts = ["<table>"]
    for index, row in enumerate(rows):
        tag = "td" if index else "th"
        cells = "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row)
        parts.append(f"<tr>{cells}</tr>")
    return "\n".join([*parts, "</table>"])


def html_picture(path: Path) -> str:
    """A picture, kept in the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<img alt='{path.stem}' src='data:image/png;base64,{data}'>"


def html_head(title: str) -> str:
    """The beginning of a page that needs no network."""
    return (
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(title)}</title>\n"
        "<style>body{font:14px sans-serif;margin:2em;max-width:1200px}table{border-collapse:"
        "collapse}td,th{border:1px solid #ccc;padding:3px 8px;text-align:right}"
        f"td:first-child{{text-align:left}}img{{max-width:100%}}</style>"
        f"<h1>{html.escape(title)}</h1>"
    )


def markdown(tables: Sequence[Table], pictures: Sequence[Path], notes: Sequence[str]) -> str:
    """Everything to read beside its pictures."""
    parts = ["# Benchmark", *(f"![{path.stem}]({path.name})" for path in pictures)]
    for heading, rows in tables:
        parts += [f"## {heading}", markdown_table(rows)]
    parts += ["## Notes", "\n".join(f"- {note}" for note in notes)]
    return "\n\n".join(parts) + "\n"


def one_page(tables: Sequence[Table], pictures: Sequence[Path], notes: Sequence[str]) -> str:
    """Everything in one file that needs no network."""
    parts = [html_head("Benchmark"), *map(html_picture, pictures)]
    for heading, rows in tables:
        parts += [f"<h2>{html.escape(heading)}</h2>", html_table(rows)]
    parts.append("<h2>Notes</h2><ul>")
    parts += [f"<li>{html.escape(note)}</li>" for note in notes]
    return "\n".join(parts) + "</ul>\n"
