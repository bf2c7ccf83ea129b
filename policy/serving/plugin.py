"""The vLLM plugin: finds the configured policy and hooks it into the engine, or stays inert.

vLLM calls `register` in every process, before it knows its configuration. So three constructors
are wrapped by a pass-through that looks at the configuration of the object just built: the model
runner's, which gets the hook; the scheduler's, which attaches its load to its output and passes on
what the hook counted; and that of the API server's statistics, which receives it. Without a
configured policy they return the object as vLLM made it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..artifact import load_policy
from ..contract import Contract
from ..controllers import Controller
from ..errors import DraftgymError
from .config import DraftingPolicyConfig, check_settings
from .counts import Reporter, pass_on_in_scheduler, report_from_worker
from .deployment import RELOAD_INTERVAL_S, Deployment, deploy
from .draft_sampling import constrain_drafts_by_torch
from .fit import check_drafters, check_engine
from .reload import ReloadedPolicy
from .seeds import rewind_generators_by_state

logger = logging.getLogger("vllm.draftgym")

_WRAPPED = "_draftgym_wrapped"
Prepare = Callable[[Any, Any, DraftingPolicyConfig], None]
"""What to do with a new object, vLLM's configuration and ours."""


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; may be called any number of times."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.loggers import StatLoggerManager
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _wrap_constructor(StatLoggerManager, _prepare_metrics)
    _wrap_constructor(Scheduler, _prepare_scheduler)
    _wrap_constructor(GPUModelRunner, _prepare_runner)


def _wrap_constructor(cls: type[Any], prepare: Prepare) -> None:
    """Let `prepare` see every object of a class whose first argument is vLLM's configuration."""
    constructor = cls.__init__
    if getattr(constructor, _WRAPPED, False):
        return

    @functools.wraps(constructor)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs)
        vllm_config = args[0] if args else kwargs["vllm_config"]
        config = DraftingPolicyConfig.from_additional_config(vllm_config.additional_config)
        if config is None:
            return
        try:
            prepare(self, vllm_config, config)
        except DraftgymError:
            if config.strict:
                raise
            logger.exception("draftgym is not in use; vLLM drafts as its own settings say.")

    setattr(construct, _WRAPPED, True)
    cls.__init__ = construct


def _prepare_metrics(manager: Any, vllm_config: Any, config: DraftingPolicyConfig) -> None:
    """Receive the counts first, so that vLLM's own loggers see the statistics without them."""
    from .metrics import PolicyStatLogger

    manager.stat_loggers.insert(0, PolicyStatLogger(vllm_config, manager.engine_indexes))


def _prepare_scheduler(scheduler: Any, vllm_config: Any, config: DraftingPolicyConfig) -> None:
    """Attach the scheduler's load to every scheduler output, and pass on the hook's counts."""
    from .hook import LOAD_ATTRIBUTE

    check_engine(vllm_config)
    schedule = scheduler.schedule

    @functools.wraps(schedule)
    def schedule_with_load(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        load = scheduler.get_request_counts()[1], float(scheduler.get_kv_cache_usage())
        setattr(output, LOAD_ATTRIBUTE, load)
        return output

    scheduler.schedule = schedule_with_load
    pass_on_in_scheduler(scheduler)


def _prepare_runner(runner: Any, vllm_config: Any, config: DraftingPolicyConfig) -> None:
    """Hook the configured controller into the model runner."""
    from .hook import SpeculationHook

    check_engine(vllm_config)
    artifact = load_policy(Path(config.path), sha256=config.sha256) if config.path else None
    contract = artifact.contract if artifact else config.contract()
    settings = config.drafter_settings(artifact.drafter_settings if artifact else None)
    check_settings(contract, settings)
    check_drafters(contract, vllm_config)
    deployment = None if config.external else deploy(config, contract, artifact)
    hook = SpeculationHook(
        runner,
        contract,
        settings,
        None if deployment is None else _agreed(deployment, contract, vllm_config),
        is_serving=not config.external,
    )
    hook.install()
    rewind_generators_by_state(runner)
    constrain_drafts_by_torch(runner)
    runner.draftgym = hook
    decider = "the caller"
    if deployment is not None:
        rule = str((config.baseline or {}).get("name", ""))
        decider = f"policy {artifact.path} (sha256 {artifact.sha256})" if artifact else rule
        report_from_worker(runner, Reporter(hook, deployment, rule))
    logger.info(
        "draftgym is in use: %s decides per %s between %s%s.",
        decider,
        contract.granularity,
        ", ".join(contract.drafters),
        f" (mode {deployment.mode})" if deployment else "",
    )


def _agreed(deployment: Deployment, contract: Contract, vllm_config: Any) -> Controller:
    """The deployed controller, on all ranks the same; it watches its file where it decides."""
    controller: Controller = deployment
    is_deciding = True
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        from vllm.distributed import get_tp_group

        from .agreement import AgreedController

        controller = AgreedController(deployment, contract, get_tp_group())
        is_deciding = get_tp_group().is_first_rank
    if is_deciding and isinstance(deployment.policy, ReloadedPolicy):
        deployment.policy.watch(RELOAD_INTERVAL_S)
    return controller
