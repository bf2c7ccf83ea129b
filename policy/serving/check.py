"""`python -m policy.serving check POLICY …`: does a policy fit an engine, said before it starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..artifact import PolicyArtifact, load_policy
from ..contract import MODEL_DRAFTERS, TOKEN_DRAFTERS
from ..controllers import PolicyController
from ..errors import DraftgymError, EngineError
from .config import CONFIG_KEY, DraftingPolicyConfig, check_settings
from .deployment import deploy
from .fit import check_drafters, check_engine


@dataclass(frozen=True)
class Finding:
    """One line of the answer.

    Attributes:
        what: What was looked at.
        says: What was found, in one sentence where it is wrong.
        fits: Whether it is as it must be.
    """

    what: str
    says: str
    fits: bool = True


def check(policy: Path, engine_arguments: Sequence[str]) -> list[Finding]:
    """Look at a policy and at the engine that is to serve it; no engine is started.

    Args:
        policy: A `policy.pt`.
        engine_arguments: The flags of `vllm serve`, `--model …` included.
    """
    findings, artifact = _check_artifact(policy)
    try:
        vllm_config = _vllm_config(engine_arguments)
    except EngineError as error:
        return [*findings, Finding("engine", str(error), fits=False)]
    runner = "V2" if vllm_config.use_v2_model_runner else "V1"
    findings.append(Finding("model runner", runner, fits=runner == "V1"))
    findings.append(_judge("engine", lambda: check_engine(vllm_config), "as the hook needs it"))
    findings += _check_section(policy, vllm_config, artifact)
    if artifact is not None and vllm_config.speculative_config is not None:
        speculative = vllm_config.speculative_config
        allowed = [*TOKEN_DRAFTERS, *{speculative.method} & set(MODEL_DRAFTERS)]
        says = f"{', '.join(allowed)}, up to {speculative.num_speculative_tokens} tokens"
        contract = artifact.contract
        findings.append(_judge("drafters", lambda: check_drafters(contract, vllm_config), says))
    return findings


def _check_artifact(policy: Path) -> tuple[list[Finding], PolicyArtifact | None]:
    try:
        artifact = load_policy(policy)
    except DraftgymError as error:
        return [Finding("policy", str(error), fits=False)], None
    contract = artifact.contract
    lengths = zip(contract.drafters[1:], contract.max_lengths[1:], strict=True)
    return [
        Finding("policy", f"{policy} (sha256 {artifact.sha256})"),
        Finding("contract", f"{len(contract.fields)} fields, decides per {contract.granularity}"),
        Finding("drafts with", ", ".join(f"{name} up to {length}" for name, length in lengths)),
        Finding("decision", _decision_times(artifact)),
    ], artifact


def _decision_times(artifact: PolicyArtifact) -> str:
    """How long a decision takes on this machine, the fastest of twenty."""
    controller = PolicyController(artifact)
    times = []
    for num_rows in (1, 256):
        observation = np.repeat(artifact.contract.low[None], num_rows, axis=0)
        seconds = []
        for _ in range(20):
            started_s = time.perf_counter()
            controller.decide(None, observation)  # type: ignore[arg-type]  # it reads rows only
            seconds.append(time.perf_counter() - started_s)
        times.append(f"{min(seconds) * 1e6:.0f} us for {num_rows} rows")
    return ", ".join(times)


def _check_section(
    policy: Path, vllm_config: Any, artifact: PolicyArtifact | None
) -> list[Finding]:
    """Look at the section of `--additional-config`, where one is given."""
    section = (vllm_config.additional_config or {}).get(CONFIG_KEY)
    if section is None:
        return [Finding(CONFIG_KEY, f'to serve it, add {{"{CONFIG_KEY}": {{"path": "{policy}"}}}}')]
    try:
        config = DraftingPolicyConfig.from_additional_config(vllm_config.additional_config)
        assert config is not None
        if artifact is not None:
            settings = config.drafter_settings(artifact.drafter_settings)
            check_settings(artifact.contract, settings)
            deploy(config, artifact.contract, artifact)
    except DraftgymError as error:
        return [Finding(CONFIG_KEY, str(error), fits=False)]
    is_same = config.path is not None and Path(config.path).resolve() == policy.resolve()
    says = "is read" if is_same else f"names {config.path or 'no policy'}, not the file checked"
    return [Finding(CONFIG_KEY, says, fits=is_same)]


def _judge(what: str, refuse: Any, says: str) -> Finding:
    try:
        refuse()
    except DraftgymError as error:
        return Finding(what, str(error), fits=False)
    return Finding(what, says)


def _vllm_config(engine_arguments: Sequence[str]) -> Any:
    """VLLM's configuration as a server would make it.

    Raises:
        EngineError: If vLLM refuses its own flags.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="check"))
    arguments = parser.parse_args(list(engine_arguments))
    try:
        return AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    except Exception as error:  # vLLM and transformers raise whatever fits
        line = " ".join(str(error).split()).rstrip(".")
        raise EngineError(f"vLLM refuses these flags ({line}); correct them.") from error
