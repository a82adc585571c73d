"""The model of scripts/evaluate.py, and what its arguments must be before it is loaded."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config import LossConfig, ModelConfig
from sftkit.distribute import distribute
from sftkit.errors import ConfigError
from sftkit.model import load_model
from sftkit.parallel import Sharding
from sftkit.recipe_checks import EVAL_TASKS
from sftkit.runtime import Runtime
from sftkit.step import ModelWithLoss


def check_arguments(args: Namespace) -> None:
    """Refuse numbers below 1, a task in the place of the model, and an --out that is no folder; creates that folder.

    Raises:
        ConfigError: which of them.
    """
    for name in ("max_examples", "batch_size", "max_new_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    if args.path in EVAL_TASKS and not Path(args.path).exists():
        raise ConfigError(
            f"{args.path} is a task: name the model before it, python scripts/evaluate.py PATH {args.path}"
        )
    if args.out is not None:
        try:
            Path(args.out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {args.out}: no folder can be made there: {error.strerror}") from None


def load(source: ModelConfig, tokenizer: PreTrainedTokenizerBase, rt: Runtime) -> PreTrainedModel:
    """The model on its device, its weights cut over the ranks where the launcher's configuration says so."""
    orig_model = load_model(source, tokenizer, 0, rt.precision, rt.topology.sharded)
    if not rt.topology.sharded:
        return orig_model.to(rt.device)  # type: ignore[arg-type]
    distribute(ModelWithLoss(orig_model, "reference", LossConfig()), source, Sharding(), rt)
    return orig_model
