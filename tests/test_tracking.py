"""Metrics reach the CSV and TensorBoard; what wandb gets is in `test_wandb`."""

import csv

from policy.training.config import LoggerConfig
from policy.training.tracking import Tracking


def log_twice(tracking):
    for step in (64, 128):
        tracking.sb3_logger.record("throughput/tok_per_s", 2.0 * step)
        tracking.sb3_logger.dump(step)
    tracking.finish()


def test_without_a_logger_the_csv_remains_and_a_resumed_run_adds_its_own(tmp_path):
    for name in ("progress.csv", "progress_2.csv"):
        tracking = Tracking(LoggerConfig(name="none"), tmp_path, {})
        assert tracking.run_id is None
        log_twice(tracking)
        with (tmp_path / name).open() as file:
            assert [row["throughput/tok_per_s"] for row in csv.DictReader(file)] == [
                "128.0",
                "256.0",
            ]
    assert len(list(tmp_path.iterdir())) == 2


def test_tensorboard_gets_every_value_at_its_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_twice(Tracking(LoggerConfig(name="tensorboard"), tmp_path, {}))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    logged = [(event.step, event.value) for event in events.Scalars("throughput/tok_per_s")]
    assert logged == [(64, 128.0), (128, 256.0)]
