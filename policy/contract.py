"""The contract between engine, observation, policy and drafters: one file, no magic elsewhere.

The observation is a float32 row of named, bounded fields; the action is a pair
`(drafter, num_speculative_tokens)`, or a triple with the number of a cutoff where the contract has
some. Everything that produces or consumes either reads its order, bounds and meaning here, and an
exported policy carries the same description inside.

Example:
    >>> contract = Contract(drafters=("none", "ngram"), max_lengths=(0, 8))
    >>> contract.canonical_action((1, 20))
    (1, 8)
    >>> contract.canonical_action((0, 5))
    (0, 0)
    >>> contract.field_names[0]
    'num_running_reqs_log2'
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from .errors import ContractError

CONTRACT_VERSION = 1

NONE = "none"
TOKEN_DRAFTERS = ("ngram", "suffix")
"""Drafters that read tokens only: scored at every step without drafting for real."""
MODEL_DRAFTERS = ("eagle3", "eagle", "draft_model", "mtp")
"""Drafters that run a model and therefore keep a KV cache; at most one is loaded."""

SURVIVAL_DRAFTERS = ("suffix", *MODEL_DRAFTERS)
"""Drafters that tell how likely each of their tokens survives verification."""

LONGEST_EXPECTED = "longest_expected"
"""The combination that drafts with whatever has the most expected accepted tokens."""
ELSE = "_else_"
"""Joins a token and a model drafter to a combination, as in `ngram_else_eagle3`."""

MAX_TOKEN_DRAFT_LENGTH = 16
NUM_ACCEPTANCE_POSITIONS = 3
"""Acceptance is observed for the first three draft positions; the tail shows in the length."""

Granularity = Literal["batch", "request"]


@dataclass(frozen=True)
class Field:
    """One number of the observation.

    Attributes:
        name: Unique name; the observation is ordered as `Contract.fields`.
        unit: Unit of the value.
        low: Smallest value; smaller ones are clipped.
        high: Largest value; larger ones are clipped.
        meaning: What it says, in one sentence.
    """

    name: str
    unit: str
    low: float
    high: float
    meaning: str


_LOAD_FIELDS = (
    Field("num_running_reqs_log2", "log2(1 + requests)", 0, 11, "Requests in the engine step."),
    Field("num_waiting_reqs_log2", "log2(1 + requests)", 0, 11, "Requests waiting for a place."),
    Field("kv_cache_usage", "share", 0, 1, "Share of the KV-cache blocks in use."),
    Field("num_context_tokens_log2", "log2(1 + tokens)", 0, 18, "Mean context of the requests."),
    Field("num_prefill_tokens_log2", "log2(1 + tokens)", 0, 18, "Prompt tokens in the step."),
    Field("temperature", "1", 0, 2, "Mean sampling temperature; 0 is greedy."),
)


def _drafter_fields(drafter: str, max_length: int) -> list[Field]:
    """Fields that describe one drafter other than `none`."""
    fields = [
        Field(
            f"{drafter}_acceptance_rate_pos_{position}",
            "rate",
            0,
            1,
            f"Decayed share of drafts whose token {position} was accepted (1 is the first).",
        )
        for position in range(1, NUM_ACCEPTANCE_POSITIONS + 1)
    ]
    fields += [
        Field(
            f"{drafter}_mean_acceptance_length",
            "tokens",
            1,
            1 + max_length,
            "Decayed mean tokens per step with a draft, bonus token included.",
        ),
        Field(
            f"{drafter}_steps_since_draft_log2",
            "log2(1 + steps)",
            0,
            10,
            "Engine steps since this drafter's tokens were last verified.",
        ),
    ]
    if drafter in TOKEN_DRAFTERS:
        fields += [
            Field(f"{drafter}_draft_share", "share", 0, 1, "Requests with a draft on offer."),
            Field(
                f"{drafter}_match_length",
                "tokens",
                0,
                MAX_TOKEN_DRAFT_LENGTH,
                "Mean length of the match behind the draft on offer; 0 without a match.",
            ),
            Field(
                f"{drafter}_expected_accepted_tokens",
                "tokens",
                0,
                max_length,
                "Mean of the survival probabilities summed over the draft on offer.",
            )
            if drafter in SURVIVAL_DRAFTERS
            else Field(
                f"{drafter}_agreement",
                "share",
                0,
                1,
                "Mean share of the earlier places like this that went on as the draft begins.",
            ),
            Field(
                f"{drafter}_draft_tokens_on_offer",
                "tokens",
                0,
                MAX_TOKEN_DRAFT_LENGTH,
                "Mean length of the draft on offer.",
            ),
            Field(
                f"{drafter}_counterfactual_accepted_tokens",
                "tokens",
                0,
                MAX_TOKEN_DRAFT_LENGTH,
                "Decayed mean tokens of its past offers that the target went on to emit.",
            ),
        ]
    else:
        fields += [
            Field(f"{drafter}_fresh_share", "share", 0, 1, "Requests it can draft for at once."),
            Field(
                f"{drafter}_pending_tokens_log2",
                "log2(1 + tokens)",
                0,
                12,
                "Mean tokens per request that it must catch up on before it drafts.",
            ),
            Field(
                f"{drafter}_top1_probability",
                "probability",
                0,
                1,
                "Decayed mean probability of the first token of its drafts.",
            ),
            Field(
                f"{drafter}_expected_accepted_tokens",
                "tokens",
                0,
                max_length,
                "Decayed mean of the survival probabilities summed over each draft.",
            ),
        ]
    return fields


def _last_action_fields(drafters: Sequence[str], max_length: int) -> list[Field]:
    """Fields that tell what was verified in the step just done and what came of it."""
    return [
        *(
            Field(f"last_share_{drafter}", "share", 0, 1, f"Requests verified with {drafter}.")
            for drafter in drafters
        ),
        Field(
            "last_num_speculative_tokens",
            "tokens",
            0,
            max(1, max_length),
            "Mean draft tokens verified per request in the step.",
        ),
        Field(
            "last_emitted_tokens",
            "tokens",
            0,
            1 + max_length,
            "Mean tokens emitted per request in the step.",
        ),
    ]


_BATCH_ONLY = (
    "num_running_reqs_log2",
    "num_waiting_reqs_log2",
    "kv_cache_usage",
    "num_prefill_tokens_log2",
)
"""Fields that say nothing of a single request."""


def _of_request(field: Field) -> Field:
    """The same field told of the row's own request alone."""
    return replace(
        field, name=f"request_{field.name}", meaning=f"Of this request alone. {field.meaning}"
    )


