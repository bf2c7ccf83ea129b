"""Import published traces: `python scripts/import_traces.py SRC=/path/to/folder-or-file`."""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))


@hydra.main(config_path=str(REPOSITORY / "conf"), config_name="import_traces", version_base="1.3")
def main(settings: DictConfig) -> None:
    """Hydra's settings -> validated dataclass -> library call."""
    from envs.trace_import import ImportConfig, describe_import, import_published
    from policy.config import from_mapping
    from policy.errors import DraftgymError
    from policy.training.overrides import check_added_hydra_keys

    given = OmegaConf.to_container(settings, resolve=True)
    try:
        check_added_hydra_keys(HydraConfig.get().overrides.hydra)
        given["src"] = given.pop("SRC")
        imported = import_published(from_mapping(ImportConfig, given, where=""))
    except DraftgymError as error:
        sys.exit(f"error: {error}")
    print(describe_import(imported))


if __name__ == "__main__":
    from policy.training.overrides import one_sentence_errors

    with one_sentence_errors():
        main()
