"""Hydra's complaints about the command line, each in one sentence with the nearest right name."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

from hydra.conf import HydraConf
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..errors import ConfigError

_SHOW_ALL = "HYDRA_FULL_ERROR"


@contextmanager
def one_sentence_errors() -> Iterator[None]:
    """End the program with one sentence where Hydra prints a page; HYDRA_FULL_ERROR=1 shows all."""
    if os.environ.get(_SHOW_ALL):
        yield
        return
    os.environ[_SHOW_ALL] = "1"  # Hydra then raises its errors instead of printing them
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {describe(error)}")
    finally:
        del os.environ[_SHOW_ALL]


def describe(error: Exception) -> str:
    """One sentence that says what is wrong and, where possible, names the nearest right name.

    Args:
        error: What Hydra or OmegaConf raised.
    """
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return f"{group} has no option '{option}'; {_hint(option, error.options, error.options)}"
    if isinstance(error, OverrideParseException):
        return f"Cannot read the override '{error.override}'; write it as KEY=VALUE."
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
        key, known = str(cause.full_key), list(_keys(cause.parent_node._get_root()))
        if key not in known:
            return f"Unknown key '{key}'; {_hint(key, known, map(str, cause.parent_node))}"
        return f"{key}: {str(error).splitlines()[0]}; correct its value."
    return " ".join(str(error).split()).rstrip(".") + "; correct the command line."


def check_added_hydra_keys(overrides: Sequence[str]) -> None:
    """Refuse a misspelt `+hydra.KEY=VALUE`, which Hydra would accept and never read.

    Args:
        overrides: The overrides of Hydra's own settings, as on the command line.

    Raises:
        ConfigError: If Hydra knows no such key.
    """
    for override in overrides:
        path = override.lstrip("+").partition("=")[0]
        node: Any = OmegaConf.structured(HydraConf)
        for key in path.split(".")[1:] if override.startswith("+") else []:
            if not isinstance(node, DictConfig) or not is_dataclass(OmegaConf.get_type(node)):
                break  # a free mapping, such as hydra.job.env_set
            if key not in node:
                known = [str(one) for one in node]
                raise ConfigError(f"Unknown key '{path}'; {_hint(key, known, known)}")
            node = node._get_node(key)


def _hint(name: str, known: Iterable[str], siblings: Iterable[str]) -> str:
    """The end of a sentence: the nearest right name, or those it could have been."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean '{found[0]}'?" if found else f"known: {', '.join(sorted(siblings))}."


def _keys(root: Any) -> Iterator[str]:
    """Dotted names of all keys, groups and values."""

    def below(node: Any, path: str) -> Iterator[str]:
        for key, value in node.items():
            yield path + str(key)
            if isinstance(value, dict):
                yield from below(value, f"{path}{key}.")

    return below(OmegaConf.to_container(root), "")
