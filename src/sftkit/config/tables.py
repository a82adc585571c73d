"""The things that a recipe can name, as facts without torch: chat templates, evaluation tasks, passes of the graph
engine, optimizers, stages of training; where the code of each is, what it needs, what it excludes.

A pass is a function in graph/passes/ and its entry in passes.yaml. An optimizer is a file in optim/ whose `build`
returns an optim.protocol.Optimizer, and its entry in optimizers.yaml.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sftkit.errors import did_you_mean, texts

CHAT_TEMPLATES: dict[str, tuple[str, ...]] = {"chatml": ("<|im_start|>", "<|im_end|>")}
"Name, which is that of its file, data/tokens/NAME.jinja -> the tokens that begin and end its turns."


TASKS = (
    *("mmlu", "arc_easy", "arc_challenge", "hellaswag", "piqa", "openbookqa", "boolq"),
    *("gsm8k", "humaneval", "mbpp"),
)
"Published tasks, in the order in which messages list them."
EVAL_TASKS = ("families", *TASKS)
"Values of eval.tasks with backend sftkit; families: the held-out built-in tasks."
CODE = ("humaneval", "mbpp")
"Tasks that run what the model writes."
WITHOUT_SHOTS = ("families", "humaneval")
"Tasks that take no few-shot examples."
TASK_METRICS: dict[str, tuple[str, ...]] = {
    "families": ("acc",),
    **dict.fromkeys(("mmlu", "boolq"), ("acc",)),
    **dict.fromkeys(("arc_easy", "arc_challenge", "hellaswag", "piqa", "openbookqa"), ("acc", "acc_norm")),
    "gsm8k": ("exact_match", "exact_match_flexible"),
    **dict.fromkeys(CODE, ("pass_at_1",)),
}
"Task -> the metrics that it is judged by."
METRICS_IN_CHAT = {task: ("acc",) for task, metrics in TASK_METRICS.items() if "acc" in metrics} | {
    "gsm8k": ("exact_match",)
}
"The same with eval.format chat, of tasks that are judged otherwise there."


STAGES = ("joint", "fork", "split", "regions", "codegen", "replay")
"""In this order. joint: a pass over the captured forward-backward graph, before it is split; fork: makes several graphs
of a half, for micro-batches at different places of a step; split: a pass over each half; regions: puts compiled code in
the place of parts of a half; codegen: generates code for a half, instead of calling one operator after the other;
replay: what is called instead of that code."""
REMOVED_PASSES = {
    "prefetching": "block_bucketing moves collectives too, and merges them",
    "full_checkpointing": "train.memory=low recomputes activations",
    "selective_checkpointing": "train.memory=balanced recomputes activations",
}
"Passes of earlier versions -> what to do instead."


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Facts about a pass that are known without importing its code."""

    name: str
    stage: str
    "one of STAGES"
    fn: str
    "module:function, of the signature of its stage (graph/capture.py)"
    summary: str
    "for --help"
    conflicts: tuple[str, ...] = ()
    "passes that exclude it"


_TABLE: Any = texts("config/passes.yaml")
PASSES = {
    name: Pass(**{"name": name, **facts, "conflicts": tuple(facts.get("conflicts", ()))})
    for name, facts in _TABLE.items()
}
"Every pass, in the order of --help."


