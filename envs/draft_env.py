"""`DraftEnv`: a Gymnasium environment whose steps are live speculative steps of an engine.

An episode is a fixed amount of work at one load: it terminates when `work_tokens_per_req` output
tokens per request in flight have been emitted, and is truncated after `max_episode_steps` or when
the engine fails. One env step is one decision: draft, verify, and go on to the next decision.
What the observation remembers of past acceptance outlives an episode, as it does in a server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np

from policy.cost_model import CostModel
from policy.errors import ConfigError, EngineError

from .engine import NO_SPECULATION, Engine, EngineStep
from .online_cost_model import OnlineCostModel
from .reward import LoadReference, RewardConfig, step_reward
from .workload import Episode, EpisodeSource

logger = logging.getLogger(__name__)

_MAX_ENGINE_FAILURES = 3


@dataclass(frozen=True)
class EpisodeConfig:
    """What an episode is.

    Attributes:
        work_tokens_per_req: Output tokens per request in flight that end the episode.
        max_episode_steps: Decisions after which it is truncated.
        calibration_steps: Engine steps without speculation that measure a new load.
    """

    work_tokens_per_req: int = 48
    max_episode_steps: int = 500
    calibration_steps: int = 16

    def __post_init__(self) -> None:
        for name in ("work_tokens_per_req", "max_episode_steps", "calibration_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; make it 1 or more.")


class DraftEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """Decide drafter and draft length at every engine step.

    Args:
        make_engine: Starts an engine; called again after an engine failure.
        workload: Requests and loads.
        config: What an episode is.
        reward: How steps are charged.
        render_mode: None or `ansi`.
        cost_model: Prices of steps; None learns them from the measured times.
        references: No speculation by load; loads left out are measured when they first come.

    Raises:
        EngineError: If the engine cannot be started, or failed several times in a row.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 10}  # noqa: RUF012  # as Env declares it

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        workload: EpisodeSource,
        config: EpisodeConfig,
        reward: RewardConfig,
        render_mode: str | None = None,
        cost_model: OnlineCostModel | CostModel | None = None,
        references: Mapping[int, LoadReference] | None = None,
    ) -> None:
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"render_mode is '{render_mode}'; make it None or 'ansi'.")
        self.render_mode = render_mode
        self.cost_model = OnlineCostModel() if cost_model is None else cost_model
        self.references = dict(references or {})
        self._make_engine = make_engine
        self._workload = workload
        self._config = config
        self._reward = reward
        self._engine: Engine | None = make_engine()
        self._num_failures = 0
        self._last: EngineStep | None = None
        self._last_info: dict[str, Any] = {}
        self.contract = self._engine.contract
        if self.contract.granularity != "batch":
            raise ConfigError("DraftEnv decides per batch; set granularity to 'batch'.")
        self.observation_space = gymnasium.spaces.Box(self.contract.low, self.contract.high)
        self.action_space = gymnasium.spaces.MultiDiscrete(np.array(self.contract.action_nvec))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode; the seed fixes its load and its requests.

        Args:
            seed: Seed of the environment's generator.
            options: `{"episode_seed": int}` fixes this episode alone.
        """
        super().reset(seed=seed)
        episode_seed = (options or {}).get("episode_seed")
        if episode_seed is None:
            episode_seed = int(self.np_random.integers(2**31))
        while True:
            try:
                return self._begin(episode_seed)
            except ConfigError:
                raise
            except Exception as error:  # whatever the engine raises, a fresh one may go on
                self._note_failure(error)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take one decision.

        Args:
            action: `(drafter index, number of draft tokens)`, any pair of the action space.

        Returns:
            Observation, reward, terminated, truncated and info; see `_info` for its keys. After
            an engine failure the episode is truncated and `info["engine_error"]` says why.
        """
        if self._last is None or self._engine is None:
            raise gymnasium.error.ResetNeeded("Call reset before step.")
        if not self.action_space.contains(np.asarray(action)):
            raise gymnasium.error.InvalidAction(
                f"{action!r} is not in {self.action_space}; take one of its pairs."
            )
        try:
            step = self._engine.step(np.asarray(action)[None])
        except Exception as error:  # see reset
            return self._fail(error)
        self._num_failures = 0
        self._last = step
        self._num_steps += 1
        self._work_left -= step.num_tokens
        info = self._last_info = self._info(step, self._learn_cost(step))
        terminated = self._work_left <= 0
        truncated = not terminated and self._num_steps >= self._config.max_episode_steps
        return step.observation[0], info["reward"], terminated, truncated, info

    def render(self) -> str | None:
        """The last step as a line of text."""
        if self.render_mode != "ansi" or not self._last_info:
            return None
        info = self._last_info
        drafts = ", ".join(
            f"{drafter} {accepted}/{drafted} accepted"
            for drafter, (drafted, accepted) in info["acceptance"].items()
            if drafted
        )
        return (
            f"{info['concurrency']:>3} requests | {drafts or 'no drafts'} | "
            f"{info['num_tokens']} tokens in {1e3 * info['step_time_s']:.0f} ms | "
            f"{info['speedup']:.2f}x no speculation"
        )

    def close(self) -> None:
        """Free the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._last = None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs to go on alike, JSON-ready: draws and measured speeds."""
        return {
            "generator": self.np_random.bit_generator.state,
            "cost_model": self.cost_model.state_dict(),
            "references": {
                str(load): [reference.tok_per_s, reference.step_time_s]
                for load, reference in self.references.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.np_random = np.random.default_rng()
        self.np_random.bit_generator.state = state["generator"]
        self.cost_model.load_state_dict(state["cost_model"])
        self.references = {
            int(load): LoadReference(*reference) for load, reference in state["references"].items()
        }

    def _begin(self, episode_seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        if self._engine is None:
            self._engine = self._make_engine()
        episode = self._workload.episode(episode_seed)
        if episode.concurrency not in self.references:
            self._calibrate(episode)
            episode = self._workload.episode(episode_seed)
        self._concurrency = episode.concurrency
        self._num_steps = 0
        self._work_left = self._config.work_tokens_per_req * episode.concurrency
        self._last = self._engine.reset(episode)
        info = {"concurrency": episode.concurrency, "episode_seed": episode_seed}
        return self._last.observation[0], info

    def _calibrate(self, episode: Episode) -> None:
        """Measure no speculation at the episode's load."""
        assert self._engine is not None
        self._engine.reset(episode)
        times_s: list[float] = []
        while len(times_s) < self._config.calibration_steps:
            step = self._engine.step(NO_SPECULATION)
            self._learn_cost(step)
            if step.shape.num_prefill_tokens == 0:
                times_s.append(step.step_time_s)
        step_time_s = float(np.median(times_s))
        self.references[episode.concurrency] = LoadReference(
            episode.concurrency / step_time_s, step_time_s
        )

    def _learn_cost(self, step: EngineStep) -> float:
        """Teach the cost model and return the seconds this step is charged."""
        shape = step.shape
        self.cost_model.add(shape, step.step_time_s)
        expected_s = self.cost_model.expected_s(replace(shape, num_prefill_tokens=0))
        if self._reward.time_source == "measured" or expected_s is None:
            return step.step_time_s - self.cost_model.prefill_s(shape)
        return expected_s

    def _info(self, step: EngineStep, charged_s: float) -> dict[str, Any]:
        reference = self.references[self._concurrency]
        terms = step_reward(step.num_tokens, charged_s, reference)
        return {
            "reward": terms.reward,
            "reward_tokens": terms.tokens,
            "reward_time": terms.time,
            "num_tokens": step.num_tokens,
            "step_time_s": step.step_time_s,
            "charged_time_s": charged_s,
            "speedup": step.num_tokens / charged_s / reference.tok_per_s,
            "concurrency": self._concurrency,
            "num_finished_reqs": step.num_finished_reqs,
            "acceptance": {
                drafter: step.record.verified(index)[1:]
                for index, drafter in enumerate(self.contract.proposers, start=1)
            },
        }

    def _fail(self, error: Exception) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self._last is not None
        observation = self._last.observation[0]
        self._note_failure(error)
        return observation, 0.0, False, True, {"engine_error": EngineError(str(error))}

    def _note_failure(self, error: Exception) -> None:
        """Drop the engine; give up when it failed several times in a row."""
        self._num_failures += 1
        logger.warning("The engine failed (%s); the next episode starts a new one.", error)
        try:
            self.close()
        except Exception as close_error:  # a broken engine may not even close
            logger.warning("The broken engine did not close (%s).", close_error)
            self._engine = None
        if self._num_failures >= _MAX_ENGINE_FAILURES:
            raise EngineError(
                f"The engine failed {self._num_failures} times in a row ({error}); lower "
                "max_num_seqs or the KV cache, or look at vLLM's log."
            ) from error
