"""The seeded stream of requests that an episode sends to the engine, and its load.

The load is a closed loop: a constant number of requests in flight, each finished one replaced by
the next of the stream. Only the `ArrivalPattern` of an episode knows this: Poisson arrivals or a
ramp would be another pattern, and change neither the stream nor the caller of `Episode.take_due`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from policy.errors import ConfigError

from .prompts.loading import load_prompts
from .prompts.prompt import Prompt, PromptSourceError, Split, stable_fraction
from .workload_config import WorkloadConfig

__all__ = [
    "ArrivalPattern",
    "ChatTokenizer",
    "ClosedLoop",
    "Episode",
    "EpisodeSource",
    "Slot",
    "Workload",
    "WorkloadConfig",
    "WorkloadRequest",
]


class ChatTokenizer(Protocol):
    """What the workload needs of a Hugging Face tokenizer."""

    def apply_chat_template(
        self, conversation: Any, *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> Any:
        """Return the token ids of a chat as a list."""
        ...


@dataclass(frozen=True)
class WorkloadRequest:
    """One request, ready for the engine.

    Attributes:
        request_id: Unique among the requests of all seeds and both splits.
        prompt_token_ids: The chat in its template, generation prompt included.
        max_tokens: Output tokens after which the request ends at the latest.
        temperature: Sampling temperature; 0 is greedy.
        kind: The prompt's kind, for reports; no observation contains it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    kind: str


class Slot(NamedTuple):
    """What a request of a stream is drawn from.

    Attributes:
        kinds: Weight of each prompt kind; None takes the workload's.
        is_first_wave: Whether it starts together with others; its length is then staggered.
        temperature: Sampling temperature; None takes the workload's.
    """

    kinds: Mapping[str, float] | None = None
    is_first_wave: bool = False
    temperature: float | None = None


class ArrivalPattern(Protocol):
    """Decides when the next requests of the stream arrive."""

    def num_due(self, num_unfinished_reqs: int, elapsed_s: float) -> int:
        """Return how many requests arrive now.

        Args:
            num_unfinished_reqs: Requests that were sent and haven't finished.
            elapsed_s: Engine time since the episode began, in seconds.
        """
        ...


class EpisodeSource(Protocol):
    """Gives every seed its episode: a workload of prompts, or of recorded requests."""

    def episode(self, seed: int) -> Episode:
        """Return the episode of a seed, the same in every process."""
        ...


@dataclass(frozen=True)
class ClosedLoop:
    """Keeps a constant number of requests in flight, whatever the time."""

    concurrency: int

    def num_due(self, num_unfinished_reqs: int, elapsed_s: float) -> int:
        """Return how many requests are missing to `concurrency`."""
        return max(0, self.concurrency - num_unfinished_reqs)


@dataclass(frozen=True)
class Episode:
    """The requests of one episode.

    Attributes:
        concurrency: Number of requests in flight.
        requests: The endless stream; reading it is what uses it up.
        arrivals: When the next requests arrive.
    """

    concurrency: int
    requests: Iterator[WorkloadRequest]
    arrivals: ArrivalPattern

    def take_due(self, num_unfinished_reqs: int, elapsed_s: float) -> list[WorkloadRequest]:
        """Take the requests that arrive now from the stream; arguments as in `ArrivalPattern`."""
        return list(
            itertools.islice(self.requests, self.arrivals.num_due(num_unfinished_reqs, elapsed_s))
        )


