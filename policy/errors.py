"""The errors draftgym raises; each message is one sentence that names the mend."""


class DraftgymError(Exception):
    """Base class of every error that draftgym raises on purpose."""


class ContractError(DraftgymError):
    """An observation, action or drafter does not fit the contract."""


class ArtifactError(DraftgymError):
    """An exported policy cannot be saved, read, or used with this engine."""


class EngineError(DraftgymError):
    """The vLLM engine cannot be started, hooked or stepped as configured."""


class ConfigError(DraftgymError):
    """A configured value is unknown or out of range."""


class TraceError(DraftgymError):
    """A trace file is damaged, of another version, or does not fit what it is used for."""
