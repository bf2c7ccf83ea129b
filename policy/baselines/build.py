"""Rules by name: a `baseline` section becomes a controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import from_mapping
from ..contract import NONE, Contract
from ..controllers import Controller
from ..cost_model import read_cost_model
from ..errors import ConfigError, hint
from .adaptive_verification import AdaptiveVerificationConfig, AdaptiveVerificationController
from .bandit import BanditConfig, BanditController
from .batch_schedule import BatchScheduleConfig, BatchScheduleController
from .ema_tiers import EmaTiersConfig, EmaTiersController
from .fixed import FixedController
from .goodput import GoodputConfig, GoodputController
from .match_else_model import MatchElseModelConfig, MatchElseModelController
from .random import RandomController


@dataclass(frozen=True)
class FixedConfig:
    """One drafter and one length.

    Attributes:
        drafter: Name of the drafter.
        num_speculative_tokens: Draft length.
    """

    drafter: str = NONE
    num_speculative_tokens: int = 0


@dataclass(frozen=True)
class RandomConfig:
    """Any drafter and length.

    Attributes:
        seed: Of the choices.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; make it 0 or more.")


_PRICED: dict[str, tuple[type, Callable[..., Controller]]] = {
    "goodput": (GoodputConfig, GoodputController),
    "adaptive_verification": (AdaptiveVerificationConfig, AdaptiveVerificationController),
    "bandit": (BanditConfig, BanditController),
}
_UNPRICED: dict[str, tuple[type, Callable[..., Controller]]] = {
    "match_else_model": (MatchElseModelConfig, MatchElseModelController),
    "batch_schedule": (BatchScheduleConfig, BatchScheduleController),
    "ema_tiers": (EmaTiersConfig, EmaTiersController),
}
BASELINES = ("fixed", "random", *_UNPRICED, *_PRICED)
"""Every rule's name."""


def build_baseline(contract: Contract, section: Mapping[str, Any]) -> Controller:
    """Build the rule that a section names.

    Args:
        contract: The action table; its granularity says whether rows have their own actions.
        section: `{"name": "goodput", "cost_model": "step-times.json", …}`.

    Raises:
        ConfigError: If the rule, a key or a drafter is unknown, a value does not fit, or the cost
            model cannot be read.
        ContractError: If the engine lacks the drafter of a fixed setting.
    """
    settings = dict(section)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"baseline.name is {name!r}; choose from {', '.join(BASELINES)}.")
    if name == "fixed":
        fixed = from_mapping(FixedConfig, settings, "baseline")
        return FixedController(contract, fixed.drafter, fixed.num_speculative_tokens)
    if name == "random":
        return RandomController(contract, from_mapping(RandomConfig, settings, "baseline").seed)
    if name in _UNPRICED:
        config_class, controller = _UNPRICED[name]
        return controller(contract, from_mapping(config_class, settings, "baseline"))
    if name in _PRICED:
        config_class, controller = _PRICED[name]
        config: Any = from_mapping(config_class, settings, "baseline")
        return controller(contract, read_cost_model(Path(config.cost_model)), config)
    raise ConfigError(f"Unknown baseline '{name}'; {hint(name, BASELINES)}")
