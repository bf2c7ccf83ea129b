"""Command line: `python -m policy.serving check POLICY --model … --speculative-config …`."""

from __future__ import annotations

import sys
from pathlib import Path

USAGE = """usage: python -m policy.serving check POLICY.pt --model MODEL [FLAG …]

Says whether a policy fits an engine, before the engine starts. The flags are those of `vllm serve`,
--speculative-config and --additional-config among them; give the ones that you deploy with. Ends
with 0 where everything fits, else with 1."""


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    if len(arguments) < 2 or arguments[0] != "check" or arguments[1].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    from .check import check

    findings = check(Path(arguments[1]), arguments[2:])
    for finding in findings:
        print(f"{'ok' if finding.fits else 'NO':<3} {finding.what}: {finding.says}")
    return 0 if all(finding.fits for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
