"""The requests of a study: data sets of recorded requests, whole, aligned, and held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from envs.headroom import misaligned_requests
from envs.traces import Traces, read_traces
from policy.cost_model import CostModel, read_cost_model

from ..contract import MODEL_DRAFTERS
from ..errors import TraceError

ALL = "all"
"""Name of the data set of all requests together."""
NGRAM = "ngram"


@dataclass(frozen=True)
class StudyTraces:
    """Recorded requests and what their steps cost.

    Attributes:
        traces: The requests.
        cost_model: Prices the steps.
        misaligned: Names of requests whose record of the model drafter does not fit their output.
    """

    traces: Traces
    cost_model: CostModel
    misaligned: frozenset[str]

    @classmethod
    def read(cls, files: Sequence[str], cost_model: str) -> StudyTraces:
        """Read trace files, or folders of them, and what prices their steps.

        Raises:
            TraceError: If there is none, one is damaged, or two do not go together.
            ConfigError: If the cost model cannot be read.
        """
        paths = [path for name in files for path in _files(Path(name).expanduser())]
        misaligned = frozenset[str]().union(*map(misaligned_requests, paths))
        prices = read_cost_model(Path(cost_model).expanduser())
        return cls(read_traces(*paths), prices, misaligned)

    @property
    def kinds(self) -> list[str]:
        """Names of the data sets."""
        return sorted(set(self.traces.kinds))

    @property
    def model_drafter(self) -> str | None:
        """The recorded drafter that runs a model, if any."""
        return next((name for name in self.traces.drafters if name in MODEL_DRAFTERS), None)

    def data_sets(self) -> dict[str, Traces]:
        """The requests by data set, and all together where there are several."""
        return self._by_kind(lambda request: True)

    def aligned(self) -> dict[str, Traces]:
        """The same of the aligned requests alone; empty where all are."""
        if not self.misaligned:
            return {}
        return self._by_kind(
            lambda request: self.traces.request_ids[request] not in self.misaligned
        )

    def all_aligned(self) -> Traces:
        """The aligned requests of all data sets."""
        names = self.traces.request_ids
        return self.traces.select(
            [request for request, name in enumerate(names) if name not in self.misaligned]
        )

    def held_out(self) -> dict[str, Traces]:
        """The same of the requests that no policy was trained on."""
        return self._by_kind(lambda request: self.traces.splits[request] == "eval")

    def _by_kind(self, belongs: Callable[[int], bool]) -> dict[str, Traces]:
        chosen = [request for request in range(self.traces.num_requests) if belongs(request)]
        by_kind = {
            kind: [request for request in chosen if self.traces.kinds[request] == kind]
            for kind in self.kinds
        }
        sets = {kind: self.traces.select(found) for kind, found in by_kind.items() if found}
        if len(sets) > 1:
            sets[ALL] = self.traces.select(np.array(chosen))
        return sets


def _files(source: Path) -> list[Path]:
    """A trace file, or those of a folder."""
    if not source.is_dir():
        return [source]
    paths = [path for path in sorted(source.glob("*.parquet")) if ".timings." not in path.name]
    if not paths:
        raise TraceError(
            f"There is no .parquet file in {source}; collect or import traces, or name another "
            "folder in traces.files."
        )
    return paths
