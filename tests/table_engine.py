"""A deterministic engine for `DraftEnv`: real records and observations, made up outcomes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from envs.draft_env import DraftEnv, EpisodeConfig
from envs.engine import EngineStep
from envs.reward import RewardConfig
from envs.workload import ClosedLoop, Episode, WorkloadRequest
from policy.contract import Contract
from policy.cost_model import shape_of
from policy.observation import ObservationBuilder

from .step_history import random_step

CONTRACT = Contract(("none", "ngram", "eagle3"), (0, 8, 4))


class TableWorkload:
    """Episodes at a load of 1, 2 or 4 whose requests carry nothing but the episode's seed."""

    def episode(self, seed):
        load = (1, 2, 4)[seed % 3]
        requests = (
            WorkloadRequest(f"{seed}-{index}", (seed,), 64, 0.0, "chat")
            for index in itertools.count()
        )
        return Episode(load, requests, ClosedLoop(load))


class TableEngine:
    """The seed of the episode and the actions decide everything that happens."""

    contract = CONTRACT

    def reset(self, episode):
        requests = episode.take_due(0, 0.0)
        self.req_ids = [request.request_id for request in requests]
        self.rng = np.random.default_rng(requests[0].prompt_token_ids[0])
        self.builder = ObservationBuilder(CONTRACT)
        return self.go_on(0, 0)

    def step(self, actions):
        return self.go_on(*CONTRACT.canonical_action(actions[0]))

    def close(self):
        pass

    def go_on(self, drafter, length):
        rows = len(self.req_ids)
        accepted = self.rng.binomial(length, 0.7, rows).astype(np.int32)
        record = replace(
            random_step(self.rng, self.req_ids),
            num_prefill_tokens=0,
            num_scheduled_tokens=rows * (1 + length),
            drafter=np.full(rows, drafter, np.int32),
            num_draft_tokens=np.full(rows, length, np.int32),
            num_accepted_tokens=accepted,
            num_emitted_tokens=1 + accepted,
            num_draft_passes=length if drafter == 2 else 0,
            num_draft_pass_tokens=rows * length if drafter == 2 else 0,
        )
        return EngineStep(
            record=record,
            observation=self.builder.update(record),
            num_tokens=int(record.num_emitted_tokens.sum()),
            step_time_s=0.02 + 0.001 * rows * (1 + length) + 0.004 * record.num_draft_passes,
            num_finished_reqs=0,
            shape=shape_of(record, CONTRACT),
        )


def make_env(make_engine=TableEngine):
    """A real `DraftEnv` on the table engine."""
    episode = EpisodeConfig(work_tokens_per_req=24, calibration_steps=4)
    return DraftEnv(make_engine, TableWorkload(), episode, RewardConfig())


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Networks this small take ten times as long when two threads share a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
