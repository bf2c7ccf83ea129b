"""Every rank of tensor parallelism drafts as the first one decided, whatever it would have done."""

from types import SimpleNamespace

import numpy as np
import pytest

from policy.baselines.random import RandomController
from policy.contract import Contract
from policy.controllers import SafeController
from policy.observation import ObservationBuilder
from policy.serving.agreement import AgreedController
from policy.serving.deployment import Deployment

from .step_history import DRAFTERS, LENGTHS, random_step


class Judging(RandomController):
    def admit(self, record, drafts, survival):
        return self._generator.integers(0, 3, record.num_rows)


@pytest.mark.parametrize("cutoffs", [(), (0.3, 0.6)], ids=["pairs", "with cutoffs"])
def test_ranks_that_would_decide_differently_agree(monkeypatch, cutoffs):
    contract = Contract(DRAFTERS, LENGTHS, "request", cutoffs)
    wire = []

    def broadcast(tensor, src, group):
        assert (src, group) == (4, "gloo")
        if is_first[0]:
            wire.append(tensor.clone())
        else:
            tensor.copy_(wire.pop(0))

    monkeypatch.setattr("policy.serving.agreement.torch.distributed.broadcast", broadcast)
    is_first, decided = [True], {}
    record = random_step(np.random.default_rng(0), [f"r{i}" for i in range(16)])
    observation = ObservationBuilder(contract).update(record)
    drafts = np.tile([2, 3], (16, 1))
    for rank in (0, 1):
        is_first[0] = rank == 0
        group = SimpleNamespace(is_first_rank=rank == 0, ranks=[4, 5], cpu_group="gloo")
        guarded = SafeController(Judging(contract, seed=rank), contract)
        agreed = AgreedController(Deployment(guarded, contract, (0, 0)), contract, group)
        assert agreed.judges_drafts
        decided[rank] = agreed.decide(record, observation), agreed.admit(record, drafts, None)
    assert not wire
    np.testing.assert_array_equal(decided[0][0], decided[1][0])
    np.testing.assert_array_equal(decided[0][1], decided[1][1])
    alone = SafeController(Judging(contract, seed=0), contract)
    np.testing.assert_array_equal(alone.decide(record, observation), decided[0][0])
    assert decided[0][0].shape == (16, len(contract.action_nvec))
    assert len(np.unique(decided[0][0], axis=0)) > 3
