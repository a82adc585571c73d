"""The memory plan of a run, and suggestions if it does not fit: sizes of the model, optimizer, recomputation, sharding.

A suggestion is a setting that is not used yet, or an optimizer with smaller states. The error of a GPU that ran out of
memory names those that save most.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from sftkit.config.commands import install
from sftkit.config.schema import CompileConfig, Config, DataConfig, OptimConfig, TrainConfig, has_cuda_graphs
from sftkit.config.tables import DEFAULT, FALLBACK, OPTIMIZERS, OptimizerSpec
from sftkit.config.topology import Sharding, Topology
from sftkit.data.batches.pack import Layout, largest_divisor
from sftkit.errors import ConfigError
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


class Remedy(NamedTuple):
    """A setting that would save memory."""

    text: str
    saved_bytes: int
    "bytes saved by its best value"
    on_resume: tuple[str, ...]
    "values of the setting that a resumed run may use"


Option = tuple[str, EstimateInputs]
"A setting as typed on the command line, and the run with it."


def remedies(
    plan: MemoryPlan, layout: Layout, data: DataConfig, compile: CompileConfig, optim: OptimConfig
) -> list[Remedy]:
    """Return the unused settings that would lower the estimated peak, largest saving first.

    A suggestion may have several values of a setting; the one that saves most counts.
    """
    if plan.setup is None or plan.estimate is None:
        return []
    s, ways = replace(plan.setup, layout=layout), []
    # A quarter of the loss's chunk; the schedule that keeps activations of as many micro-batches as stages.
    quarter = max(s.chunk_tokens // 4, 64)
    chunk = [(f"loss.chunk_tokens={quarter}", replace(s, chunk_tokens=quarter))] * (quarter < s.chunk_tokens)
    fewer = s.schedule == "gpipe" and s.layout.accumulation >= s.topology.stages > 1
    schedule = [("train.pipeline_schedule=1f1b", replace(s, schedule="1f1b"))] * fewer
    tried = (_smaller_batch(s, data), _recompute(s, compile, optim), smaller_states(s), chunk, _more_shards(s))
    for options in (*tried, schedule):
        saved = [(text, plan.estimate.total - estimate(after).total, after) for text, after in options]
        # A saving below the last printed digit (0.1 GiB after rounding) is not worth suggesting.
        saved = [one for one in saved if one[1] >= 0.05 * GIB]
        if saved:
            more = "".join(f", {text} {gib(n)}" for text, n, _ in saved[1:])
            resumable = tuple(text for text, _, after in saved if _resumed_parts(after) == _resumed_parts(s))
            most = max(n for _, n, _ in saved)
            ways.append(Remedy(f"{saved[0][0]} saves {gib(saved[0][1])}{more}", most, resumable))
    return sorted(ways, key=lambda remedy: -remedy.saved_bytes)


def _resumed_parts(s: EstimateInputs) -> tuple[object, ...]:
    """Return what a checkpoint fits to: optimizer states and rows."""
    return s.optimizer, s.precision, s.layout.row_lengths, s.layout.max_length, s.shape.nf4


def _smaller_batch(s: EstimateInputs, data: DataConfig) -> list[Option]:
    """Return half of the rows of a micro-batch; if it has one row, half of the row."""
    layout = s.layout
    share, half = layout.global_batch_size // layout.world_size, layout.micro_batch_size // 2
    # The global batch does not change, so the new number of rows must divide this process's share of it.
    if half:
        rows, budget_rows = largest_divisor(share, half), largest_divisor(layout.global_batch_size, half)
        smaller = replace(layout, micro_batch_size=rows, budget_rows=budget_rows)
        return [(f"train.micro_batch_size={rows}", replace(s, layout=smaller))]
    halved = layout.row_lengths[-1] // 2
    lengths = tuple(sorted({min(length, halved) for length in layout.row_lengths}))
    # A packed row must hold at least the longest document, so that no document is cut.
    if layout.kind == "packed" and halved >= layout.max_length:
        return [(f"data.row_length={halved}", replace(s, layout=replace(layout, row_lengths=lengths)))]
    # A row length in the recipe would override the shorter rows.
    also = "" if layout.kind != "packed" or data.row_length is None else f" data.row_length={halved}"
    shorter = replace(layout, row_lengths=lengths, max_length=halved, max_doc_length=min(layout.max_doc_length, halved))
    return [(f"data.max_length={halved}{also}", replace(s, layout=shorter))]


def _recompute(s: EstimateInputs, compile: CompileConfig, optim: OptimConfig) -> list[Option]:
    """Return the values of train.memory below the run's, or lower budgets if the recipe sets one."""
    if s.checkpointing:
        return []
    # Eager runs have one more step, transformers' gradient checkpointing, the same for every preset.
    if not s.compiled:
        return [("train.memory=balanced", replace(s, checkpointing=True))]
    # A budget in the recipe overrides train.memory, which would then change nothing.
    if compile.activation_memory_budget is not None:
        lower = [b for b in BUDGETS.values() if b < s.budget]
        return [(f"compile.activation_memory_budget={b}", replace(s, budget=b)) for b in lower]
    options = {preset: replace(s, budget=budget) for preset, budget in BUDGETS.items() if budget < s.budget}
    # The preset low also changes the meaning of auto: its estimate includes both.
    if optim.name == "auto" and "low" in options and not s.adapters:
        name = automatic_optimizer("low", s.precision, too_much=False, partial=s.topology.partial)
        options["low"] = replace(options["low"], optimizer=name)
    return [(f"train.memory={preset}", after) for preset, after in options.items()]


