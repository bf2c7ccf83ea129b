"""How much greedy output speculation leaves identical: `python scripts/losslessness.py --help`.

Serves the same held-out prompts without speculation and with a random drafter and length for
every request at every step, and compares the outputs token by token. Exact in float32; in
bfloat16 near-ties may fall the other way, since verifying changes the shape of the products.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    """Parse the command line, measure, print one line per data type."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", default=["float32"], help="float32, bfloat16, …")
    parser.add_argument("--prompts", type=int, default=32, help="number of prompts")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight")
    arguments = parser.parse_args()

    from envs.live import DraftersConfig, ModelConfig
    from policy.training.losslessness import measure_losslessness

    for dtype in arguments.dtype:
        model = ModelConfig(dtype=dtype, max_num_seqs=arguments.concurrency)
        result = measure_losslessness(
            model, DraftersConfig(), arguments.prompts, arguments.tokens, arguments.concurrency
        )
        print(f"{dtype}: {result.describe()}", flush=True)


if __name__ == "__main__":
    main()
