"""What each drafter is worth on recorded requests: `python scripts/measure_drafters.py`."""

import logging
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

OmegaConf.register_new_resolver("repository", lambda: str(REPOSITORY))


@hydra.main(
    config_path=str(REPOSITORY / "conf"), config_name="measure_drafters", version_base="1.3"
)
def main(settings: DictConfig) -> None:
    """Hydra's settings -> validated dataclass -> library call."""
    from policy.config import from_mapping
    from policy.errors import DraftgymError
    from policy.training.drafter_measures import DrafterMeasuresConfig, measure_drafters
    from policy.training.drafter_report import prepare_folder, write_drafter_report
    from policy.training.overrides import check_added_hydra_keys

    resolved = OmegaConf.to_container(settings, resolve=True)
    logging.getLogger().setLevel(logging.WARNING)
    try:
        check_added_hydra_keys(HydraConfig.get().overrides.hydra)
        config = from_mapping(DrafterMeasuresConfig, resolved, where="")
        prepare_folder(config)
        print(write_drafter_report(config, measure_drafters(config)))
    except DraftgymError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    from policy.training.overrides import one_sentence_errors

    with one_sentence_errors():
        main()