def smaller_states(s: EstimateInputs) -> list[Option]:
    """Return the optimizers for bf16 weights with smaller states; for fp32 weights bf16 ones; under adapters, whose
    states are small, frozen weights in NF4.
    """
    # The smaller optimizers are made for bf16 weights, so the weights come first.
    if s.precision != "bf16":
        return [("train.precision=bf16", replace(s, precision="bf16"))]
    m = s.shape
    if s.adapters:
        dense = 10 * m.frozen_matrices > 9 * (m.frozen - m.frozen_ends)  # unlike a mixture of experts
        possible = dense and not (m.nf4 or s.topology.partial or s.layout.shares)
        return [("adapter.base=nf4", replace(s, shape=replace(m, nf4=m.frozen_matrices)))] if possible else []
    width, found = OPTIMIZERS[s.optimizer].state_width(s.precision), []
    for spec in _smaller_optimizers(partial=s.topology.partial):
        if spec.state_width(s.precision) < width:
            needs = f" ({install(f'sftkit[{spec.extra.name}]')})" if spec.extra and not _is_installed(spec) else ""
            found.append((f"optim.name={spec.name}{needs}", replace(s, optimizer=spec.name)))
    return found


def _more_shards(s: EstimateInputs) -> list[Option]:
    """Return weights sharded over the existing processes, or over twice as many."""
    # Replicas become shards on the existing GPUs; a sharded run needs more GPUs.
    unsharded = s.topology.world_size > 1 and not s.topology.sharded
    number = s.topology.world_size * (1 if unsharded else 2)
    share, left = divmod(s.layout.global_batch_size, number)
    if left or s.shape.nf4:  # matrices in NF4 cannot be sharded
        return []
    layout = replace(s.layout, world_size=number, micro_batch_size=largest_divisor(share, s.layout.micro_batch_size))
    # The sharding that takes least memory, because the run did not fit.
    after = replace(s, layout=layout, topology=Topology(shards=number, sharded=True), sharding=SHARDINGS[-1])
    engine = "train.engine=blocks and " if s.topology.stages > 1 else ""
    return [(f"{engine}accelerate_configs/fsdp2.yaml on {number} GPUs", after)]


def automatic_optimizer(preset: str, precision: str, *, too_much: bool, partial: bool) -> str:
    """Return the optimizer that optim.name=auto means. `too_much`: the default would not fit; `partial`: a process
    holds a part of the weights.
    """
    if precision != "bf16":
        return DEFAULT
    if preset == "low":
        # The smallest that can be built here: a run must not fail for a package that the user never named.
        usable = [spec for spec in _smaller_optimizers(partial=partial) if _is_installed(spec)]
        return min(usable, key=lambda spec: spec.state_width(precision)).name
    return FALLBACK if too_much else DEFAULT


def _smaller_optimizers(*, partial: bool) -> list[OptimizerSpec]:
    """Return the optimizers that do the same as the default in less memory."""
    # An optimizer that cannot be sharded cannot handle a tied weight on two pipeline stages either.
    return [spec for spec in OPTIMIZERS.values() if spec.saves_memory and not (partial and spec.unshardable)]


def _is_installed(spec: OptimizerSpec) -> bool:
    """Return whether the package of an optimizer is installed."""
    return spec.extra is None or find_spec(spec.extra.package) is not None


def explain_oom(error: BaseException, plan: MemoryPlan, best: Sequence[Remedy], optim: OptimConfig) -> ConfigError:
    """Return the error that reports which memory ran out, and what to change.

    Args:
        best: settings that save most for this run.
    """
    # The size is only in the text of torch's error, which has no field for it.
    tried = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", str(error))
    device = "the GPU" if plan.total_bytes is None else f"the GPU has {gib(plan.total_bytes)}"
    lines = [f"out of memory: {device}"]
    if torch.cuda.is_available():
        lines.append(f"tensors took up to {gib(torch.cuda.max_memory_allocated())}")
    if tried:
        lines.append(f"{tried[1]} more did not fit")
    if plan.estimate is not None:
        lines.append(f"this run was estimated at {gib(plan.estimate.total)}")
    if best:
        advice = "Largest savings (estimated):" + "".join(f"\n  {remedy.text}" for remedy in best)
        advice += f"\n{_on_resume(best, plan, optim)}"
    elif plan.estimate is None:
        advice = (
            "Lower train.micro_batch_size, with which a checkpoint can be resumed, or start from scratch with "
            f"train.memory=low or optim.name={FALLBACK}"
        )
    else:
        advice = "Every setting that saves memory is in use: choose a smaller model or a larger GPU"
    return ConfigError(", ".join(lines) + ". " + advice)


