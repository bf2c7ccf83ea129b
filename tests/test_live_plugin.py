"""The plugin in vLLM: inert without a policy, in use with one, and loud when one does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from envs.api_server import serving
from envs.live import engine_config
from policy.contract import Contract
from policy.errors import EngineError
from policy.serving import fit, plugin

from . import live
from .exported import export


def engine_settings(**policy):
    """Keyword arguments of `vllm.LLM` for an engine with the plugin."""
    return engine_config(live.MODEL, live.DRAFTERS, policy).engine_args()


def vllm_config(**changes):
    """A real vLLM configuration, without an engine."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = {**engine_config(live.MODEL, live.DRAFTERS).engine_args(), **changes}
    return EngineArgs(**arguments).create_engine_config()


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO", **environment},
    )


def test_without_a_policy_the_drafting_methods_are_vllms_own():
    """The runner and the scheduler of an engine without a policy are as vLLM made them."""
    settings = engine_config(live.MODEL, live.DRAFTERS).engine_args()
    del settings["additional_config"]
    result = run(
        f"""
        import os
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
        names = ("propose_draft_token_ids", "take_draft_token_ids", "_input_fits_in_drafter")
        before = [vars(GPUModelRunner)[name] for name in names] + [Scheduler.schedule]
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
        engine = LLMEngine.from_engine_args(EngineArgs(**{settings!r}))
        core = engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        after = [vars(GPUModelRunner)[name] for name in names] + [Scheduler.schedule]
        assert before == after
        assert not set(names) & set(vars(runner)), vars(runner).keys()
        assert "schedule" not in vars(core.scheduler)
        assert not hasattr(runner, "draftgym")
        assert getattr(GPUModelRunner.__init__, "_draftgym_wrapped", False)
        print("UNTOUCHED")
        """
    )
    assert "UNTOUCHED" in result.stdout, result.stderr[-3000:]


def test_a_policy_serves_in_llm_with_the_engine_in_its_own_process(tmp_path, plain_outputs):
    sha256 = export(tmp_path / "policy.pt", action=(2, 3))
    settings = engine_settings(path=str(tmp_path / "policy.pt"))
    requests = live.make_requests(4, max_tokens=24)
    prompts = [{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests]
    code = f"""
        import json
        if __name__ == "__main__":
            from vllm import LLM, SamplingParams
            llm = LLM(**{ {**settings, "disable_log_stats": False}!r})
            outputs = llm.generate({prompts!r}, SamplingParams(max_tokens=24, temperature=0))
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            metrics = {{metric.name: metric.value for metric in llm.get_metrics()
                        if metric.name.startswith("vllm:spec_decode") and hasattr(metric, "value")}}
            print("RESULT", json.dumps([tokens, metrics]))
    """
    script = tmp_path / "serve.py"
    script.write_text(textwrap.dedent(code))
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, env=environment
    )
    line = next((line for line in result.stdout.splitlines() if line.startswith("RESULT")), None)
    assert line is not None, result.stderr[-3000:]
    tokens, metrics = json.loads(line.removeprefix("RESULT "))
    assert tokens == [plain_outputs[request.request_id][:24] for request in requests]
    assert metrics["vllm:spec_decode_num_draft_tokens"] > 20
    assert sha256 in result.stdout + result.stderr


def test_the_server_takes_the_policy_from_the_environment(tmp_path):
    sha256 = export(tmp_path / "policy.pt", action=(1, 8))
    policy = str(tmp_path / "policy.pt")
    config = replace(engine_config(live.MODEL, live.DRAFTERS), drafting_policy=None)
    with serving(config, tmp_path / "server.log", DRAFTGYM_POLICY=policy) as server:
        body = {"model": "target", "prompt": "1 2 3 4 1 2 3 4 1 2 3", "max_tokens": 32}
        answer = server.post("/v1/completions", {**body, "temperature": 0})
        assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 0
        log = server.log.read_text()
    assert answer["usage"]["completion_tokens"] > 0
    assert f"draftgym is in use: policy {policy} (sha256 {sha256})" in log


def test_a_policy_that_does_not_fit_stops_the_start_with_a_sentence(tmp_path):
    """S6: no server runs without the policy it was given."""
    export(tmp_path / "corrupt.pt")
    (tmp_path / "corrupt.pt").write_bytes((tmp_path / "corrupt.pt").read_bytes()[:500])
    export(tmp_path / "other.pt", Contract(("none", "draft_model"), (0, 4)))
    export(tmp_path / "longer.pt", Contract(("none", "ngram"), (0, 16)))
    for description in tmp_path.glob("*.json"):
        description.unlink()
    sentences = {
        "corrupt.pt": "export the policy again",
        "missing.pt": "give the path of an exported policy.pt",
        "other.pt": "The policy drafts with 'draft_model'",
        "longer.pt": "set num_speculative_tokens to 16",
    }
    result = run(
        f"""
        from policy.errors import DraftgymError
        from tests import live
        for name in {list(sentences)!r}:
            try:
                live.make_engine({{"path": {str(tmp_path)!r} + "/" + name}})
            except DraftgymError as error:
                print("REFUSED", name, str(error).replace(chr(10), "|"))
        """
    )
    refused = dict(
        line.split(" ", 2)[1:] for line in result.stdout.splitlines() if line.startswith("REFUSED")
    )
    assert refused.keys() == sentences.keys(), result.stderr[-3000:]
    for name, sentence in sentences.items():
        assert sentence in refused[name]
        assert "|" not in refused[name]


def test_an_engine_that_does_not_fit_is_refused_with_the_mend(monkeypatch):
    fit.check_engine(vllm_config())
    asynchronous = vllm_config()
    asynchronous.scheduler_config.async_scheduling = True
    with pytest.raises(EngineError, match="--no-async-scheduling"):
        fit.check_engine(asynchronous)
    with pytest.raises(EngineError, match="--speculative-config"):
        fit.check_engine(vllm_config(speculative_config=None))
    monkeypatch.setattr(fit, "version", lambda name: "0.33.1")
    with pytest.raises(EngineError, match=r"vLLM 0\.32\.0, and this is 0\.33\.1"):
        fit.check_engine(vllm_config())


def test_registering_twice_wraps_once():
    """S7: vLLM calls plugins several times."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    plugin.register()
    constructor = GPUModelRunner.__init__
    plugin.register()
    assert GPUModelRunner.__init__ is constructor
