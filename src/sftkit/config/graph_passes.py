"""Every name of graph.passes as facts without torch: at which stage it runs, what it needs, what it excludes, where
its code is.

A pass is a function in graph/passes/ and its entry in PASSES.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

STAGES = ("joint", "fork", "split", "regions", "codegen", "replay")
"""In this order. joint: a pass over the captured forward-backward graph, before it is split; fork: what makes several
graphs of a half, for micro-batches at different places of a step; split: a pass over each half; regions: what puts
compiled code in the place of parts of a half; codegen: what makes code of a half, in place of an operator after the
other; replay: what is called in place of that code."""


CHECKPOINTING = frozenset({"full_checkpointing", "selective_checkpointing"})
"Passes that choose which activations are kept."


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Facts about a pass that are known without importing its code."""

    name: str
    stage: str
    "one of STAGES"
    fn: str
    "module:function, of the signature of its stage (graph/passes/apply.py)"
    summary: str
    "for --help"
    requires: tuple[str, ...] = ()
    "passes that must come before it"
    conflicts: tuple[str, ...] = ()
    "passes that it does not go with"


PASSES = {
    spec.name: spec
    for spec in (
        Pass(
            name="reshard_after_forward",
            stage="joint",
            fn="sftkit.graph.passes.joint_passes:reshard_after_forward",
            summary="weights are gathered again in the backward pass and not kept for it",
            conflicts=("gather_once",),
        ),
        Pass(
            name="full_checkpointing",
            stage="joint",
            fn="sftkit.graph.passes.joint_passes:full_checkpointing",
            summary="of a decoder block what goes in is kept for the backward pass, the rest is computed again",
            conflicts=("selective_checkpointing",),
        ),
        Pass(
            name="selective_checkpointing",
            stage="joint",
            fn="sftkit.graph.passes.joint_passes:selective_checkpointing",
            summary="the outputs of its matrix products and attention are kept, too",
            conflicts=("full_checkpointing",),
        ),
        Pass(
            name="gather_once",
            stage="fork",
            fn="sftkit.graph.passes.gather_once:fork",
            summary="the first micro-batch of a step gathers the weights for all of them",
            conflicts=("reshard_after_forward", "cuda_graphs"),
        ),
        Pass(
            name="reduce_once",
            stage="fork",
            fn="sftkit.graph.passes.reduce_once:fork_backward",
            summary="gradients are summed whole, and reduced by the last micro-batch of a step for all of them",
            conflicts=("cuda_graphs",),
        ),
        Pass(
            name="prefetching",
            stage="split",
            fn="sftkit.graph.passes.bucketing:prefetching",
            summary="the weights of a decoder block are gathered while the block before it computes, one by one",
            conflicts=("auto_bucketing", "block_bucketing", "full_inductor"),
        ),
        Pass(
            name="auto_bucketing",
            stage="split",
            fn="sftkit.graph.passes.overlap:auto_bucketing",
            summary="collectives are merged and moved to where an estimate of times hides them behind compute",
            conflicts=("prefetching", "block_bucketing"),
        ),
        Pass(
            name="block_bucketing",
            stage="split",
            fn="sftkit.graph.passes.bucketing:block_bucketing",
            summary="those of a decoder block are merged, and gathered while the block before it computes",
            conflicts=("prefetching", "auto_bucketing"),
        ),
        Pass(
            name="regional_inductor",
            stage="regions",
            fn="sftkit.graph.passes.regions:regional_inductor",
            summary="runs of a decoder block's operators between collectives are compiled by Inductor, FlexAttention "
            "among them",
            conflicts=("full_inductor",),
        ),
        Pass(
            name="full_inductor",
            stage="codegen",
            fn="sftkit.graph.passes.regions:full_inductor",
            summary="both halves are compiled by Inductor, split so that it recomputes what it fuses, as "
            "train.memory says",
            conflicts=("prefetching", "regional_inductor"),
        ),
        Pass(
            name="cuda_graphs",
            stage="replay",
            fn="sftkit.graph.passes.replay:Recorder",
            summary="both halves are recorded as CUDA graphs and replayed; on a GPU",
            conflicts=("gather_once", "reduce_once"),
        ),
    )
}
"Every pass, in the order of --help."


def problems(names: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with a list of passes: an unknown name, one named twice, a wrong order, a missing
    requirement, two that do not go together."""
    for name in dict.fromkeys(names):
        if name not in PASSES:
            hint = f'. Did you mean "{near[0]}"?' if (near := difflib.get_close_matches(name, PASSES, n=1)) else ""
            yield f'"{name}" is not one of {", ".join(PASSES)}{hint}'
        elif names.count(name) > 1:
            yield f'"{name}" is named twice: leave one out'
    # Order and conflicts are judged of the names that are known: each unknown one has its problem above.
    known = [PASSES[name] for name in dict.fromkeys(names) if name in PASSES]
    for at, spec in enumerate(known):
        before = [other.name for other in known[:at]]
        yield from (f"{spec.name} needs {other} before it" for other in spec.requires if other not in before)
        clashes = [other for other in spec.conflicts if other in before]
        yield from (f"{spec.name} does not go with {other}: leave one out" for other in clashes)
    in_order = sorted(known, key=lambda spec: STAGES.index(spec.stage))
    conflicts = {other for spec in known for other in spec.conflicts}
    if known != in_order and conflicts.isdisjoint(names):  # the list that is named is a possible one
        early, late = next(pair for pair in zip(known, in_order, strict=True) if pair[0] != pair[1])
        yield f"{late.name} must come before {early.name}: write [{', '.join(spec.name for spec in in_order)}]"


def environment_of_passes(names: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that must be set before the process group is made. NCCL would register the
    buffers of CUDA graphs, which fails with expandable segments of the allocator."""
    return {"NCCL_GRAPH_REGISTER": "0"} if "cuda_graphs" in names else {}


def describe_passes() -> str:
    """Compose the help of graph.passes from the table."""
    return f"Applied in this order. {'; '.join(f'{spec.name}: {spec.summary}' for spec in PASSES.values())}."
