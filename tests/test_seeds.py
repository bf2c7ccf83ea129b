"""S19: seeded requests with chunked prompts on the CPU, whose generators cannot be rewound."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from policy.serving.seeds import rewind_generators_by_state


class Runner:
    """Samples one number per row, and throws some away as vLLM's runner does."""

    def __init__(self, device="cpu"):
        self.device = torch.device(device)
        self.discard_request_mask = SimpleNamespace(np=np.zeros(8, bool))
        self.input_batch = SimpleNamespace(generators={})

    def seed(self, row, seed):
        self.input_batch.generators[row] = torch.Generator().manual_seed(seed)

    def _sample(self, num_rows):
        rows = self.input_batch.generators
        return [torch.rand(1, generator=rows.get(row)).item() for row in range(num_rows)]

    def _bookkeeping_sync(self, sampled):
        for row in np.flatnonzero(self.discard_request_mask.np):
            generator = self.input_batch.generators.get(int(row))
            if generator is not None:
                generator.set_offset(generator.get_offset() - 4)
        return sampled

    def step(self):
        return self._bookkeeping_sync(self._sample(3))


def test_a_discarded_sample_leaves_the_generator_where_it_was():
    plain, chunked = Runner(), Runner()
    for runner in (plain, chunked):
        runner.seed(0, 1)
        runner.seed(2, 3)
    expected = [plain.step() for _ in range(2)]
    rewind_generators_by_state(chunked)
    for _ in range(3):  # the prompt of row 2 comes in three chunks, row 0 generates meanwhile
        chunked.discard_request_mask.np[2] = True
        generators = dict(chunked.input_batch.generators)
        chunked.step()
        assert chunked.input_batch.generators == generators
    chunked.discard_request_mask.np[2] = False
    assert [chunked.step()[2] for _ in range(2)] == [step[2] for step in expected]


def test_generators_are_kept_where_the_bookkeeping_fails():
    runner = Runner()
    runner.seed(0, 1)
    runner.discard_request_mask.np[0] = True

    def failing(sampled):
        raise RuntimeError

    runner._bookkeeping_sync = failing
    rewind_generators_by_state(runner)
    with pytest.raises(RuntimeError):
        runner.step()
    assert runner.input_batch.generators.keys() == {0}


def test_without_help_the_runner_raises_and_on_other_devices_nothing_changes():
    runner = Runner()
    runner.seed(0, 1)
    runner.discard_request_mask.np[0] = True
    with pytest.raises(RuntimeError, match="offset"):
        runner.step()
    accelerator = Runner("meta")
    before = dict(vars(accelerator))
    rewind_generators_by_state(accelerator)
    assert vars(accelerator) == before