def _on_resume(best: Sequence[Remedy], plan: MemoryPlan, optim: OptimConfig) -> str:
    """Return a sentence that names the settings with which the newest checkpoint can be resumed."""
    settings = [setting for remedy in best for setting in remedy.on_resume]
    if not settings:
        return "These settings cannot change in a resumed run: start a new one"
    named = f" together with optim.name={plan.optim.name} (auto may now mean another)" if optim.name == "auto" else ""
    return f"The newest checkpoint can be resumed (train.resume=auto) with {' or '.join(settings)}{named}"


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


@dataclass(frozen=True)
class Fixed:
    """Decisions that precede the memory plan."""

    total_bytes: int | None = None
    "memory of the device; None: that of rt.device, unknown if it is not a GPU"
    backend: str | None = None
    "attention backend; reference holds a dense mask"
    sharding: Sharding | None = None
    "how sharded ranks exchange if the engine decides it; None: the fastest way that fits"


UNDECIDED = Fixed()


def make_plan(
    cfg: Config, orig_model: PreTrainedModel, layout: Layout, rt: Runtime, fixed: Fixed = UNDECIDED
) -> MemoryPlan:
    """Turn train.memory and optim.name into an optimizer and a budget, and print the plan; eager runs get
    gradient checkpointing.

    Args:
        orig_model: model before compilation and wrapping; the plan may switch its gradient checkpointing on.

    Raises:
        ConfigError: an eager run must save memory but the model has no gradient checkpointing; the model cannot
            be split over tensor-parallel ranks or into stages; or weights, gradients and optimizer states alone
            exceed a GPU.
    """
    if rt.topology.tensor > 1 and cfg.train.engine != "graph":  # the graph engine splits matrices differently
        check_tensor_parallel(orig_model, rt.topology.tensor)
    total_bytes, sharding = fixed.total_bytes, fixed.sharding
    if total_bytes is None and rt.device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(rt.device).total_memory
    checkpointing = _checkpoints(cfg.compile, cfg.train, orig_model)
    setup = _inputs(cfg, orig_model, layout, rt, checkpointing=checkpointing)
    name = DEFAULT if cfg.optim.name == "auto" else cfg.optim.name
    if setup is not None:
        setup = replace(setup, dense_mask=fixed.backend == "reference")
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
        _check_room(setup, total_bytes)
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
        best = remedies(plan, layout, cfg.data, cfg.compile, cfg.optim)[:3]
        advice = "; ".join(r.text for r in best) or "a smaller model or a larger GPU"
        warning = "this run is estimated at %s of the device's %s and may run out of memory; what saves most: %s"
        log.warning(warning, gib(found.total), gib(total_bytes or 0), advice)
    return plan


def _checkpoints(compile: CompileConfig, train: TrainConfig, orig_model: PreTrainedModel) -> bool:
    """Return whether transformers' gradient checkpointing is on; it is switched on to save memory if no partitioner
    of compiled graphs recomputes.
    """
    if _recomputes(compile) or train.memory == "speed":
        return False
    if not orig_model.supports_gradient_checkpointing:
        raise ConfigError(
            f"train.memory={train.memory}: without compilation it needs gradient checkpointing, which "
            f"{type(orig_model).__name__} does not have; set compile.enabled=true or train.memory=speed"
        )
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


def _check_room(s: EstimateInputs, total_bytes: int | None) -> None:
    """Reject a model that does not fit even with the smallest rows."""
    held = held_bytes(s)
    if total_bytes is None or held <= total_bytes:
        return
    # Replicas hold the same state: only the other processes divide it.
    shards = s.topology.world_size // s.topology.replicas if s.topology.partial else 1
    ways = [text for text, after in smaller_states(s) if held_bytes(after) <= total_bytes]
    # One process's bytes times the number of shards give the whole model; rounded up to whole GPUs.
    if not s.shape.nf4:
        ways.append(f"accelerate_configs/fsdp2.yaml on {-(-held * shards // total_bytes)} such GPUs or more")
    advice = ", or ".join([*ways, "a smaller model"])
    raise ConfigError(
        f"weights, gradients and states of {s.optimizer} for {s.shape.parameters / 1e9:.1f} billion parameters take "
        f"{gib(held)} on each GPU, which has {gib(total_bytes)}, with any row length. Use {advice}"
    )


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
