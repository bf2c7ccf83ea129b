"""What speculation brings on your engine and traces: `python scripts/study.py`."""

import logging
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

OmegaConf.register_new_resolver("repository", lambda: str(REPOSITORY))


@hydra.main(config_path=str(REPOSITORY / "conf"), config_name="study", version_base="1.3")
def main(settings: DictConfig) -> None:
    """Hydra's settings -> validated dataclass -> library call."""
    from policy.config import from_mapping
    from policy.errors import DraftgymError
    from policy.training.overrides import check_added_hydra_keys
    from policy.training.study_config import StudyConfig

    resolved = OmegaConf.to_container(settings, resolve=True)
    logging.getLogger().setLevel(logging.WARNING)
    try:
        check_added_hydra_keys(HydraConfig.get().overrides.hydra)
        config = from_mapping(StudyConfig, resolved, where="")
        from policy.training.study import run_study  # seconds, so after the check

        print(run_study(config))
    except DraftgymError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    from policy.training.overrides import one_sentence_errors

    with one_sentence_errors():
        main()
