"""Train a drafting policy on live vLLM, export it and compare it: `python scripts/train.py`."""

import logging
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

OmegaConf.register_new_resolver("repository", lambda: str(REPOSITORY))


@hydra.main(config_path=str(REPOSITORY / "conf"), config_name="train", version_base="1.3")
def main(settings: DictConfig) -> None:
    """Hydra's settings -> validated dataclass -> library call."""
    from policy.config import from_mapping
    from policy.errors import DraftgymError
    from policy.training.config import TrainConfig
    from policy.training.overrides import check_added_hydra_keys

    resolved = OmegaConf.to_container(settings, resolve=True)
    logging.getLogger().setLevel(logging.WARNING)
    try:
        check_added_hydra_keys(HydraConfig.get().overrides.hydra)
        config = from_mapping(TrainConfig, resolved, where="")
        from policy.training.train import describe, train  # seconds, so after the check

        result = train(config, resolved)
    except DraftgymError as error:
        sys.exit(f"error: {error}")
    print(describe(result))


if __name__ == "__main__":
    from policy.training.overrides import one_sentence_errors

    with one_sentence_errors():
        main()
