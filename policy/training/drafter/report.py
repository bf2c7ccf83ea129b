"""The table of a head's acceptance, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from .acceptance import Acceptance, mean_over_kinds


def table(measured: Mapping[str, Mapping[str, Acceptance]]) -> str:
    """One row for each kind and head: acceptance by position, and the mean acceptance length.

    Args:
        measured: By head, then by kind.
    """
    first = next(iter(next(iter(measured.values())).values()))
    length = len(first.num_accepted_per_pos)
    positions = " | ".join(str(position) for position in range(1, length + 1))
    lines = [
        f"| kind | head | drafts | {positions} | mean acceptance length |",
        f"|{'---|' * (length + 4)}",
    ]
    for kind in next(iter(measured.values())):
        for head, kinds in measured.items():
            one = kinds[kind]
            shares = " | ".join(f"{share:.3f}" for share in one.shares)
            lines.append(
                f"| {kind} | {head} | {one.num_drafts} | {shares} "
                f"| {one.mean_acceptance_length:.2f} |"
            )
    for head, kinds in measured.items():
        blanks = " | ".join(" " for _ in range(length + 1))
        lines.append(f"| mean | {head} | {blanks} | {mean_over_kinds(kinds):.2f} |")
    return "\n".join(lines) + "\n"