class Workload:
    """Prompts of one split, tokenised once, from which every episode draws.

    Args:
        config: Kinds, load and lengths.
        split: `train` or `eval`; they share no source item, see `envs.prompts.loading`.
        tokenizer: The target model's tokenizer, with a chat template.

    Attributes:
        num_prompts: Prompts in use, by kind.
        num_dropped_prompts: Prompts longer than `max_prompt_tokens`, by kind.

    Raises:
        PromptSourceError: A source can't be read, the tokenizer can't format a prompt, or no
            prompt of a kind is short enough.
    """

    def __init__(self, config: WorkloadConfig, split: Split, tokenizer: ChatTokenizer) -> None:
        self.config = config
        self.split = split
        self._token_ids: dict[str, list[tuple[int, ...]]] = {}
        self.num_prompts: dict[str, int] = {}
        self.num_dropped_prompts: dict[str, int] = {}
        loaded = load_prompts(config.kinds, split, config.prompt_files)
        loaded.sort(key=lambda prompt: stable_fraction(f"subsample {prompt.item}"))
        for kind in config.kinds:
            prompts = [prompt for prompt in loaded if prompt.kind == kind]
            tokenised = [
                _tokenise(prompt, tokenizer) for prompt in prompts[: config.max_prompts_per_kind]
            ]
            short = [ids for ids in tokenised if len(ids) <= config.max_prompt_tokens]
            if not short:
                raise PromptSourceError(
                    f"Every {split} prompt of kind {kind!r} has more than "
                    f"{config.max_prompt_tokens} tokens; raise max_prompt_tokens."
                )
            self._token_ids[kind] = short
            self.num_prompts[kind] = len(short)
            self.num_dropped_prompts[kind] = len(tokenised) - len(short)

    def prompts(self) -> list[tuple[int, ...]]:
        """Token ids of every prompt in use, for warming a prefix cache."""
        return [ids for kind in self._token_ids.values() for ids in kind]

    def every_request(self) -> list[WorkloadRequest]:
        """Every prompt once, kind after kind, with the full token limit."""
        return [
            WorkloadRequest(
                request_id=f"{self.split}-{kind}-{index}",
                prompt_token_ids=token_ids,
                max_tokens=self.config.output_tokens,
                temperature=self.config.temperature,
                kind=kind,
            )
            for kind, prompts in self._token_ids.items()
            for index, token_ids in enumerate(prompts)
        ]

    def episode(
        self,
        seed: int,
        concurrency: int | None = None,
        kinds: Mapping[str, float] | None = None,
    ) -> Episode:
        """Return the episode of a seed: the same in every process, whatever was drawn before.

        Kinds, prompts and lengths are drawn from streams of their own, so a workload that differs
        in its concurrency alone sends the same prompts in the same order: cells of a comparison
        are paired. A prompt comes back only after all others of its kind were sent, since a
        prefix cache or a suffix drafter would answer a repeated one from memory.

        The requests of a closed loop all start together. With equal lengths they would finish
        together too, and the whole batch would prefill at the same steps for ever, which no
        server's batch does. So the first wave's `max_tokens` is uniform between
        `first_wave_min_fraction` and 1 times `output_tokens`, as if each of them had been caught
        somewhere on its way.

        Args:
            seed: Fixes the episode.
            concurrency: Requests in flight; drawn from the configured ones if None.
            kinds: Weight of each prompt kind; None takes the workload's.
        """
        if concurrency is None:
            concurrency = self._draws(seed, "concurrency").choice(self.config.concurrency)
        slots = endless_slots(concurrency, kinds)
        return Episode(concurrency, self.requests(seed, slots), ClosedLoop(concurrency))

    def requests(self, seed: int, slots: Iterable[Slot]) -> Iterator[WorkloadRequest]:
        """A stream of requests, one for each slot.

        Args:
            seed: Fixes the stream.
            slots: What each request is drawn from.

        Raises:
            ConfigError: If a slot names a kind that the workload has no prompts of.
        """
        config = self.config
        prompts = {kind: self._prompts(kind, seed) for kind in config.kinds}
        kind_draws, length_draws = self._draws(seed, "kinds"), self._draws(seed, "lengths")
        for index, slot in enumerate(slots):
            weights = config.kinds if slot.kinds is None else slot.kinds
            if unknown := sorted(set(weights) - set(prompts)):
                raise ConfigError(
                    f"The workload has no prompts of kind '{unknown[0]}'; give it a weight in "
                    f"workload.kinds or choose from {', '.join(prompts)}."
                )
            kind = kind_draws.choices(list(weights), list(weights.values()))[0]
            fraction = 1.0
            if slot.is_first_wave:
                fraction = length_draws.uniform(config.first_wave_min_fraction, 1)
            yield WorkloadRequest(
                request_id=f"{self.split}-{seed}-{index}",
                prompt_token_ids=next(prompts[kind]),
                max_tokens=max(1, round(fraction * config.output_tokens)),
                temperature=config.temperature if slot.temperature is None else slot.temperature,
                kind=kind,
            )

    def _prompts(self, kind: str, seed: int) -> Iterator[tuple[int, ...]]:
        draws = self._draws(seed, f"prompts of kind {kind}")
        while True:
            yield from draws.sample(self._token_ids[kind], len(self._token_ids[kind]))

    def _draws(self, seed: int, purpose: str) -> random.Random:
        return random.Random(f"{self.split} {seed} {purpose}")


def endless_slots(first_wave: int, kinds: Mapping[str, float] | None = None) -> Iterator[Slot]:
    """Slots of a closed loop whose first requests start together."""
    return itertools.chain(
        itertools.repeat(Slot(kinds, is_first_wave=True), first_wave),
        itertools.repeat(Slot(kinds)),
    )


def _tokenise(prompt: Prompt, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    chat = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
    try:
        return tuple(
            tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )
    except Exception as error:  # the template is the model's own program and may raise anything
        raise PromptSourceError(
            f"The tokenizer's chat template can't format {prompt.prompt_id} ({error}); use an "
            "instruct model's tokenizer, and turns that its template accepts."
        ) from error
