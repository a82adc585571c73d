"""Build the optimizer of optim.name: check its requirements, import its code, sort the parameters into groups."""

import importlib
import itertools

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sftkit.config.commands import install
from sftkit.config.schema import OptimConfig
from sftkit.config.tables import FALLBACK, OPTIMIZERS
from sftkit.errors import ConfigError
from sftkit.models.structure import decoder_blocks, is_table, stages_of
from sftkit.models.trained import TOKEN_ADAPTER, adapters_of
from sftkit.optim.protocol import Build, Groups, Optimizer


def build_optimizer(model: PreTrainedModel, optim: OptimConfig, seed: int = 0) -> Optimizer:
    """Build the recipe's optimizer, with weight decay on matrices but not on norms, biases and embeddings.

    Args:
        model: model in fp32 or bf16; with bf16 the optimizer keeps the updates that the weights would lose.
        seed: seed of stochastic rounding, the same on every rank.

    Raises:
        ConfigError: the optimizer does not fit the model's precision or sharding, needs decoder blocks that
            transformers does not name, or its package is missing.
    """
    assert optim.name != "auto"
    spec = OPTIMIZERS[optim.name]
    groups = parameter_groups(model, optim)
    if spec.unshardable and any(isinstance(p, DTensor) for p in model.parameters()):
        raise ConfigError(
            f"optim.name={spec.name} {spec.unshardable}: use optim.name={FALLBACK} with sharded weights, or "
            "accelerate_configs/ddp.yaml"
        )
    stages = stages_of(model)
    if spec.unshardable and stages is not None and stages.share_a_weight:
        raise ConfigError(
            f"optim.name={spec.name}: its random numbers differ between the first and the last stage of a pipeline, "
            f"which both hold the tied weight of embedding and head: use optim.name={FALLBACK}"
        )
    module, _, function = spec.code.partition(":")
    try:
        build: Build = getattr(importlib.import_module(module), function)
    except ImportError as error:
        if spec.extra is None:
            raise
        raise ConfigError(
            f"optim.name={spec.name} needs {spec.extra.package} ({error}): {install(f'sftkit[{spec.extra.name}]')}, "
            f"or optim.name={FALLBACK}"
        ) from error
    return build(groups, optim, seed=seed)


def parameter_groups(model: PreTrainedModel, optim: OptimConfig) -> Groups:
    """Sort trained parameters by weight decay and, for optimizers such as Muon, by whether they are matrices of
    a block.

    Returns:
        groups with the `params` that this process holds and their `numbers` among all of the model. The numbers
        determine the random bits: two processes of a pipeline hold a tied weight and must round it alike.

    Raises:
        ConfigError: the optimizer needs block matrices, and no block that transformers names has one.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    embeddings |= {id(p) for name, p in model.named_parameters() if is_table(p) or TOKEN_ADAPTER in name}
    trained = [p for p in model.parameters() if p.requires_grad]
    # Embeddings are matrices too, but their rows are looked up: decay would shrink the rows of rare tokens.
    matrices = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    others = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
    groups: Groups = [{"params": matrices, "weight_decay": optim.weight_decay}]
    # Optimizers for matrices only, such as Muon: all other parameters are updated as by AdamW.
    if (elsewhere := OPTIMIZERS[optim.name].elsewhere) is not None:
        inside = {id(p) for block in decoder_blocks(model) for p in block.parameters() if p.ndim == 2}
        in_blocks = [p for p in matrices if id(p) in inside]
        if not in_blocks:
            raise ConfigError(
                f"optim.name={optim.name}: {type(model).__name__} has no trained matrix in a decoder block "
                f"(_no_split_modules, train.freeze); use optim.name={elsewhere}"
            )
        outside = [p for p in matrices if id(p) not in inside]
        groups = [
            {"params": in_blocks, "weight_decay": optim.weight_decay, "block_matrices": True},
            {"params": outside, "weight_decay": optim.weight_decay, "block_matrices": False},
        ]
    groups.append({**groups[-1], "params": others, "weight_decay": 0.0})
    adapters = adapters_of(model)
    if adapters is not None and adapters.config.lr_ratio_b != 1.0:
        second = {id(p) for name, p in model.named_parameters() if ".lora_B." in name}
        in_b = {**groups[0], "params": [p for p in matrices if id(p) in second]}
        groups[0]["params"] = [p for p in matrices if id(p) not in second]
        groups.append({**in_b, "lr_scale": adapters.config.lr_ratio_b})
    if adapters is not None and adapters.members:
        from sftkit.models.many_adapters import member_factors

        owner = {id(p): k for k in range(len(adapters.members)) for p in member_factors(model, k).values()}
        groups = [
            {**group, "params": [p for p in group["params"] if owner[id(p)] == k], "member": k}
            for k in range(len(adapters.members))
            for group in groups
        ]
    number = itertools.count()
    for group in groups:
        held = [(p, n) for p, n in zip(group["params"], number, strict=False) if not p.is_meta]
        group |= {"params": [p for p, _ in held], "numbers": [n for _, n in held]}
    return [group for group in groups if group["params"]]
