"""What speculation could bring on traces: `python scripts/headroom.py TRACES=/path/to/traces`."""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

OmegaConf.register_new_resolver("repository", lambda: str(REPOSITORY))


@hydra.main(config_path=str(REPOSITORY / "conf"), config_name="headroom", version_base="1.3")
def main(settings: DictConfig) -> None:
    """Hydra's settings -> validated dataclass -> library call."""
    from envs.headroom import HeadroomConfig, measure_headroom
    from policy.config import from_mapping
    from policy.errors import DraftgymError
    from policy.training.overrides import check_added_hydra_keys

    given = OmegaConf.to_container(settings, resolve=True)
    try:
        check_added_hydra_keys(HydraConfig.get().overrides.hydra)
        given["traces"] = given.pop("TRACES")
        measured = measure_headroom(from_mapping(HeadroomConfig, given, where=""))
    except DraftgymError as error:
        sys.exit(f"error: {error}")
    print("\n\n".join(headroom.describe() for headroom in measured))


if __name__ == "__main__":
    from policy.training.overrides import one_sentence_errors

    with one_sentence_errors():
        main()
