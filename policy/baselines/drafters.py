"""Which drafters of a contract a rule speaks of."""

from __future__ import annotations

import difflib

from ..contract import MODEL_DRAFTERS, TOKEN_DRAFTERS, Contract
from ..errors import ConfigError


def drafter_index(contract: Contract, name: str) -> int:
    """Index of a drafter in the action table.

    Raises:
        ConfigError: If the engine has no such drafter; the nearest one is named.
    """
    if name in contract.drafters:
        return contract.drafters.index(name)
    nearest = difflib.get_close_matches(name, contract.drafters, n=1)
    hint = (
        f"did you mean '{nearest[0]}'?"
        if nearest
        else f"choose from {', '.join(contract.drafters)}."
    )
    raise ConfigError(f"The engine has no drafter '{name}'; {hint}")


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
    if found := token_drafters(contract):
        return found[0]
    raise ConfigError(
        f"The rule needs a token drafter; add one of {', '.join(TOKEN_DRAFTERS)} to 'drafters'."
    )


def the_model_drafter(contract: Contract) -> int:
    """Index of the drafter that runs a model.

    Raises:
        ConfigError: If there is none.
    """
    if found := model_drafters(contract):
        return found[0]
    raise ConfigError(
        f"The rule needs a model drafter; add one of {', '.join(MODEL_DRAFTERS)} to 'drafters'."
    )
