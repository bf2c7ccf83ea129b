"""`DraftVecEnv`: thousands of replayed engines as one vectorised environment.

What `DraftEnv` on `TraceEngine` does for one, compiled and in parallel: the same draws, steps,
observations, rewards and ends of episodes.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from policy.compiled import compiled
from policy.contract import Contract
from policy.cost_model import CostModel
from policy.errors import ConfigError
from policy.features import Layout

from .draft_env import EpisodeConfig
from .simulator import abort_all, admit, awaits_decision, begin_interval, draft, num_unfinished, run
from .simulator_state import Engines, Replay, TraceEngineConfig, make_engines, make_replay
from .trace_workload import Mix, TraceWorkload, draw_concurrency, draw_request, draw_uint64

EPISODE = np.dtype(
    [
        ("seed", np.int64),
        ("concurrency", np.int32),
        ("num_steps", np.int32),
        ("work_left", np.int64),
        ("episode_return", np.float64),
    ],
    align=True,
)
"""An episode under way."""

OUTCOME = np.dtype(
    [
        ("reward_tokens", np.float64),
        ("reward_time", np.float64),
        ("num_tokens", np.int64),
        ("step_time_s", np.float64),
        ("charged_time_s", np.float64),
        ("concurrency", np.int64),
        ("num_finished_reqs", np.int64),
        ("num_engine_steps", np.int64),
        ("terminated", np.bool_),
        ("truncated", np.bool_),
        ("episode_return", np.float64),
        ("episode_steps", np.int64),
    ],
    align=True,
)
"""What an env step brought."""
_NONE = np.zeros((1, 2), np.int64)


class DraftVecEnv(VecEnv):
    """Many `DraftEnv`s on traces at once.

    Args:
        workload: Recorded requests and loads.
        cost_model: Step times.
        contract: Drafters and lengths, batch granularity.
        config: The engine that is simulated.
        episode: What an episode is; nothing needs calibration here.
        num_envs: Engines.
        seed: Of the episodes' draws.
        num_threads: Threads that step the engines; None takes one per processor. Results do not
            depend on it.

    Raises:
        ConfigError: If a load exceeds the engine, or the granularity is another.
        TraceError: If the traces lack a drafter or a length of the contract.
    """

    def __init__(
        self,
        workload: TraceWorkload,
        cost_model: CostModel,
        contract: Contract,
        config: TraceEngineConfig,
        episode: EpisodeConfig,
        num_envs: int,
        seed: int = 0,
        num_threads: int | None = None,
    ) -> None:
        if contract.granularity != "batch":
            raise ConfigError("DraftVecEnv decides per batch; set granularity to 'batch'.")
        if int(workload.mix.concurrency.max()) > config.max_num_seqs:
            raise ConfigError(
                f"A load of {int(workload.mix.concurrency.max())} requests exceeds max_num_seqs "
                f"{config.max_num_seqs}; raise it or lower workload.concurrency."
            )
        if num_envs < 1:
            raise ConfigError(f"num_envs is {num_envs}; make it 1 or more.")
        self.contract = contract
        self.render_mode = None
        self.cost_model = cost_model
        self.references = workload.references(cost_model)
        self._mix = workload.mix
        self._layout = Layout.of(contract)
        self._replay = make_replay(workload.traces, cost_model, contract, config)
        self._engines = make_engines(contract, config, num_envs)
        self._work_tokens_per_req = episode.work_tokens_per_req
        self._max_episode_steps = episode.max_episode_steps
        self._step_time_s = np.zeros(config.max_num_seqs + 1)
        for load, reference in self.references.items():
            self._step_time_s[load] = reference.step_time_s
        self._episodes = np.zeros(num_envs, EPISODE)
        self._outcomes = np.zeros(num_envs, OUTCOME)
        self._acceptance = np.zeros((num_envs, 1 + len(contract.proposers), 2), np.int64)
        self._final = np.zeros((num_envs, len(contract.fields)), np.float32)
        self._states = np.zeros(num_envs, np.uint64)
        self._masters = np.zeros(num_envs, np.uint64)
        self._actions = np.zeros((num_envs, len(contract.action_nvec)), np.int64)
        self._began_s = time.time()
        self._num_threads = max(1, min(num_envs, num_threads or os.cpu_count() or 1))
        self._threads = ThreadPoolExecutor(self._num_threads)
        super().__init__(
            num_envs,
            gymnasium.spaces.Box(contract.low, contract.high),
            gymnasium.spaces.MultiDiscrete(np.array(contract.action_nvec)),
        )
        self.seed(seed)

    def reset(self) -> np.ndarray:
        """Begin an episode in every engine.

        Returns:
            Observations, float32 `[num_envs, fields]`.
        """
        if self._seeds[0] is not None:
            self._masters[:] = np.array(self._seeds, np.uint64)
            self._reset_seeds()
        self._in_threads(
            _begin_some,
            self._layout,
            self._replay,
            self._engines,
            self._mix,
            self._episodes,
            self._masters,
            self._states,
            self._work_tokens_per_req,
        )
        self.reset_infos = [self._episode_info(e) for e in range(self.num_envs)]
        return self._engines.observation[:, 0].copy()

    def step_async(self, actions: np.ndarray) -> None:
        """Take the actions, int `[num_envs, len(action_nvec)]`."""
        if ((actions < 0) | (actions >= self.contract.action_nvec)).any():
            raise gymnasium.error.InvalidAction(
                f"An action is not in {self.action_space}; take its pairs only."
            )
        self._actions[:] = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Step every engine to its next decision; ended episodes begin anew.

        Returns:
            Observations, rewards, dones and infos; an info has `DraftEnv`'s keys.
        """
        self.step_engines()
        outcomes = self._outcomes
        rewards = (outcomes["reward_tokens"] - outcomes["reward_time"]).astype(np.float32)
        dones = outcomes["terminated"] | outcomes["truncated"]
        return self._engines.observation[:, 0].copy(), rewards, dones, self._infos(rewards, dones)

    def step_engines(self) -> None:
        """The compiled part of a step: everything but Python's infos."""
        self._in_threads(
            _step_some,
            self._layout,
            self._replay,
            self._engines,
            self._mix,
            self._episodes,
            self._masters,
            self._states,
            self._work_tokens_per_req,
            self._max_episode_steps,
            self._step_time_s,
            self._actions,
            self._outcomes,
            self._acceptance,
            self._final,
        )

    @property
    def num_engine_steps(self) -> int:
        """Engine steps of the last env step, over all engines."""
        return int(self._outcomes["num_engine_steps"].sum())

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The same attribute for every engine; there is one object only."""
        return [getattr(self, attr_name)] * self._count(indices)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of all engines."""
        setattr(self, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of all engines."""
        return [getattr(self, method_name)(*method_args, **method_kwargs)] * self._count(indices)

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """No engine is wrapped; returns and lengths are in the infos without a Monitor."""
        return [False] * self._count(indices)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs to draw and observe alike; JSON-ready."""
        return {
            "masters": self._masters.tolist(),
            "history": [values.tolist() for values in self._engines.history],
            "steps_since_draft": self._engines.counters["steps_since_draft"].tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`, with a new episode in every engine."""
        self._masters[:] = np.array(state["masters"], np.uint64)
        for values, saved in zip(self._engines.history, state["history"], strict=True):
            values[:] = np.array(saved, np.float32).reshape(values.shape)
        self._engines.counters["steps_since_draft"] = state["steps_since_draft"]

    def _in_threads(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a compiled function, which lets go of Python's lock, on equal shares of engines."""
        bounds = np.linspace(0, self.num_envs, self._num_threads + 1).astype(int).tolist()
        shares = [
            self._threads.submit(function, *arguments, first, last)
            for first, last in itertools.pairwise(bounds)
        ]
        for share in shares:
            share.result()

    def _count(self, indices: Any) -> int:
        return len(list(self._get_indices(indices)))

    def _episode_info(self, e: int) -> dict[str, Any]:
        """What `DraftEnv.reset` tells of an episode."""
        episode = self._episodes[e]
        return {"concurrency": int(episode["concurrency"]), "episode_seed": int(episode["seed"])}

    def _infos(self, rewards: np.ndarray, dones: np.ndarray) -> list[dict[str, Any]]:
        outcomes, drafters = self._outcomes, self.contract.proposers
        speedups = outcomes["reward_tokens"] / outcomes["reward_time"]
        names = (
            *("reward_tokens", "reward_time", "num_tokens", "step_time_s", "charged_time_s"),
            *("concurrency", "num_finished_reqs"),
        )
        columns = {name: outcomes[name].tolist() for name in names}
        columns["reward"] = rewards.tolist()
        columns["speedup"] = speedups.tolist()
        columns["acceptance"] = [
            dict(zip(drafters, map(tuple, counts), strict=True))
            for counts in self._acceptance[:, 1:].tolist()
        ]
        keys = tuple(columns)
        infos = [
            dict(zip(keys, values, strict=True)) for values in zip(*columns.values(), strict=True)
        ]
        elapsed_s = time.time() - self._began_s
        for e in np.flatnonzero(dones).tolist():
            self.reset_infos[e] = self._episode_info(e)
            infos[e]["terminal_observation"] = self._final[e].copy()
            infos[e]["TimeLimit.truncated"] = bool(outcomes["truncated"][e])
            infos[e]["episode"] = {
                "r": float(outcomes["episode_return"][e]),
                "l": int(outcomes["episode_steps"][e]),
                "t": elapsed_s,
            }
        return infos


@compiled
def _begin_some(
    layout: Layout,
    replay: Replay,
    engines: Engines,
    mix: Mix,
    episodes: np.ndarray,
    masters: np.ndarray,
    states: np.ndarray,
    work_tokens_per_req: int,
    first: int,
    last: int,
) -> None:
    for e in range(first, last):
        _begin(layout, replay, engines, mix, episodes, masters, states, work_tokens_per_req, e)


@compiled
def _step_some(
    layout: Layout,
    replay: Replay,
    engines: Engines,
    mix: Mix,
    episodes: np.ndarray,
    masters: np.ndarray,
    states: np.ndarray,
    work_tokens_per_req: int,
    max_episode_steps: int,
    reference_step_time_s: np.ndarray,
    actions: np.ndarray,
    outcomes: np.ndarray,
    acceptance: np.ndarray,
    final: np.ndarray,
    first: int,
    last: int,
) -> None:
    for e in range(first, last):
        episode, outcome = episodes[e], outcomes[e]
        begin_interval(engines, e)
        draft(replay, engines, e, actions[e : e + 1])
        run(layout, replay, engines, e)
        advance(layout, replay, engines, mix, states, episode.concurrency, False, e)
        _settle_outcome(engines, reference_step_time_s, episode, outcome, e)
        _count_acceptance(engines, acceptance, e)
        outcome.terminated = episode.work_left <= 0
        outcome.truncated = not outcome.terminated and episode.num_steps >= max_episode_steps
        if outcome.terminated or outcome.truncated:
            for field in range(final.shape[1]):
                final[e, field] = engines.observation[e, 0, field]
            _begin(layout, replay, engines, mix, episodes, masters, states, work_tokens_per_req, e)


@compiled
def _begin(
    layout: Layout,
    replay: Replay,
    engines: Engines,
    mix: Mix,
    episodes: np.ndarray,
    masters: np.ndarray,
    states: np.ndarray,
    work_tokens_per_req: int,
    e: int,
) -> None:
    """Begin an episode; its seed comes from the engine's master generator."""
    episode = episodes[e]
    episode.seed = np.int64(draw_uint64(masters, e) >> np.uint64(33))
    states[e] = np.uint64(episode.seed)
    episode.concurrency = draw_concurrency(mix, states, e)
    episode.num_steps = 0
    episode.episode_return = 0
    episode.work_left = work_tokens_per_req * episode.concurrency
    abort_all(replay, engines, e)
    begin_interval(engines, e)
    advance(layout, replay, engines, mix, states, episode.concurrency, True, e)


@compiled
def advance(
    layout: Layout,
    replay: Replay,
    engines: Engines,
    mix: Mix,
    states: np.ndarray,
    concurrency: int,
    is_first_wave: bool,
    e: int,
) -> None:
    """Admit due requests and run engine steps until a live request awaits a decision."""
    while True:
        for _ in range(concurrency - num_unfinished(engines, e)):
            trace, max_tokens = draw_request(mix, states, e, is_first_wave)
            admit(replay, engines, e, trace, max_tokens)
        is_first_wave = False
        if awaits_decision(engines, e):
            return
        if engines.counters[e].num_rows > 0:
            draft(replay, engines, e, _NONE)
        run(layout, replay, engines, e)


@compiled
def _settle_outcome(
    engines: Engines,
    reference_step_time_s: np.ndarray,
    episode: Any,
    outcome: Any,
    e: int,
) -> None:
    """Reward as `envs.reward.step_reward`; prompts are not charged."""
    counters = engines.counters[e]
    reference_s = reference_step_time_s[episode.concurrency]
    outcome.num_tokens = counters.num_tokens
    outcome.step_time_s = counters.seconds
    outcome.charged_time_s = counters.seconds - counters.prefill_seconds
    outcome.num_finished_reqs = counters.num_finished
    outcome.num_engine_steps = int(engines.shape[e, 0])
    outcome.concurrency = episode.concurrency
    outcome.reward_tokens = counters.num_tokens / episode.concurrency
    outcome.reward_time = outcome.charged_time_s / reference_s
    episode.num_steps += 1
    episode.work_left -= counters.num_tokens
    episode.episode_return += outcome.reward_tokens - outcome.reward_time
    outcome.episode_return = episode.episode_return
    outcome.episode_steps = episode.num_steps


@compiled
def _count_acceptance(engines: Engines, acceptance: np.ndarray, e: int) -> None:
    """Draft and accepted tokens by drafter, as `StepRecord.verified`."""
    for drafter in range(acceptance.shape[1]):
        acceptance[e, drafter, 0] = acceptance[e, drafter, 1] = 0
    for row in range(engines.counters[e].num_rows):
        told = engines.table.rows[e, row]
        acceptance[e, told.drafter, 0] += told.num_draft_tokens
        acceptance[e, told.drafter, 1] += told.num_accepted_tokens
