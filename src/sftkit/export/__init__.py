"""A run's model in the form in which others load it."""

import re
from pathlib import Path

from sftkit.config.schema import ModelConfig
from sftkit.errors import ConfigError
from sftkit.models.files import adapter_at


def check_export(
    path: str,
    out: Path | None,
    *,
    merge: bool,
    dtype: str | None,
    max_shard: str,
    push: str | None = None,
    private: bool = False,
    yes: bool = False,
) -> None:
    """Reject options of an export that do not go with the model or each other, before torch is loaded.

    Raises:
        ConfigError: the folder is there already, or an option has no effect.
    """
    if push is None and (private or yes):
        raise ConfigError(f"--{'private' if private else 'yes'}: nothing is pushed without --push ORG/NAME")
    if out is None:
        if push is None or merge or dtype is not None:
            raise ConfigError("--out DIR is missing: the new folder. --push alone publishes a folder as it is")
        return
    if out.exists():
        published = f", or publish it as it is: {out} --push {push}" if push else ""
        raise ConfigError(f"--out {out}: it is there already: name another folder, or move it away{published}")
    if not re.fullmatch(r"\d+(\.\d+)?[KMGT]B", max_shard):
        raise ConfigError(f"--max-shard {max_shard}: a number and KB, MB, GB or TB, such as 5GB")
    is_adapter = adapter_at(ModelConfig(path=path)) is not None
    if merge and not is_adapter:
        raise ConfigError(f"--merge: {path} is a whole model, so there is nothing to merge: leave --merge out")
    if is_adapter and not merge and dtype is not None:
        raise ConfigError(f"--dtype {dtype}: an adapter alone is copied as it is: add --merge, or leave --dtype out")
