"""Tune the rules on recorded training requests: `python scripts/tune_baselines.py`."""

import logging
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

OmegaConf.register_new_resolver("repository", lambda: str(REPOSITORY))


@hydra.main(config_path=str(REPOSITORY / "conf"), config_name="tune_baselines", version_base="1.3")
def main(settings: DictConfig) -> None:
    """Hydra's settings -> validated dataclass -> library call."""
    from policy.config import from_mapping
    from policy.errors import DraftgymError
    from policy.training.overrides import check_added_hydra_keys
    from policy.training.tuning_config import TuningConfig

    resolved = OmegaConf.to_container(settings, resolve=True)
    logging.getLogger().setLevel(logging.WARNING)
    try:
        check_added_hydra_keys(HydraConfig.get().overrides.hydra)
        config = from_mapping(TuningConfig, resolved, where="")
        from policy.training.tuning import tune  # seconds, so after the check
        from policy.training.tuning_report import prepare_files, write_tuning

        prepare_files(config)
        print(write_tuning(config, tune(config)))
    except DraftgymError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    from policy.training.overrides import one_sentence_errors

    with one_sentence_errors():
        main()