def problems(names: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with a list of passes: an unknown name, one named twice, a wrong order, two that exclude each
    other."""
    for name in dict.fromkeys(names):
        if name in REMOVED_PASSES:
            yield f'"{name}" was removed: {REMOVED_PASSES[name]}'
        elif name not in PASSES:
            yield f'"{name}" is not one of {", ".join(PASSES)}{did_you_mean(name, PASSES, ". ")}'
        elif names.count(name) > 1:
            yield f'"{name}" is named twice: leave one out'
    # Order and conflicts are judged of the names that are known: each unknown one has its problem above.
    known = [PASSES[name] for name in dict.fromkeys(names) if name in PASSES]
    for at, spec in enumerate(known):
        for other in (earlier.name for earlier in known[:at] if earlier.name in spec.conflicts):
            yield f"{spec.name} does not go with {other}: leave one out"
    in_order = sorted(known, key=lambda spec: STAGES.index(spec.stage))
    conflicts = {other for spec in known for other in spec.conflicts}
    if known != in_order and conflicts.isdisjoint(names):  # the list that is named is a possible one
        early, late = next(pair for pair in zip(known, in_order, strict=True) if pair[0] != pair[1])
        yield f"{late.name} must come before {early.name}: write [{', '.join(spec.name for spec in in_order)}]"


def describe_passes() -> str:
    """Compose the help of graph.passes from the table."""
    return f"Applied in this order. {'; '.join(f'{spec.name}: {spec.summary}' for spec in PASSES.values())}."


BYTES = {"bf16": 2, "fp32": 4}
"Bytes of a weight, a gradient and an activation in each precision."
DEFAULT = "adamw"
"The optimizer of optim.name=auto if it fits in memory."
FALLBACK = "adamw_sr"
"The optimizer of auto if that one does not fit; it needs no package and can be sharded."


class Extra(NamedTuple):
    """A package that an optimizer needs and that not every installation has."""

    package: str
    name: str
    "of the extra of sftkit that brings it"


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Facts about an optimizer that are known without importing its code."""

    name: str
    code: str
    "module:function, an optim.protocol.Build"
    summary: str
    "for --help"
    state_bytes: Mapping[str, float]
    "Per parameter of bf16 and of fp32 weights. No fp32: it rounds weights to bf16, so a model in fp32 is rejected."
    elsewhere: str | None = None
    "The optimizer of all parameters that are not matrices of a decoder block; None: it updates all parameters itself."
    saves_memory: bool = False
    "Whether its update is AdamW's with smaller states, so that auto and the advice on memory may take it instead."
    extra: Extra | None = None
    unshardable: str | None = None
    "Why its states cannot be sharded; None: they can."

    @property
    def rounds_weights(self) -> bool:
        """Return whether it rounds weights to bf16; it then rejects a model in fp32."""
        return "fp32" not in self.state_bytes

    def state_width(self, precision: str, *, block_matrix: bool = True) -> float:
        """Return the bytes of optimizer state per parameter.

        Args:
            precision: of the weights. The few tensors that a model in bf16 keeps in fp32 count as bf16 where the
                optimizer rounds weights.
            block_matrix: whether the parameter is a matrix of a decoder block.
        """
        if self.elsewhere is not None and not block_matrix:
            return OPTIMIZERS[self.elsewhere].state_width(precision)
        return self.state_bytes.get(precision, self.state_bytes["bf16"])

    def training_width(self, precision: str, *, block_matrix: bool = True) -> float:
        """Return the bytes per parameter of weight, gradient and optimizer states."""
        return 2 * BYTES[precision] + self.state_width(precision, block_matrix=block_matrix)


_OPTIMIZERS: Any = texts("config/optimizers.yaml")
OPTIMIZERS = {
    name: OptimizerSpec(**{"name": name, **facts, "extra": Extra(**facts["extra"]) if "extra" in facts else None})
    for name, facts in _OPTIMIZERS.items()
}
"Every optimizer, in the order of --help and of the advice on memory."


def describe_optimizers() -> str:
    """Compose the help of optim.name from the table."""
    clauses = []
    for spec in OPTIMIZERS.values():
        widths = sorted({spec.training_width("bf16", block_matrix=block_matrix) for block_matrix in (True, False)})
        about = "" if all(width == round(width) for width in widths) else "about "
        size = " to ".join(f"{width:.0f}" for width in widths)  # 16 bytes, about 6 bytes, 12 to 16 bytes
        clauses.append(f"{spec.name}: {spec.summary} ({about}{size} bytes)")
    auto = f"auto: {DEFAULT} where it fits in memory, else {FALLBACK}"
    return f"{'; '.join([*clauses, auto])}. Bytes are per parameter in bf16, with its gradient."


CHAIN = ("base", "mid", "sft")
"The stages that follow one another."
STAGE_SCRIPTS = {"base": "base_train.py", "mid": "mid_train.py", "sft": "chat_sft.py", "caption": "caption_train.py"}
"Name -> file of the script."
