"""The memory plan of a run: sizes of the model, optimizer, recomputation, sharding. What would make it fit if it does
not is in remedies.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec

import torch
from transformers import PretrainedConfig, PreTrainedModel

from sftkit.config.schema import CompileConfig, Config, DataConfig, OptimConfig, TrainConfig, has_cuda_graphs
from sftkit.config.tables import DEFAULT, FALLBACK, OPTIMIZERS, OptimizerSpec
from sftkit.config.topology import Sharding
from sftkit.data.batches.pack import Layout
from sftkit.errors import config_error
from sftkit.memory.estimate import (
    BUDGETS,
    GIB,
    SHARDINGS,
    USABLE,
    Estimate,
    EstimateInputs,
    Shape,
    earlier_gradient_width,
    estimate,
    gib,
    held_bytes,
)
from sftkit.models import hybrids, kind, structure
from sftkit.models.trained import adapters_of, factors, logical_elements
from sftkit.ops.tensors import local
from sftkit.optim.protocol import Optimizer
from sftkit.parallel.tensor import check_tensor_parallel
from sftkit.runtime.start import Runtime


def automatic_optimizer(preset: str, precision: str, *, too_much: bool, partial: bool) -> str:
    """Return the optimizer that optim.name=auto means. `too_much`: the default would not fit; `partial`: a process
    holds a part of the weights.
    """
    if precision != "bf16":
        return DEFAULT
    if preset == "low":
        # The smallest that can be built here: a run must not fail for a package that the user never named.
        usable = [spec for spec in smaller_optimizers(partial=partial) if is_installed(spec)]
        return min(usable, key=lambda spec: spec.state_width(precision)).name
    return FALLBACK if too_much else DEFAULT


def smaller_optimizers(*, partial: bool) -> list[OptimizerSpec]:
    """Return the optimizers that do the same as the default in less memory."""
    # An optimizer that cannot be sharded cannot handle a tied weight on two pipeline stages either.
    return [spec for spec in OPTIMIZERS.values() if spec.saves_memory and not (partial and spec.unshardable)]


def is_installed(spec: OptimizerSpec) -> bool:
    """Return whether the package of an optimizer is installed."""
    return spec.extra is None or find_spec(spec.extra.package) is not None


@contextmanager
def oom_advice(
    plan: MemoryPlan, layout: Layout, data: DataConfig, compile: CompileConfig, optim: OptimConfig
) -> Iterator[None]:
    """Turn running out of GPU memory within the context into a ConfigError that names the three settings that
    save most.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        from sftkit.memory.remedies import explain_oom, remedies

        best = remedies(plan, layout, data, compile, optim)[:3]
        raise explain_oom(error, plan, best, optim) from error


def shape_of(orig_model: PreTrainedModel) -> Shape | None:
    """Return the sizes in the model's config; for a model with an encoder, those of the decoder.

    None if the config lacks a size or has several values for it.
    """
    return _shape(orig_model, orig_model.config.get_text_config(), structure.decoder(orig_model))


def encoder_shape_of(orig_model: PreTrainedModel) -> Shape | None:
    """Return the sizes of the model's encoder; None if it has none, or its config lacks a size."""
    inner = structure.encoder(orig_model)
    return _shape(orig_model, inner.config, inner) if isinstance(inner, PreTrainedModel) else None


