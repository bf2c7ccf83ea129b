"""Which drafters of a contract a rule speaks of."""

from __future__ import annotations

from collections.abc import Sequence

from ..contract import MODEL_DRAFTERS, TOKEN_DRAFTERS, Contract
from ..errors import ConfigError, hint


def drafter_index(contract: Contract, name: str) -> int:
    """Index of a drafter in the action table.

    Raises:
        ConfigError: If the engine has no such drafter; the nearest one is named.
    """
    if name in contract.drafters:
        return contract.drafters.index(name)
    raise ConfigError(f"The engine has no drafter '{name}'; {hint(name, contract.drafters)}")


def token_drafters(contract: Contract) -> list[int]:
    """Indices of the drafters that read tokens only."""
    return [i for i, name in enumerate(contract.drafters) if name in TOKEN_DRAFTERS]


def model_drafters(contract: Contract) -> list[int]:
    """Index of the drafter that runs a model, if there is one."""
    return [i for i, name in enumerate(contract.drafters) if name in MODEL_DRAFTERS]


def the_token_drafter(contract: Contract) -> int:
    """Index of the first drafter that reads tokens only.

    Raises:
        ConfigError: If there is none.
    """
    return _first(token_drafters(contract), "token", TOKEN_DRAFTERS)


def the_model_drafter(contract: Contract) -> int:
    """Index of the drafter that runs a model.

    Raises:
        ConfigError: If there is none.
    """
    return _first(model_drafters(contract), "model", MODEL_DRAFTERS)


def _first(found: Sequence[int], kind: str, names: Sequence[str]) -> int:
    if found:
        return found[0]
    raise ConfigError(
        f"The rule needs a {kind} drafter; add one of {', '.join(names)} to 'drafters'."
    )
