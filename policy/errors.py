"""The errors draftgym raises; each message is one sentence that names the mend."""

import difflib
from collections.abc import Iterable


def hint(given: object, known: Iterable[object], otherwise: str = "choose from") -> str:
    """The end of such a sentence: the nearest right name, or else all of them.

    Example:
        >>> hint("prot", ["port", "host"])
        "did you mean 'port'?"
        >>> hint("x", ["port", "host"])
        'choose from port, host.'
    """
    names = [str(name) for name in known]
    nearest = difflib.get_close_matches(str(given), names, n=1)
    return f"did you mean '{nearest[0]}'?" if nearest else f"{otherwise} {', '.join(names)}."


class DraftgymError(Exception):
    """Base class of every error that draftgym raises on purpose."""


class ContractError(DraftgymError):
    """An observation, action or drafter does not fit the contract."""


class ArtifactError(DraftgymError):
    """An exported policy cannot be saved, read, or used with this engine."""


class EngineError(DraftgymError):
    """The vLLM engine cannot be started, hooked or stepped as configured."""


class SlowDecisionError(DraftgymError):
    """A decision took longer than its budget."""


class ConfigError(DraftgymError):
    """A configured value is unknown or out of range."""


class TraceError(DraftgymError):
    """A trace file is damaged, of another version, or does not fit what it is used for."""
