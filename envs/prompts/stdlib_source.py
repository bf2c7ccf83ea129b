"""Read the Python standard library's own source: the raw material of two prompt kinds.

The source is parsed and never imported. A module that this Python lacks or that was rewritten is
skipped, so the prompts are the same on every machine with the same Python version, and nearly the
same between versions.
"""

from __future__ import annotations

import ast
import functools
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .prompt import PromptSourceError

_MODULES = (
    "argparse", "ast", "base64", "bisect", "calendar", "cmd", "collections", "colorsys",
    "configparser", "contextlib", "copy", "csv", "dataclasses", "difflib", "doctest", "email.utils",
    "enum", "filecmp", "fileinput", "fnmatch", "fractions", "functools", "getopt", "gettext",
    "glob", "graphlib", "gzip", "heapq", "html.parser", "http.client", "http.cookies", "inspect",
    "ipaddress", "json.decoder", "json.encoder", "linecache", "logging", "logging.handlers",
    "mimetypes", "pickletools", "pprint", "queue", "random", "reprlib", "sched", "selectors",
    "shlex", "shutil", "smtplib", "socketserver", "statistics", "string", "subprocess", "tempfile",
    "textwrap", "threading", "timeit", "tokenize", "traceback", "typing", "unittest.case",
    "unittest.mock", "urllib.parse", "uuid", "warnings", "wave", "weakref",
    "xml.etree.ElementTree",
)  # fmt: skip


@dataclass(frozen=True)
class Definition:
    """A module, class, function or method of the standard library.

    Attributes:
        name: Dotted name, such as `textwrap.TextWrapper.fill`.
        item: Source item for the split: the whole top-level module or package, since one module
            often holds near-copies of a definition (`mimetypes.guess_extension` and the method
            of that name, the two address families of `ipaddress`).
        source: Source text, dedented; empty for a module or a class.
        docstring: Cleaned docstring; empty when there is none.
        parameters: Names of the parameters, without `self` and `cls`.
    """

    name: str
    item: str
    source: str
    docstring: str
    parameters: tuple[str, ...]


@functools.cache
def stdlib_definitions() -> tuple[Definition, ...]:
    """Return modules, top-level classes and functions, and methods, each name once.

    Raises:
        PromptSourceError: The standard library has no readable source on this machine.
    """
    found: dict[str, Definition] = {}
    for module in _MODULES:
        source = _source_of(module)
        for definition in _definitions_in(module, source):
            found.setdefault(definition.name, definition)
    if not found:
        raise PromptSourceError(
            "This Python has no standard library source to read; use a Python that ships .py "
            "files or leave out the prompt kinds 'edit' and 'summary'."
        )
    return tuple(found.values())


def _source_of(module: str) -> str:
    """Return the module's source text, or nothing where this Python has none."""
    stem = Path(sysconfig.get_path("stdlib"), *module.split("."))
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return ""


def _definitions_in(module: str, source: str) -> Iterator[Definition]:
    tree = ast.parse(source)
    lines = source.splitlines()
    item = f"stdlib:{module.partition('.')[0]}"
    yield Definition(module, item, "", ast.get_docstring(tree) or "", ())
    for top in tree.body:
        if isinstance(top, ast.FunctionDef):
            yield _function(f"{module}.{top.name}", item, top, lines)
        elif isinstance(top, ast.ClassDef):
            name = f"{module}.{top.name}"
            yield Definition(name, item, "", ast.get_docstring(top) or "", ())
            for method in top.body:
                if isinstance(method, ast.FunctionDef):
                    yield _function(f"{name}.{method.name}", item, method, lines)


def _function(name: str, item: str, node: ast.FunctionDef, lines: list[str]) -> Definition:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return Definition(
        name=name,
        item=item,
        source=textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])),
        docstring=ast.get_docstring(node) or "",
        parameters=tuple(a.arg for a in arguments if a.arg not in ("self", "cls")),
    )