def _shape(orig_model: PreTrainedModel, config: PretrainedConfig, part: torch.nn.Module) -> Shape | None:
    """Return the sizes in a config; None if it lacks a size or has several values for it.

    Args:
        part: the decoder or the encoder of the config.
    """

    def size(*names: str, default: int | None = None) -> int | None:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), default)

    hidden, heads, blocks = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    if not (isinstance(hidden, int) and isinstance(heads, int) and isinstance(blocks, int)):
        return None
    head_dim = size("qk_head_dim", "head_dim", default=hidden // max(heads, 1))
    key_heads = size("num_key_value_heads", default=heads)
    # GPT-2 calls ffn_dim n_inner, and null means four times the hidden size; OPT calls it ffn_dim.
    inner = size("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    # A token visits only some experts: their widths add up for its activations, while the parameters include
    # all experts.
    if isinstance(experts := size("num_experts_per_tok"), int):
        inner = size("moe_intermediate_size", default=inner)
        names = ("shared_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
        inner = inner * experts + (size(*names) or 0) if isinstance(inner, int) else None
    if config.model_type == "lfm2":  # its width follows from that of the config
        inner = structure.decoder_blocks(orig_model)[0].feed_forward.w1.out_features  # type: ignore[union-attr, assignment]
    # A list with one size for each layer is not a size that the estimate can use.
    if not (isinstance(head_dim, int) and isinstance(key_heads, int) and isinstance(inner, int)):
        return None
    # The mean of all blocks. The estimate counts three elements for each; a recurrent layer says what it keeps.
    query, key = heads * head_dim, key_heads * head_dim
    if kept := [mixer.kept(layer) for _, layer, mixer in hybrids.mixers(part)]:
        share = sum((structure.attention_windows(orig_model) or {}).values()) / blocks
        query, key = round(share * query + sum(kept) / 3 / blocks), round(share * key)
        # Nemotron-H's feed-forward layers are blocks of their own.
        alone = sum(kind in ("mlp", "moe") for kind in config.layer_types)
        inner = round(inner * alone / blocks) if alone else inner
    parameters = sum(logical_elements(p) for p in orig_model.parameters())
    in_blocks = [p for b in structure.decoder_blocks(orig_model) for p in b.parameters()]
    frozen = sum(logical_elements(p) for p in orig_model.parameters() if not p.requires_grad)
    of_blocks = {id(p) for p in in_blocks}
    own = [
        inputs for p, inputs, module in structure.backward_parts(orig_model) if module is part and id(p[0]) in of_blocks
    ]
    return Shape(
        parameters=parameters,
        ends=parameters - sum(logical_elements(p) for p in in_blocks),
        matrices=sum(logical_elements(p) for p in in_blocks if p.ndim == 2),
        blocks=blocks,
        hidden=hidden,
        query=query,
        key=key,
        inner=inner,
        head_dim=head_dim,
        vocab=structure.vocab_size(orig_model),
        frozen=frozen,
        frozen_ends=frozen - sum(logical_elements(p) for p in in_blocks if not p.requires_grad),
        frozen_matrices=sum(logical_elements(p) for p in in_blocks if p.ndim == 2 and not p.requires_grad),
        nf4=sum(logical_elements(p) for p in in_blocks if not p.is_floating_point()),
        frozen_head=not structure.output_projection(orig_model).weight.requires_grad,
        forward_blocks=sum(not inputs for inputs in own),
    )


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryPlan:
    """The decisions about a run's memory, made before anything is compiled."""

    optim: OptimConfig
    "with the name of an optimizer, never auto"
    activation_memory_budget: float
    "share of each graph's activations that is kept, 0 to 1"
    setup: EstimateInputs | None
    "None: the model's config lacks sizes, so nothing is estimated"
    estimate: Estimate | None
    total_bytes: int | None
    "memory of the device; None: unknown, or not a GPU"
    sharding: Sharding
    "how sharded ranks gather weights and exchange gradients"
    earlier_gradient_bytes: int
    "gradients of earlier micro-batches, or their sums, held in memory during a forward pass"
    line: str
    "lines of the plan for the console"


def make_plan(
    cfg: Config,
    orig_model: PreTrainedModel,
    layout: Layout,
    rt: Runtime,
    *,
    total_bytes: int | None = None,
    backend: str | None = None,
    sharding: Sharding | None = None,
) -> MemoryPlan:
    """Turn train.memory and optim.name into an optimizer and a budget, and print the plan; eager runs get
    gradient checkpointing.

    Args:
        orig_model: model before compilation and wrapping; the plan may switch its gradient checkpointing on.
        total_bytes: memory of the device; None: that of rt.device, unknown if it is not a GPU.
        backend: attention backend; reference holds a dense mask.
        sharding: how sharded ranks exchange if the engine decides it; None: the fastest way that fits.

    Raises:
        ConfigError: an eager run must save memory but the model has no gradient checkpointing; the model cannot
            be split over tensor-parallel ranks or into stages; or weights, gradients and optimizer states alone
            exceed a GPU.
    """
    if rt.topology.tensor > 1 and cfg.train.engine != "graph":  # the graph engine splits matrices differently
        check_tensor_parallel(orig_model, rt.topology.tensor)
    if total_bytes is None and rt.device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(rt.device).total_memory
    checkpointing = _checkpoints(cfg.compile, cfg.train, orig_model)
    setup = _inputs(cfg, orig_model, layout, rt, checkpointing=checkpointing)
    name = DEFAULT if cfg.optim.name == "auto" else cfg.optim.name
    if setup is not None:
        setup = replace(setup, dense_mask=backend == "reference")
        setup = replace(setup, sharding=sharding or _fastest_sharding(setup, total_bytes, rt))
    # The optimizer behind auto may depend on whether the default fits, and the sharding depends on the optimizer.
    if cfg.optim.name == "auto":
        # Ranks agree, so that all or none change the optimizer: their GPUs may differ in size, but they share
        # one checkpoint.
        too_much = setup is not None and rt.any_rank(not fits(estimate(setup), total_bytes))
        name = automatic_optimizer(cfg.train.memory, rt.precision, too_much=too_much, partial=rt.topology.partial)
        if cfg.adapter is not None:  # the factors are fp32 whatever the model is
            name = DEFAULT
        if setup is not None and name != setup.optimizer:
            setup = replace(setup, optimizer=name)
            setup = replace(setup, sharding=sharding or _fastest_sharding(setup, total_bytes, rt))
    # Reject what cannot fit, print the plan, warn about what may not fit.
    if setup is not None:
        _check_room(setup, cfg, total_bytes)
    found = None if setup is None else estimate(setup)
    trained = 0 if rt.topology.partial else sum(p.numel() for p in orig_model.parameters() if p.requires_grad)
    # Shards and stages count 0: their warm-up makes such gradients itself.
    earlier = trained * earlier_gradient_width(layout, rt.precision)
    budget = _budget(cfg.compile, cfg.train)
    kept = f"{budget:g} of the activations kept" if budget < 1.0 else "activations kept"
    how = "gradient checkpointing" if checkpointing else kept
    line = _line(f"memory: {cfg.train.memory}, optimizer {name}, {how}", found, total_bytes)
    rt.print(line)
    plan = MemoryPlan(
        optim=replace(cfg.optim, name=name),
        activation_memory_budget=budget,
        setup=setup,
        estimate=found,
        total_bytes=total_bytes,
        sharding=(sharding or Sharding()) if setup is None else setup.sharding,
        earlier_gradient_bytes=earlier,
        line=line,
    )
    if found is not None and not fits(found, total_bytes):
        # Only a warning: weights and states alone do fit (_check_room), and the rest of the estimate may be off by
        # some percent.
        from sftkit.memory.remedies import fitting_advice

        assert setup is not None
        words = fitting_advice(setup, total_bytes, cfg.data, cfg.compile, cfg.optim)
        warning = "this run is estimated at %s of the device's %s and may run out of memory. %s"
        log.warning(warning, gib(found.total), gib(total_bytes or 0), words)
    return plan


def _checkpoints(compile: CompileConfig, train: TrainConfig, orig_model: PreTrainedModel) -> bool:
    """Return whether transformers' gradient checkpointing is on; it is switched on to save memory if no partitioner
    of compiled graphs recomputes.
    """
    if _recomputes(compile) or train.memory == "speed":
        return False
    if not orig_model.supports_gradient_checkpointing:
        raise config_error("no gradient checkpointing", memory=train.memory, cls=type(orig_model).__name__)
    # torch advises against the reentrant kind. It also needs an input with a gradient, which frozen embeddings
    # do not provide.
    orig_model.gradient_checkpointing_enable({"use_reentrant": False})
    return True


def _inputs(
    cfg: Config, orig_model: PreTrainedModel, layout: Layout, rt: Runtime, *, checkpointing: bool
) -> EstimateInputs | None:
    """Return the inputs of the estimate, except attention's mask and the sharding, with the default optimizer for
    auto; None if the model's config lacks sizes.
    """
    shape = shape_of(orig_model)
    if shape is None:
        return None
    setup = EstimateInputs(
        shape=shape,
        layout=layout,
        optimizer=DEFAULT if cfg.optim.name == "auto" else cfg.optim.name,
        precision=rt.precision,
        chunk_tokens=cfg.loss.chunk_tokens,
        budget=_budget(cfg.compile, cfg.train),
        compiled=_recomputes(cfg.compile),
        cuda_graphs=cfg.compile.enabled and cfg.train.engine != "graph" and has_cuda_graphs(cfg.compile),
        checkpointing=checkpointing,
        topology=rt.topology,
        adapters=cfg.adapter is not None,
        encoder=encoder_shape_of(orig_model),
        encoded_length=kind.kind_of(orig_model.config).encoder_positions(orig_model, layout.max_length),
    )
    if rt.topology.stages == 1:
        return setup
    from sftkit.parallel.pipeline import layers_of_stages

    layers = layers_of_stages(orig_model, cfg.train, rt.topology.stages)
    return replace(setup, stage_layers=layers, schedule=cfg.train.pipeline_schedule)


def _budget(compile: CompileConfig, train: TrainConfig) -> float:
    """Return the share of activations that the partitioner keeps: the recipe's, otherwise that of train.memory; 1.0 if
    it does not choose."""
    explicit = compile.activation_memory_budget
    return 1.0 if not _recomputes(compile) else BUDGETS[train.memory] if explicit is None else explicit


def _check_room(s: EstimateInputs, cfg: Config, total_bytes: int | None) -> None:
    """Reject a model that does not fit even with the smallest rows."""
    held = held_bytes(s)
    if total_bytes is None or held <= total_bytes:
        return
    from sftkit.memory.remedies import fitting_advice

    # Replicas hold the same state: only the other processes divide it.
    shards = s.topology.world_size // s.topology.replicas if s.topology.partial else 1
    ways = [fitting_advice(s, total_bytes, cfg.data, cfg.compile, cfg.optim)]
    # One process's bytes times the number of shards give the whole model; rounded up to whole GPUs.
    if not s.shape.nf4:
        least = -(-held * shards // total_bytes)
        ways.append(f"accelerate_configs/fsdp2.yaml on {least} such GPUs or more holds them too")
    words = {"optimizer": s.optimizer, "billions": s.shape.parameters / 1e9, "held": gib(held)}
    raise config_error("states larger than a GPU", total=gib(total_bytes), ways=". ".join(ways), **words)


def _fastest_sharding(s: EstimateInputs, total_bytes: int | None, rt: Runtime) -> Sharding:
    """Return the first of SHARDINGS that is estimated to fit on every rank, otherwise the one with the least memory."""
    if not s.topology.sharded:
        return s.sharding
    # Every rank gets the same answer from any_rank, so all leave this loop at the same place.
    for sharding in SHARDINGS[:-1]:
        if not rt.any_rank(not fits(estimate(replace(s, sharding=sharding)), total_bytes)):
            return sharding
    return SHARDINGS[-1]


def _recomputes(compile: CompileConfig) -> bool:
    """Return whether the compiler's partitioner chooses which activations of the blocks to recompute."""
    return compile.enabled and compile.backend in ("inductor", "aot_eager")


def fits(estimate: Estimate, total_bytes: int | None) -> bool:
    """Return whether the device has room; True if its size is unknown."""
    return total_bytes is None or estimate.total <= USABLE * total_bytes


def _line(line: str, estimate: Estimate | None, total_bytes: int | None) -> str:
    """Return the plan as a line for the console: its decisions and the estimated peak."""
    if estimate is None:
        return f"{line}; peak unknown: the model's config lacks sizes"
    if total_bytes is None:
        return line
    # 0.05 GiB is printed as 0.1.
    large = {name: size for name, size in asdict(estimate).items() if size >= 0.05 * GIB}
    parts = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f}" for name, size in large.items())
    return f"{line}; estimated peak {gib(estimate.total)} of {gib(total_bytes)} ({parts})"


def against_measured(plan: MemoryPlan, measured_gib: float) -> str:
    """Return a line that compares the estimated with the measured peak of tensors in the warm-up, which holds
    everything that a step holds.
    """
    if plan.estimate is None:
        return f"memory: peak {measured_gib:.1f} GiB measured in the warm-up"
    # Without the CUDA context: the allocator, which measures, does not count it.
    estimated = plan.estimate.tensors / GIB
    off = f", {estimated / measured_gib - 1:+.0%}" if measured_gib else ""
    return f"memory: peak {measured_gib:.1f} GiB measured in the warm-up, {estimated:.1f} GiB estimated{off}"


@contextmanager
def reserve_optimizer_state(optimizer: Optimizer, plan: MemoryPlan, device: torch.device) -> Iterator[None]:
    """Within the context, reserve GPU memory that a step needs and the warm-up does not, so that a run that cannot
    fit fails in the warm-up.

    The memory stands in for optimizer states of the first update, and for gradients of earlier micro-batches.
    """
    held = None
    if device.type == "cuda":
        missing = missing_state_bytes(optimizer, plan.optim.name) + plan.earlier_gradient_bytes
        # One block instead of many: it takes the same room, and USABLE leaves some for fragmentation.
        held = torch.empty(missing, dtype=torch.uint8, device=device)
    try:
        yield
    finally:
        del held


def missing_state_bytes(optimizer: Optimizer, name: str) -> int:
    """Return the bytes of the states of all parameters that have none yet."""
    missing, spec = 0.0, OPTIMIZERS[name]
    for group in optimizer.param_groups:
        for p in group["params"]:
            # Uses get: torch's state is a defaultdict, so an index would create an entry for the parameter.
            if p.requires_grad and not optimizer.state.get(p):
                width = spec.state_width(_precision_of(p), block_matrix=group.get("block_matrices", True))
                missing += local(p).numel() * width
    return int(missing)


def _precision_of(param: torch.Tensor) -> str:
    """Return "bf16" or "fp32" from the dtype of a parameter."""
    return "bf16" if param.dtype == torch.bfloat16 else "fp32"


def checkpoint_bytes(orig_model: PreTrainedModel, plan: MemoryPlan) -> float:
    """Return the bytes of one checkpoint: all weights, and optimizer states of those that are trained, of all ranks; of
    adapters these alone."""
    spec = OPTIMIZERS[plan.optim.name]
    saved = orig_model.parameters() if adapters_of(orig_model) is None else factors(orig_model).values()
    # numel of a DTensor counts the whole tensor, not this rank's shard.
    return sum(
        p.numel() * (p.element_size() + (spec.state_width(_precision_of(p)) if p.requires_grad else 0)) for p in saved
    )