@dataclass(frozen=True)
class Contract:
    """Ordered observation fields and the action table of one set of drafters.

    A drafter may be a combination of others (`policy.combinations`): it is chosen like any, but
    never observed, because for each request one of its members drafts.

    Attributes:
        drafters: Names by action index; index 0 is always `none`, combinations come last.
        max_lengths: Largest number of draft tokens per drafter; 0 for `none`.
        granularity: `batch` for one row per engine step, `request` for one row per request: what
            is observed of the batch, the same in every row, and then of the request alone.
        cutoffs: Survival probabilities, ascending, from which an action may choose the one that a
            draft's tokens must exceed to be verified; number 0 admits all, 1 is the first. Only
            drafts of drafters that tell survival are cut. Empty: actions are pairs.

    Raises:
        ContractError: If the drafters or lengths are not ones the engine hook can serve.
    """

    drafters: tuple[str, ...]
    max_lengths: tuple[int, ...]
    granularity: Granularity = "batch"
    cutoffs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        known = (NONE, *TOKEN_DRAFTERS, *MODEL_DRAFTERS)
        if not self.drafters or self.drafters[0] != NONE:
            raise ContractError("The first drafter must be 'none'; put it in front of the list.")
        for drafter in self.drafters:
            if drafter not in known and not self.is_combination(drafter):
                raise ContractError(
                    f"Unknown drafter '{drafter}'; choose from {', '.join(known)}, combine two as "
                    f"in ngram{ELSE}eagle3, or take {LONGEST_EXPECTED}."
                )
        if len(set(self.drafters)) != len(self.drafters):
            raise ContractError("A drafter is listed twice; name each drafter once.")
        if len(self.model_drafters) > 1:
            raise ContractError(
                f"vLLM loads one model drafter, not {' and '.join(self.model_drafters)}; keep one."
            )
        self._check_combinations()
        if len(self.max_lengths) != len(self.drafters):
            raise ContractError("Give one maximal length per drafter, 0 for 'none'.")
        for drafter, length in zip(self.drafters, self.max_lengths, strict=True):
            low = 0 if drafter == NONE else 1
            high = 0 if drafter == NONE else MAX_TOKEN_DRAFT_LENGTH
            if not isinstance(length, int) or not low <= length <= high:
                raise ContractError(
                    f"The maximal length of '{drafter}' must be a whole number in {low}..{high}, "
                    f"not {length!r}."
                )
        if self.granularity not in ("batch", "request"):
            raise ContractError(
                f"Unknown granularity '{self.granularity}'; choose 'batch' or 'request'."
            )
        if self.cutoffs and not (
            all(isinstance(cutoff, float) and 0 < cutoff < 1 for cutoff in self.cutoffs)
            and all(low < high for low, high in pairwise(self.cutoffs))
            and any(drafter in SURVIVAL_DRAFTERS for drafter in self.drafters)
        ):
            raise ContractError(
                f"The cutoffs {list(self.cutoffs)} are not probabilities in ascending order for a "
                f"drafter that tells survival ({', '.join(SURVIVAL_DRAFTERS)}); mend or empty them."
            )

    def _check_combinations(self) -> None:
        combinations = [name for name in self.drafters if self.is_combination(name)]
        for name in combinations:
            for member in self.members(name):
                if member not in self.drafters:
                    raise ContractError(
                        f"The combination '{name}' needs the drafter '{member}'; add '{member}' to "
                        "the drafters."
                    )
        if combinations and len(self.proposers) < 2:
            raise ContractError(
                f"The combination '{combinations[0]}' needs two drafters to choose from; add one."
            )
        if combinations and self.drafters[-len(combinations) :] != tuple(combinations):
            raise ContractError(
                f"The combination '{combinations[0]}' stands before a drafter; list combinations "
                "last."
            )

    @staticmethod
    def is_combination(drafter: object) -> bool:
        """Whether a name is one of a combination."""
        token, joined, model = str(drafter).partition(ELSE)
        is_pair = bool(joined) and token in TOKEN_DRAFTERS and model in MODEL_DRAFTERS
        return is_pair or drafter == LONGEST_EXPECTED

    def members(self, combination: str) -> tuple[str, ...]:
        """The drafters that a combination chooses from, in the order of its preference."""
        if combination == LONGEST_EXPECTED:
            return self.proposers
        token, _, model = combination.partition(ELSE)
        return token, model

    @cached_property
    def proposers(self) -> tuple[str, ...]:
        """The drafters that draft themselves, in order: `none` and combinations left out.

        They come right after `none`, so that the first one's index in the action table is 1.
        """
        return tuple(name for name in self.drafters[1:] if not self.is_combination(name))

    @property
    def model_drafters(self) -> tuple[str, ...]:
        """The drafters that run a model; at most one."""
        return tuple(drafter for drafter in self.drafters if drafter in MODEL_DRAFTERS)

    @property
    def max_num_speculative_tokens(self) -> int:
        """The longest draft any drafter may make."""
        return max(self.max_lengths)

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The observation's fields in order."""
        fields = list(_LOAD_FIELDS)
        for drafter, length in zip(self.proposers, self.max_lengths[1:], strict=False):
            fields += _drafter_fields(drafter, length)
        drafters = (NONE, *self.proposers)
        fields += _last_action_fields(drafters, self.max_num_speculative_tokens)
        if self.granularity == "request":
            fields += [_of_request(field) for field in fields if field.name not in _BATCH_ONLY]
        return tuple(fields)

    @property
    def field_names(self) -> tuple[str, ...]:
        """Names of `fields`, in order."""
        return tuple(field.name for field in self.fields)

    @cached_property
    def low(self) -> np.ndarray:
        """Lower bounds, float32 `[fields]`."""
        return np.array([field.low for field in self.fields], np.float32)

    @cached_property
    def high(self) -> np.ndarray:
        """Upper bounds, float32 `[fields]`."""
        return np.array([field.high for field in self.fields], np.float32)

    @property
    def action_nvec(self) -> tuple[int, ...]:
        """Sizes of the MultiDiscrete action: drafter, draft length and, with cutoffs, theirs."""
        sizes = len(self.drafters), 1 + self.max_num_speculative_tokens
        return (*sizes, 1 + len(self.cutoffs)) if self.cutoffs else sizes

    @cached_property
    def action_table(self) -> np.ndarray:
        """All canonical actions, none first, int64 `[actions, len(action_nvec)]`."""
        choices = itertools.product(*map(range, self.action_nvec))
        return np.array(sorted({self.canonical_action(choice) for choice in choices}), np.int64)

    @cached_property
    def _is_cut(self) -> np.ndarray:
        """Whether a drafter's drafts may be cut, bool `[drafters]`; a combination's member may."""
        return np.array(
            [name in SURVIVAL_DRAFTERS or self.is_combination(name) for name in self.drafters]
        )

    @cached_property
    def _cutoff_values(self) -> np.ndarray:
        return np.array((0.0, *self.cutoffs), np.float32)

    def cutoff_values(self, actions: np.ndarray) -> np.ndarray:
        """Survival that tokens must exceed under each action, float32 `[rows]`.

        Args:
            actions: Canonical, int64 `[rows, len(action_nvec)]`.
        """
        if not self.cutoffs:
            return np.zeros(len(actions), np.float32)
        values: np.ndarray = self._cutoff_values[actions[:, 2]]
        return values

    def canonical_action(self, action: Sequence[int]) -> tuple[int, ...]:
        """The one valid action that `action` stands for: the length fits its drafter.

        Length 0 and the drafter `none` mean the same and become zeros; a length above the
        drafter's maximum becomes that maximum; a cutoff for a drafter that does not tell survival
        becomes 0, and so does one that is left out. No invalid action can reach the engine.

        Args:
            action: `(drafter index, number of draft tokens)` and, with cutoffs, the cutoff's
                number.

        Raises:
            ContractError: If these are no whole numbers, or one is out of the action table.
        """
        try:
            numbers = [operator.index(number) for number in action]
        except TypeError:
            numbers = []
        if len(numbers) not in (2, len(self.action_nvec)):
            raise ContractError(
                f"{action!r} is no action; give two whole numbers, drafter index and draft length"
                f"{', or three with a cutoff' if self.cutoffs else ''}."
            )
        canonical = self.canonical_actions(np.array([numbers], np.int64))[0]
        return tuple(canonical.tolist())

    def canonical_actions(self, actions: np.ndarray) -> np.ndarray:
        """`canonical_action` of every row, without a Python loop: this is on the serving path.

        Args:
            actions: Integers `[rows, 2]`, or `[rows, 3]` with cutoffs.

        Returns:
            int64 `[rows, len(action_nvec)]`.

        Raises:
            ContractError: If the shape or type is another, or a row is out of the action table.
        """
        width = len(self.action_nvec)
        if actions.ndim != 2 or actions.shape[1] not in (2, width) or actions.dtype.kind != "i":
            raise ContractError(
                f"Actions are {actions.dtype} {list(actions.shape)}; give integers [rows, {width}]."
            )
        drafters, lengths, *cutoffs = actions.astype(np.int64).T
        outside = (drafters < 0) | (drafters >= len(self.drafters)) | (lengths < 0)
        for numbers in cutoffs:
            outside |= (numbers < 0) | (numbers > len(self.cutoffs))
        if outside.any():
            wrong = ", ".join(map(str, actions[outside.argmax()].tolist()))
            raise ContractError(
                f"Action ({wrong}) is outside the table; use a drafter index in "
                f"0..{len(self.drafters) - 1} and a length >= 0"
                f"{f', and a cutoff in 0..{len(self.cutoffs)}' if self.cutoffs else ''}."
            )
        lengths = np.minimum(lengths, np.take(self.max_lengths, drafters))
        drafters = np.where(lengths > 0, drafters, 0)
        columns = [drafters, lengths]
        if self.cutoffs:
            chosen = cutoffs[0] if cutoffs else np.zeros_like(lengths)
            columns.append(np.where(self._is_cut[drafters], chosen, 0))
        return np.stack(columns, axis=1)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description, stored inside every exported policy."""
        return {
            "contract_version": CONTRACT_VERSION,
            "drafters": list(self.drafters),
            "max_lengths": list(self.max_lengths),
            "granularity": self.granularity,
            "cutoffs": list(self.cutoffs),
            "fields": [asdict(field) for field in self.fields],
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Contract:
        """Rebuild a contract and check that today's fields are the stored ones.

        Raises:
            ContractError: If the description is damaged, incomplete, of another version, or names
                other fields than this version builds; the first field that differs is named.
        """
        if not isinstance(stored, Mapping):
            raise ContractError("The policy's contract is no mapping; export the policy again.")
        missing = {"contract_version", "drafters", "max_lengths", "granularity", "fields"} - set(
            stored
        )
        if missing:
            raise ContractError(
                f"The policy carries no {', '.join(sorted(missing))}; export it again."
            )
        if stored["contract_version"] != CONTRACT_VERSION:
            raise ContractError(
                f"The policy speaks contract version {stored['contract_version']}, this draftgym "
                f"{CONTRACT_VERSION}; export the policy again with this version."
            )
        try:
            drafters, lengths = tuple(stored["drafters"]), tuple(stored["max_lengths"])
            cutoffs = tuple(stored.get("cutoffs", ()))
            theirs = [Field(**field) for field in stored["fields"]]
        except TypeError as error:
            raise ContractError(
                f"The policy's contract is damaged ({error}); export the policy again."
            ) from error
        contract = cls(drafters, lengths, stored["granularity"], cutoffs)
        for index, (ours, their) in enumerate(zip(contract.fields, theirs, strict=False)):
            if ours != their:
                raise ContractError(
                    f"Field {index} of the policy is '{their.name}' where this version has "
                    f"'{ours.name}' or other bounds; export the policy again with this version."
                )
        if len(theirs) != len(contract.fields):
            raise ContractError(
                f"The policy reads {len(theirs)} fields, this version gives "
                f"{len(contract.fields)}; export the policy again with this version."
            )
        return contract
