"""How fast traces are replayed and learnt from: `python scripts/benchmark_trace.py --help`.

Engine steps per second of the vectorised simulator by number of engines and of requests in
flight, and env steps per second with PPO learning; medians over repeats with their range.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> None:
    """Parse the command line, measure, print two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / "checkpoints" / "traces" / "smollm2-135m-cpu"
    parser.add_argument("--traces", type=Path, default=default.with_suffix(".parquet"))
    parser.add_argument("--cost-model", type=Path, default=default.with_suffix(".json"))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--envs", type=int, nargs="+", default=[1, 16, 256, 1024])
    parser.add_argument("--threads", type=int, default=None, help="default: one per processor")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()

    from policy.errors import DraftgymError
    from policy.training.replay_speed import measure_replay_speed

    try:
        print(
            measure_replay_speed(
                arguments.traces,
                arguments.cost_model,
                tuple(arguments.requests),
                tuple(arguments.envs),
                arguments.threads,
                arguments.repeats,
            )
        )
    except DraftgymError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
