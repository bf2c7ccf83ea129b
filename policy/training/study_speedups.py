"""Speed over no speculation, of fixed settings, oracles and a policy, in a closed loop on traces.

Decoding alone, priced by a cost model; a request's first token takes a step. The oracles know
which draft tokens will be accepted: `oracle_length` drafts just those of one drafter, a
combination those of the drafter that brings the most tokens per second, in three pricings
(`envs.oracles`). `optimum` is the exact dynamic programme, at one request in flight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, get_args

from envs.closed_loop import seconds_alone, tokens_per_s
from envs.draft_options import Options, fixed_options
from envs.oracles import Pricing, exact_options, optimal_s
from envs.traces import Traces
from policy.cost_model import CostModel

from .study_config import TraceStudyConfig

FIXED, ORACLE_LENGTH, COMBINED, OPTIMUM, POLICY = (
    "fixed",
    "oracle_length",
    "combined",
    "optimum",
    "policy",
)
Requests = Literal["all", "aligned", "held_out"]


@dataclass(frozen=True)
class Speedup:
    """One figure.

    Attributes:
        where: `traces` or `live`.
        requests: Which requests of the data set: all, the aligned, or the held-out ones.
        data_set: Kind of the requests, or `all`.
        num_running_reqs: Requests in flight.
        setting: `fixed`, `oracle_length`, `combined`, `optimum` or `policy`.
        drafter: Of a fixed setting or an oracle length; the pricing of a combination; else empty.
        num_speculative_tokens: Of a fixed setting; else 0.
        speedup: Tokens per second over those without speculation, on the same requests.
        low: Lower end of its 95 % interval over paired blocks; NaN on traces.
        high: Upper end.
    """

    where: Literal["traces", "live"]
    requests: Requests
    data_set: str
    num_running_reqs: int
    setting: str
    drafter: str
    num_speculative_tokens: int
    speedup: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        """The figure, and its interval where there is one."""
        if math.isnan(self.low):
            return f"{self.speedup:.2f}"
        return f"{self.speedup:.2f} [{self.low:.2f}, {self.high:.2f}]"


class Speedups(tuple[Speedup, ...]):
    """Figures that can be asked for.

    Example:
        >>> rows = [Speedup("traces", "all", "chat", 1, FIXED, "ngram", n, 1 + n) for n in (1, 2)]
        >>> Speedups(rows).best(data_set="chat", drafter="ngram").num_speculative_tokens
        2
    """

    def where(self, **fields: object) -> Speedups:
        """Those whose fields have these values."""
        return Speedups(
            row for row in self if all(getattr(row, name) == is_ for name, is_ in fields.items())
        )

    def best(self, **fields: object) -> Speedup:
        """The fastest of those."""
        return max(self.where(**fields), key=lambda row: row.speedup)

    def values(self, name: str) -> list:
        """The values of a field, each once, in order."""
        return list(dict.fromkeys(getattr(row, name) for row in self))


def measure_speedups(
    sets: Mapping[str, Traces],
    cost_model: CostModel,
    config: TraceStudyConfig,
    requests: Requests,
    loads: Sequence[int],
    *,
    num_threads: int,
    seed: int,
) -> Speedups:
    """Every fixed setting and oracle on every data set at every load.

    Args:
        sets: Requests by data set.
        cost_model: Prices the steps.
        config: Draft lengths, and how long each load is held.
        requests: Which requests these are, for the rows.
        loads: Requests in flight.
        num_threads: Data sets and loads that are served at once.
        seed: Of the order of the requests.
    """

    def serve(cell: tuple[str, int]) -> list[Speedup]:
        name, load = cell
        options = _settings(sets[name], config.max_length)
        plain = rate(sets[name], fixed_options(sets[name]), load)
        rows = [
            Speedup("traces", requests, name, load, *key, rate(sets[name], choice, load) / plain)
            for key, choice in options
        ]
        if load == 1:
            speedup = _optimum(sets[name], cost_model, config.max_length)
            rows.append(Speedup("traces", requests, name, load, OPTIMUM, "", 0, speedup))
        return rows

    def rate(traces: Traces, options: Options, load: int) -> float:
        return tokens_per_s(
            traces,
            options,
            cost_model,
            load,
            first_position=0,
            min_tokens_per_slot=config.min_tokens_per_slot,
            seed=seed,
        )

    cells = [(name, load) for name in sets for load in loads]
    with ThreadPoolExecutor(num_threads) as pool:
        return Speedups(row for rows in pool.map(serve, cells) for row in rows)


def _settings(traces: Traces, max_length: int) -> Iterator[tuple[tuple[str, str, int], Options]]:
    """Setting, drafter and length of every row, and what its requests can do."""
    for drafter, recorded in traces.header.max_lengths.items():
        for length in range(1, min(max_length, recorded) + 1):
            yield (FIXED, drafter, length), fixed_options(traces, drafter, length)
        yield (ORACLE_LENGTH, drafter, 0), exact_options(traces, (drafter,), max_length)
    for pricing in get_args(Pricing) if len(traces.drafters) > 1 else ():
        options = exact_options(traces, tuple(traces.drafters), max_length, pricing)
        yield (COMBINED, pricing, 0), options


def _optimum(traces: Traces, cost_model: CostModel, max_length: int) -> float:
    options = exact_options(traces, tuple(traces.drafters), max_length)
    plain_s = seconds_alone(traces, fixed_options(traces), cost_model, first_position=0)
    best_s = optimal_s(traces, options, cost_model, first_position=0)
    return float(plain_s.sum() / best_s.sum())
