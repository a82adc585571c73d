"""Checkpoints: a step directory that loads in plain transformers, written elsewhere, verified by a manifest, renamed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config import CheckpointConfig
from sftkit.errors import ConfigError
from sftkit.model import LATEST, STATE
from sftkit.runtime import Runtime

log = logging.getLogger(__name__)
STEP_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoints:
    """Saves and restores everything a run needs to go on exactly."""

    run_dir: Path
    config: CheckpointConfig
    rt: Runtime
    orig_model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    recipe: str
    "the resolved recipe as YAML"

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write step-NNNNNN/, replace LATEST, prune. Every rank calls it; a published directory is never rewritten."""
        final = self.run_dir / f"step-{step:06d}"
        temporary = self.run_dir / f".step-{step:06d}.tmp"
        if self.rt.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / STATE).mkdir(parents=True)
        self.rt.barrier()
        torch.save(random_state(), temporary / STATE / f"rng-rank{self.rt.rank:03d}.pt")
        self.rt.barrier()
        if self.rt.is_main:
            self._write_shared(temporary, step, state)
            publish(temporary, final)
            replace_text(self.run_dir / LATEST, final.name + "\n")
            prune(self.run_dir, self.config.keep)
        self.rt.barrier()
        return final

    def _write_shared(self, folder: Path, step: int, state: dict[str, Any]) -> None:
        self.orig_model.generation_config.pad_token_id = self.tokenizer.pad_token_id
        self.orig_model.save_pretrained(folder, max_shard_size="5GB")
        self.tokenizer.save_pretrained(folder)
        make_tokenizer_portable(folder / "tokenizer_config.json")
        torch.save(self.optimizer.state_dict(), folder / STATE / "optimizer.pt")
        (folder / "recipe.yaml").write_text(self.recipe)
        kept = {"step": step, "optimizer": optimizer_kind(self.optimizer), **state}
        (folder / STATE / "state.json").write_text(json.dumps(kept, indent=1))
        write_manifest(folder, step)

    def resume(self, setting: str | None) -> dict[str, Any]:
        """Restore weights, optimizer and this rank's random state.

        Args:
            setting: null starts anew; "auto" takes the newest directory whose manifest verifies; else a directory.

        Returns:
            the state given to `save`, with "step"; {"step": 0} for a new start.

        Raises:
            ConfigError: the named directory does not verify.
        """
        folder = self.find(setting)
        if folder is None:
            return {"step": 0}
        state = json.loads((folder / STATE / "state.json").read_text())
        here = optimizer_kind(self.optimizer)
        if state.get("optimizer", here) != here:
            raise ConfigError(
                f"train.resume={setting}: {folder} was written with the optimizer {state['optimizer']}, and this run has "
                f"{here}: resume with its optim.name and train.precision, or start from its weights with model.path"
            )
        load_weights(self.orig_model, folder)
        optimizer = torch.load(folder / STATE / "optimizer.pt", map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(optimizer)
        random_file = folder / STATE / f"rng-rank{self.rt.rank:03d}.pt"
        if random_file.exists():
            restore_random_state(torch.load(random_file, map_location="cpu", weights_only=True))
        else:
            log.warning("%s has no random state for rank %d (another world size)", folder, self.rt.rank)
        self.rt.say(f"resumed {folder}: step {state['step']}, {state.get('tokens', 0):,} tokens seen")
        self._set_later_steps_aside(state["step"])
        return state

    def _set_later_steps_aside(self, step: int) -> None:
        """Checkpoints of the stretch that this run does again: out of the way of pruning and of the next resume."""
        if self.rt.is_main:
            for folder in step_dirs(self.run_dir):
                if step_number(folder) > step:
                    log.warning("%s is past the resumed step: it is now %s", folder, set_aside(folder))
            if (self.run_dir / f"step-{step:06d}").is_dir():
                replace_text(self.run_dir / LATEST, f"step-{step:06d}\n")
        self.rt.barrier()

    def find(self, setting: str | None) -> Path | None:
        """The checkpoint that `setting` means, None for a new start."""
        if setting is None:
            return None
        if setting != "auto":
            folder = Path(setting)
            problem = verify(folder)
            if problem:
                raise ConfigError(f"train.resume={setting}: {problem}")
            return folder
        for folder in reversed(step_dirs(self.run_dir)):
            problem = verify(folder)
            if problem is None:
                return folder
            log.warning("checkpoint passed over: %s", problem)
        return None


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer and the dtype of its parameters: what decides which states it keeps."""
    dtypes = {str(p.dtype).removeprefix("torch.") for group in optimizer.param_groups for p in group["params"]}
    stochastic = " stochastic" if getattr(optimizer, "stochastic", False) else ""
    return f"{type(optimizer).__name__}{stochastic} {'+'.join(sorted(dtypes))}"


def make_tokenizer_portable(config_file: Path) -> None:
    """transformers 5 writes a class and a field that version 4, and servers built on it, refuse; both read these."""
    config = json.loads(config_file.read_text())
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config["additional_special_tokens"] = config.pop("extra_special_tokens", [])
        for name in ("backend", "is_local", "local_files_only"):
            config.pop(name, None)
        config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False))


def step_dirs(run_dir: Path) -> list[Path]:
    """Published step directories, oldest first."""
    found = [path for path in run_dir.glob("step-*") if STEP_NAME.fullmatch(path.name)]
    return sorted(found, key=step_number)


def step_number(folder: Path) -> int:
    return int(folder.name.split("-")[1])


def load_weights(orig_model: PreTrainedModel, folder: Path) -> None:
    """Weights of a step directory into the live model, bit for bit. Through from_pretrained, which knows every layout
    that save_pretrained writes (shards, tied weights, fused experts)."""
    saved = type(orig_model).from_pretrained(folder, dtype=torch.float32)
    orig_model.load_state_dict(saved.state_dict())


def write_manifest(folder: Path, step: int) -> None:
    """manifest.json: size and sha256 of every other file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in files}
    (folder / "manifest.json").write_text(json.dumps({"step": step, "files": entries}, indent=1))


def verify(folder: Path) -> str | None:
    """What is wrong with a step directory, None if its manifest holds."""
    try:
        files = json.loads((folder / "manifest.json").read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{folder}: no readable manifest.json ({type(error).__name__})"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            return f"{path}: missing or not {entry['bytes']} bytes"
        if sha256(path) != entry["sha256"]:
            return f"{path}: content does not match its sha256"
    return None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(temporary: Path, final: Path) -> None:
    """Flush every file to disk, then rename: readers see a whole directory or none."""
    for path in (*temporary.rglob("*"), temporary):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if final.exists():  # the same step of an earlier, abandoned stretch of this run
        set_aside(final)
    os.rename(temporary, final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def prune(run_dir: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints; renamed first, so that no half-deleted one is ever found."""
    for folder in step_dirs(run_dir)[:-keep]:
        doomed = folder.with_name(f".{folder.name}.del")
        os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Rename to the first free NAME.old-1, NAME.old-2, ...: nothing is overwritten."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    os.rename(folder, aside)
    return aside


def random_state() -> dict[str, Any]:
    """Python's, numpy's and torch's generators, in types that torch.load(weights_only=True) accepts."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
