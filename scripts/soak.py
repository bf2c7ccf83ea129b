"""Mixed load against a server for an hour: `python scripts/soak.py --help`.

Random sampling parameters, requests dropped in mid-stream, policies and rubbish put in the place of
the one in use. Ends with 1 where a request failed, an answer was not valid, or memory grew.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> None:
    """Parse the command line, run, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / "checkpoints" / "smollm2-135m-cpu" / "policy.pt"
    parser.add_argument("--policy", type=Path, default=default)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "soak.json")
    arguments = parser.parse_args()

    from envs.soak import SoakConfig, soak
    from policy.errors import DraftgymError

    try:
        config = SoakConfig(
            minutes=arguments.minutes, num_clients=arguments.clients, seed=arguments.seed
        )
        with tempfile.TemporaryDirectory() as folder:
            result = soak(arguments.policy, config, Path(folder))
    except DraftgymError as error:
        sys.exit(f"error: {error}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(result.to_json())
    print(
        f"{sum(result.num_requests.values())} requests, {result.num_dropped} of them dropped, "
        f"{result.num_reloads.total()} changes of the policy; memory grew by "
        f"{result.memory_growth:.1%}; {'; '.join(result.problems) or 'no problem'}"
    )
    sys.exit(bool(result.problems))


if __name__ == "__main__":
    main()
