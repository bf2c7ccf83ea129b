"""What hook and policy cost a step: `python scripts/benchmark_overhead.py --help`.

Serves the same requests with a policy that decides in shadow mode and with its action, no draft,
hard-wired, every few steps the other way, and compares the steps.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> None:
    """Parse the command line, measure, print one row per load."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / "checkpoints" / "smollm2-135m-cpu" / "policy.pt"
    parser.add_argument("--policy", type=Path, default=default)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks at each load")
    parser.add_argument("--steps", type=int, default=5, help="steps of a block")
    arguments = parser.parse_args()

    from envs.overhead import HEADER, measure_overhead
    from policy.errors import DraftgymError

    try:
        print(HEADER)
        for overhead in measure_overhead(
            arguments.policy, tuple(arguments.requests), arguments.pairs, arguments.steps
        ):
            print(overhead.describe(), flush=True)
    except DraftgymError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
