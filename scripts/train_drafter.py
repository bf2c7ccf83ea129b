"""Make an EAGLE-3 head from nothing: `python scripts/train_drafter.py out=FOLDER`."""

import logging
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

OmegaConf.register_new_resolver("repository", lambda: str(REPOSITORY))


@hydra.main(config_path=str(REPOSITORY / "conf"), config_name="train_drafter", version_base="1.3")
def main(settings: DictConfig) -> None:
    """Hydra's settings -> validated dataclass -> library call."""
    from policy.config import from_mapping
    from policy.errors import DraftgymError
    from policy.training.drafter.config import DrafterConfig
    from policy.training.drafter.run import train_drafter
    from policy.training.overrides import check_added_hydra_keys

    resolved = OmegaConf.to_container(settings, resolve=True)
    logging.getLogger().setLevel(logging.WARNING)
    try:
        check_added_hydra_keys(HydraConfig.get().overrides.hydra)
        head = train_drafter(from_mapping(DrafterConfig, resolved, where=""), resolved)
    except DraftgymError as error:
        sys.exit(f"error: {error}")
    print((head / "acceptance.md").read_text(encoding="utf-8"))
    print(f"Head: {head}")


if __name__ == "__main__":
    from policy.training.overrides import one_sentence_errors

    with one_sentence_errors():
        main()
