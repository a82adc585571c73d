"""A run's model in the form in which others load it."""

import re
from pathlib import Path

from sftkit.config.schema import ModelConfig
from sftkit.errors import ConfigError
from sftkit.models.files import adapter_at


def check_export(path: str, out: Path, *, merge: bool, dtype: str | None, max_shard: str) -> None:
    """Reject options of an export that do not go with the model, before torch is loaded.

    Raises:
        ConfigError: the folder is there already, or an option has no effect.
    """
    if out.exists():
        raise ConfigError(f"--out {out}: it is there already: name another folder, or move it away")
    if not re.fullmatch(r"\d+(\.\d+)?[KMGT]B", max_shard):
        raise ConfigError(f"--max-shard {max_shard}: a number and KB, MB, GB or TB, such as 5GB")
    is_adapter = adapter_at(ModelConfig(path=path)) is not None
    if merge and not is_adapter:
        raise ConfigError(f"--merge: {path} is a whole model, so there is nothing to merge: leave --merge out")
    if is_adapter and not merge and dtype is not None:
        raise ConfigError(f"--dtype {dtype}: an adapter alone is copied as it is: add --merge, or leave --dtype out")
