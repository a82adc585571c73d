"""Every setting of every recipe, one frozen dataclass per concept. No torch in this file: a bad recipe fails
in a second."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field

from sftkit.config.tables import OPTIMIZERS, describe_optimizers, describe_passes

LARGEST = 2**31 - 1
"The largest whole number of a setting: the arrays of plans and some libraries take no larger one."
Positive = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
FilePath = Annotated[str, Field(json_schema_extra={"format": "path"})]
"A path, or what may stand in its place (a hub id, a URL): ~ is expanded when the recipe is read, see load.py."
if TYPE_CHECKING:
    OptimizerName = str
else:  # a type checker knows no Literal of a table's keys
    OptimizerName = Literal[("auto", *OPTIMIZERS)]


T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def settings(cls: type[T]) -> type[T]:
    """Make a frozen dataclass that rejects unknown keys, and whose help is the strings under its fields."""
    # pydantic reads it from a dataclass, whose type has no such attribute
    cls.__pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(cls)


@settings
class RunConfig:
    """The directory of the run, its stage, its seed and its timeouts."""

    dir: FilePath
    "Run directory: config.yaml, metrics.jsonl, evals.jsonl, summary.json and step-NNNNNN/ checkpoints."
    stage: Literal["base", "mid", "sft", "caption"] | None = None
    "What is learned, and so which script trains it: others reject the recipe, and inspect shows what that script learns. null: any."
    seed: NonNegative = 0
    "Seeds weights, data order and dropout."
    step_timeout_seconds: Annotated[float, Field(gt=0.0)] = 600.0
    "Seconds without progress in a step after which a rank ends the run and reports where it hangs, with its stack; must be longer than any step."
    start_timeout_seconds: Annotated[float, Field(gt=0.0)] = 3600.0
    "The same limit for what takes longer: warm-up with compilation, the first step, an evaluation, a checkpoint."


Role = Literal["system", "developer", "user", "assistant", "tool", "tool_call"]
"Roles of messages; tool_call: an answer whose text is the JSON of its calls."
COUNTED = ("min_tokens", "max_tokens", "min_turns", "max_turns")
"Names of `where` that are limits of a document's size; all others are columns."


@settings
class SampleConfig:
    """Rows of a source that are drawn by chance."""

    rows: Positive
    "Number of rows; all of a source that has fewer."
    seed: NonNegative = 0
    "Another seed draws other rows."


@settings
class SourceConfig:
    """One source of rows: a builtin, local files, files at a URL, or a hub dataset."""

    path: FilePath
    "builtin:docs, builtin:tasks, builtin:pictures (with captions), a .jsonl/.json/.parquet/.arrow/.csv/.txt/.tar file (also .gz, .bz2, .xz, .zst), a folder of them, a pattern with wildcards, a URL of these (s3://, hf://, https://), or a hub dataset id."
    files: tuple[str, ...] | None = None
    "Names or patterns of the files to read from a folder, a URL or a hub dataset; null: all. A file that is named without a wildcard is of the split that is asked for."
    name: str | None = None
    "Label in metrics; null: the last part of the path."
    subset: str | None = None
    "Configuration name of a hub dataset (GSM8K: main)."
    revision: str | None = None
    "Branch, tag or commit of a hub dataset; its commit is in the log, preflight.json and the report."
    tokenizer_of: FilePath | None = None
    "Tokens that another program wrote (.bin and .idx of Megatron, .ds of datatrove, .npy and .bin of OLMo-core and llm.c) are read in place: the hub id or folder of the tokenizer that made them, which must be the run's. Null: rows."
    split: str = "train"
    "Split or slice in the notation of datasets: train, train[:1000], train[90%:], train+test. builtin: train or heldout."
    repeat: Annotated[float, Field(gt=0.0, le=1e6)] = 1
    "Passes over this source in an epoch; of a last pass that is not whole (2.5), each epoch takes other documents. Not with weights."
    weight: Annotated[float, Field(ge=0.0)] | None = None
    "Share of this source in the tokens of rows, over the sum of all weights; a source that ends begins again in another order. null: no source has a weight, and an epoch takes each document once."
    max_epochs: Positive | None = None
    "With weights: passes over this source in the whole run, after which the others take its share; null: no limit."
    order: Literal["shuffled", "given"] = "shuffled"
    "given: the order of the source, and rows are not shuffled. Only for a single source, or with weights."
    max_rows: Positive | None = None
    "Use only this many rows, from the beginning; null: all."
    sample: SampleConfig | None = None
    "Use only rows that are drawn by chance; null: all."
    columns: dict[str, str] | None = None
    "Where columns with a meaning are: {messages: data.turns, system: persona}. A point goes into an object. {completion: chosen} learns the chosen answer of preference rows."
    roles: dict[str, Role] | None = None
    "Further names of roles, in any case: {bot: assistant, customer: user}."
    system: str | None = None
    "System text of conversations that have none."
    where: dict[str, Any] | None = None
    "Use only rows whose columns have a value, or one of several: {lang: en, meta.grade: [a, b]}; and documents within min_tokens, max_tokens, min_turns, max_turns."
    tree: Literal["best", "all"] | None = None
    "Trees of answers (OASST): best: the path of the best answers; all: every path, an answer is learned in the first path that has it; null: rejected."


@settings
class TokenizerTraining:
    """A byte-level BPE tokenizer trained on the data of the recipe (base stage)."""

    vocab_size: Annotated[int, Field(ge=300, le=LARGEST)] = 4096
    "Number of entries, special tokens included."
    sources: tuple[SourceConfig, ...] | None = None
    "Data that it is trained on; null: data.train."


@settings
class RopeScaling:
    """Other rotary frequencies than the model's config has, under the names of transformers' rope_parameters."""

    rope_type: Literal["yarn", "linear", "dynamic", "llama3"]
    "yarn, linear and llama3 change the frequencies; dynamic only those of texts longer than the model's length, in transformers and servers."
    factor: Annotated[float, Field(gt=1.0)]
    "How much longer documents may become."
    original_max_position_embeddings: Positive | None = None
    "yarn, llama3: the length that the model was pretrained with; null: as its config says, else its max_position_embeddings."
    rope_theta: Annotated[float, Field(gt=0.0)] | None = None
    "Base of the frequencies; null: the model's."
    low_freq_factor: Annotated[float, Field(gt=0.0)] | None = None
    "llama3: up to this many turns over the original length a frequency is divided by factor."
    high_freq_factor: Annotated[float, Field(gt=0.0)] | None = None
    "llama3: from this many turns on it stays."
    beta_fast: Annotated[float, Field(gt=0.0)] | None = None
    "yarn: from this many turns on a frequency stays; null: 32."
    beta_slow: Annotated[float, Field(gt=0.0)] | None = None
    "yarn: up to this many turns it is divided by factor; null: 1."
    attention_factor: Annotated[float, Field(gt=0.0)] | None = None
    "yarn: factor of queries and keys; null: 0.1 ln(factor) + 1."


@settings
class ModelConfig:
    """The model and tokenizer that training starts from."""

    path: FilePath | None = None
    "Hub id, local model folder, run directory (its latest checkpoint) or step directory. Null with model.scratch."
    # Any here and below: what another library takes, which checks it by itself
    scratch: dict[str, Any] | None = None
    "Fields of a transformers config with model_type: random weights of that shape, no checkpoint."
    tokenizer: FilePath | None = None
    "Hub id or local folder of the tokenizer; null: the one of model.path."
    train_tokenizer: TokenizerTraining | None = None
    "Train a new tokenizer instead of loading one."
    chat_template: FilePath | None = None
    "Replaces the tokenizer's chat template; saved with every checkpoint. chatml: our own; <|im_start|> and <|im_end|> are added if the tokenizer lacks them, with rows of embedding and head for them. Or a Jinja file that uses only tokens of the tokenizer."
    chat_template_args: dict[str, bool | int | float | str | None] | None = None
    "New defaults of the chat template's arguments, such as {enable_thinking: false}: for training, chat, evaluation and whatever loads a checkpoint. A record's chat_template_kwargs override them."
    revision: str | None = None
    "Branch, tag or commit of a hub model."
    trust_remote_code: bool = False
    "Run Python code that ships with a hub model. Off unless you have read that code; pin model.revision with it."
    rope_scaling: RopeScaling | None = None
    "Extend the model to longer documents; checkpoints keep it in config.json, so later stages leave it out. null: as the model's config says."
    pad_vocab_to_multiple_of: Positive | None = None
    "Rows of embedding and head are rounded up to a multiple of this (128 suits tensor cores): the added rows stay zero, are not saved, and no token, logit or update uses them. null: no padding."


def one_or_several(value: Any) -> Any:
    """Return a single name as a tuple of one, and a list as pydantic takes it after a validator."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


@settings
class StageConfig:
    """Weights of the sources from a share of the run on."""

    at: Annotated[float, Field(gt=0.0, lt=1.0)]
    "Share of the steps after which these weights replace those before."
    weights: dict[str, Annotated[float, Field(ge=0.0)]]
    "Weight by name of the source; a source that is not named has 0."


@settings
class DataConfig:
    """The data, and how it is laid out in rows of static shape."""

    train: tuple[SourceConfig, ...]
    "Training sources, mixed by shuffling."
    val: tuple[SourceConfig, ...] = ()
    "Validation sources; each has its own val/<name>/loss and bpb."
    tokens: Annotated[float, Field(gt=0.0, le=1e18)] | None = None
    "Length of the run in positions of packed rows, 100e9 for example: instead of train.max_steps, which follows; null: as train says."
    stages: tuple[StageConfig, ...] = ()
    "Other weights from a share of the run on, in order; the last stages of a base run, for example."
    shuffle: Literal["global", "window"] | None = None
    "global: any document of a source may follow any other; window: documents are shuffled in windows of 4,194,304, which keeps reads of a large source together; null: window above 16,777,216 documents."
    val_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    "Share of each training source that is held out for validation, under the name of the source: by the first user message or the beginning of the text, so that copies and answers to one question stay together, and stay where they are when rows are added."
    dedup: Literal["exact", "near"] | None = None
    "exact: documents whose row has the text of an earlier or a validation row are left out; near: also rows that share most of their words with an earlier one (extra dedup); null: copies are only counted."
    decontaminate: Annotated[tuple[str, ...], BeforeValidator(one_or_several)] = ()
    "Evaluation tasks whose questions and answers are looked for in the training data: documents that hold one are left out and listed. A list, or all: every task whose rows can be read (eval.data, else the hub). Empty: sftkit inspect only counts those of eval.tasks."
    layout: Literal["packed", "bucketed", "fixed", "dynamic", "tree"] = "packed"
    "packed: whole documents, best-fit into rows; tree: the same, and tokens that documents of a conversation share are computed once (docs/data_scale.md). Or one document per row, padded to a bucket (bucketed), to max_length (fixed) or to the longest document of the step (dynamic: symbolic shapes)."
    max_length: Annotated[int, Field(ge=8, le=LARGEST)] | None = None
    "Maximum row positions of a document, whose last token takes none; null: as in the run that wrote the checkpoint."
    row_length: Annotated[int, Field(ge=8, le=LARGEST)] | None = None
    "Tokens in a packed or tree row, max_length or more; null: max_length. In other layouts a row holds one document of at most max_length."
    num_buckets: Positive | None = None
    "bucketed: number of row lengths, which are chosen so that this data needs the least padding; null: 4."
    bucket_lengths: tuple[Positive, ...] | None = None
    "bucketed: the row lengths themselves, ascending; the last one is max_length."
    pad_multiple: Positive | None = None
    "dynamic: row lengths are rounded up to a multiple of this; 8 and 32 suit GPUs; null: 8."
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    "What happens to a conversation longer than max_length. Plain text is always split into chunks of max_length."
    targets: Literal["assistant", "last_turn", "all"] | None = None
    "What is learned from a conversation: every answer, those after the last user message, or every token; null: assistant in chat_sft.py, all in mid_train.py. Answers with weight 0 or train false are never learned."
    thinking: Literal["auto", "learn_empty", "off"] = "auto"
    "auto: an answer without reasoning counts as given with thinking turned off, so an empty thinking block of the template is context; learn_empty: the empty block is learned; off: reasoning in the data is dropped."
    split_turns: bool = True
    "Answers that the chat template renders differently as history (Qwen3 drops their reasoning) each end a separate document, after the prompt that a server would send; false: they are context only. Costs tokens, see sftkit inspect."
    special_tokens_in_text: Literal["split", "parse", "error"] = "split"
    "The tokenizer's special tokens in plain texts: split: ordinary characters, counted; parse: special tokens; error: a bad row. Conversations never hold one."
    on_bad_row: Literal["error", "skip"] = "error"
    "If a row cannot be used: error stops and names file and line; skip skips and counts it."
    num_proc: Positive | None = None
    "Processes that tokenize (the result is cached on disk); null: one for 20,000 rows or 30 MB, then the cores of a machine divided by its ranks, at most 32."
    num_workers: NonNegative | None = None
    "Processes that build batches, each some steps ahead; 0: the training process itself; null: 2 with a GPU, else 0."
    cache_dir: FilePath = ".cache/sftkit"
    "Tokenized data, keyed by source, tokenizer, template and settings, and copies of files at URLs; safe to delete."
    local_gb: Annotated[float, Field(gt=0)] = 50.0
    "GB of copies of files at URLs that stay in cache_dir; the least used ones go first."


@settings
class AttentionConfig:
    """The attention kernel of training and validation; with any of them documents are separate."""

    backend: Literal["auto", "fa4", "flex", "varlen", "sdpa", "reference"] = "auto"
    "auto: the fastest that supports the run. fa4: FlashAttention-4 (extra attention-fa4); varlen: torch's FlashAttention-2; flex: FlexAttention; sdpa: dense causal, one document per row; reference: a dense mask, any device."


@settings
class LossConfig:
    """Cross entropy over target tokens, in chunks: the logits of a whole batch never exist."""

    chunk_tokens: Annotated[int, Field(ge=64, le=LARGEST)] = 4096
    "Number of target tokens whose logits are in memory at a time."
    z_loss: Annotated[float, Field(ge=0.0)] = 0.0
    "Weight of the squared log-partition (PaLM, section 5): keeps logits from drifting."
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    "Probability mass spread evenly over the vocabulary."
    dft: bool = False
    "Multiply the loss of each target by its own probability, without gradient (DFT, arXiv 2508.05629): unlikely answers of the data are learned less."
    token_metrics: bool = False
    "Also measure token accuracy and entropy, from the same pass."
    router_aux_loss_coef: Annotated[float, Field(ge=0.0)] | None = None
    "Models with experts: weight of the auxiliary loss that keeps their load even; 0: only measured; null: the config's router_aux_loss_coef if its output_router_logits is true, else 0."


@settings
class OptimConfig:
    """Optimizer, schedule and gradient clipping."""

    name: Annotated[OptimizerName, Field(description=describe_optimizers())] = "auto"
    lr: Annotated[float, Field(gt=0.0)] = 2e-5
    "Peak learning rate."
    lr_scale: dict[str, Annotated[float, Field(gt=0.0)]] | None = None
    'Factors of lr for the parameters whose names match a glob pattern: {"model.embed_tokens.*": 0.1, "*.norm.weight": 2}; of several patterns that match a name the last counts. train.freeze trains nothing at all.'
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    "AdamW's betas."
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    "AdamW's epsilon."
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    "Decoupled weight decay on matrices; norms, biases and embeddings have none."
    max_grad_norm: Annotated[float, Field(gt=0.0)] | None = 1.0
    "Clip the global gradient norm; null: no clipping."
    schedule: Literal["wsd", "cosine", "linear", "constant"] = "cosine"
    "wsd: warm-up, constant, linear decay over the last decay_ratio; cosine and linear decay after warm-up."
    warmup_ratio: Fraction = 0.03
    "Share of the steps in which the learning rate rises from 0, rounded up to whole steps."
    decay_ratio: Fraction = 0.2
    "wsd: share of the steps in which it falls."
    min_lr_ratio: Fraction = 0.0
    "Final learning rate / peak learning rate."


@settings
class TrainConfig:
    """Length of the run, size of a step, precision, engine."""

    max_steps: Positive | None = None
    "Maximum number of optimizer steps; null: as many as `epochs` need. With both, training ends at whichever comes first."
    epochs: Positive | None = None
    "Maximum number of passes over the data; null: as many as `max_steps` need."
    global_batch_size: Positive = 32
    "Rows of row_length (else max_length) per optimizer step, over all ranks and micro-batches; independent of the number of GPUs."
    micro_batch_size: Positive = 8
    "Maximum number of rows per forward pass on a rank; gradient accumulation follows from it. May change when a run is resumed."
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    "Of weights and compute; auto: the launcher's mixed_precision, else bf16 on a GPU that supports it and fp32 otherwise. The optimizer keeps what bf16 would lose."
    engine: Literal["blocks", "graph", "pipeline", "reference"] = "blocks"
    "How a step is computed. blocks: packed, compiled, sharded; graph: one forward-backward graph that graph.passes change (experimental); pipeline: blocks with the layers spread over processes (accelerate_configs/pp.yaml); reference: each document alone, eager, fp32, torch's own loss and AdamW: slow; sftkit validate compares losses with it."
    pipeline_stages: Positive | None = None
    "engine pipeline: number of processes over which the layers are split; further processes hold copies or shards of the stages. null: all processes."
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    "engine pipeline: the order of passes. 1f1b: forward and backward passes in turn, activations of at most as many micro-batches as there are stages; gpipe: all forward passes first; interleaved: 1f1b with two stages on each process, which wait about half as long and send two to three times as much."
    pipeline_layers: tuple[Positive, ...] | None = None
    "engine pipeline: number of layers of each stage, in order; null: balanced by parameters, those of the head at 0.7 of their number."
    freeze: tuple[str, ...] = ()
    'Parameters that are not trained, as glob patterns of their names: ["model.embed_tokens.*", "model.layers.[0-3].*"] (in quotes, for YAML has other uses of * and [). They have no gradients and no optimizer states, and stay bit for bit. A weight with two names, a tied head, is frozen under both.'
    neftune_alpha: Annotated[float, Field(gt=0.0)] | None = None
    "Noise on the embeddings of training steps (NEFTune, arXiv 2310.05914): uniform up to alpha / sqrt(L H) for a document of L positions and hidden size H; the paper takes 5 to 15. null: none."
    fp8: Literal["tensorwise", "rowwise"] | None = None
    "Matrix products of the blocks in float8 through torchao (extra fp8), scaled per tensor or per row; not the head."
    memory: Literal["speed", "balanced", "low"] = "speed"
    "How much is recomputed to save memory. speed: a tenth of the activations, which costs no time; balanced: half; low: nine tenths, and smaller optimizer states (adamw8bit or adamw_sr)."
    max_minutes: Annotated[float, Field(gt=0.0)] | None = None
    "End with a checkpoint within this many minutes after the start of the process, for queues with a time limit; null: no limit."
    resume: FilePath | None = None
    "auto: resume from the newest valid checkpoint of run.dir if there is one; a step directory: resume from it; null: start at step 0."
    resume_changes: tuple[str, ...] = ()
    "Keys that may differ from the checkpoint's recipe, although a resumed run must otherwise keep them: optim.* (not name), train.global_batch_size, run.seed, loss.z_loss, loss.label_smoothing, loss.dft, loss.router_aux_loss_coef, model.path, model.revision, train.freeze, train.neftune_alpha, adapter.lr_ratio_b, adapter.dropout; and data.train, for other weights, longer or new sources."


def num_stages(train: TrainConfig) -> int | None:
    """Return the number of stages that the layers are spread over; None: as many as there are processes."""
    return train.pipeline_stages if train.engine == "pipeline" else 1


@settings
class AdapterConfig:
    """Low-rank adapters on a frozen model (docs/adapters.md). null: all weights are trained."""

    rank: Positive = 16
    "Columns of the factors, at most the smaller dimension of each target."
    alpha: Annotated[float, Field(gt=0.0)] = 32.0
    "Scale of what an adapter adds, see scaling."
    scaling: Literal["standard", "rslora"] = "standard"
    "What an adapter adds is multiplied by alpha / rank (standard) or alpha / sqrt(rank) (rslora)."
    targets: Annotated[tuple[str, ...], BeforeValidator(one_or_several)] = ("all-linear",)
    "The layers with an adapter: all-linear, attention or mlp of every block, or names or their last parts: [q_proj, v_proj, layers.0.mlp.up_proj]. Never the head."
    experts: bool = True
    "false: all-linear and mlp leave out the experts of a mixture."
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    "lora: share of an adapter's inputs that is dropped in training."
    method: Literal["lora", "dora"] = "lora"
    "lora: add the product of the factors to a weight; dora: also scale each row of the sum to a trained length, which costs speed."
    base: Literal["bf16", "nf4"] = "bf16"
    "How the frozen layers of the blocks are stored: in the precision of the run, or in 4 bits (QLoRA), which saves memory and costs speed."
    lr_ratio_b: Annotated[float, Field(gt=0.0)] = 1.0
    "Learning rate of the second factor, B, over optim.lr (LoRA+ suggests up to 16)."


@settings
class NamedAdapter:
    """Several adapters, trained side by side (docs/adapters.md); null: as the section says."""

    name: str
    "Name of its folder in checkpoints, adapters/<name>, and of its metrics."
    rank: Positive | None = None
    "adapter.rank of it."
    alpha: Annotated[float, Field(gt=0.0)] | None = None
    "adapter.alpha of it."
    lr: Annotated[float, Field(gt=0.0)] | None = None
    "optim.lr of it."
    seed: NonNegative | None = None
    "run.seed of it: of its first factors, and of the order of its documents."
    data: tuple[SourceConfig, ...] | None = None
    "data.train of it."


LARGEST_TOGETHER = 512
"""Largest sum of the ranks of several adapters. Each pass copies the factors of all of them in the precision of the
model: at 512 columns these copies move as many bytes as the frozen weights of a hidden size of 4096."""
ADAPTER_GROUPS = ("all-linear", "attention", "mlp")
"Names that stand for layers in adapter.targets."
SLOW_ADAPTER_LR = 5e-5
"Adapters learn slowly below this learning rate: their best one is about ten times that of full fine-tuning."


@settings
class NumericsConfig:
    """What happens if a loss or gradient norm is not finite or spikes, or if replicas differ."""

    on_nonfinite: Literal["error", "skip"] = "error"
    "If a loss or gradient norm is not finite, the update is skipped in any case. error: end training and name step, ranks and documents; skip: count the step and continue."
    on_spike: Literal["warn", "skip", "error"] = "warn"
    "If a loss or gradient norm is more than 6 standard deviations above the mean of the last 128 steps. warn: report it and continue; skip: also skip the update; error: skip the update and end training."
    max_skips: Positive = 10
    "skip: maximum number of skipped steps in a row; one more is an error."
    check_replicas_every: Positive | None = 1000
    "Steps between comparisons of weights and optimizer states that several ranks must hold alike, by checksum; also before each checkpoint and evaluation. A difference ends training. null: never."


@settings
class CompileConfig:
    """torch.compile, for the train step only."""

    enabled: bool = True
    "false: eager."
    scope: Literal["block", "model"] = "block"
    "block: each decoder layer in place, one graph for all; model: the whole forward pass."
    backend: Literal["inductor", "aot_eager", "eager", "cudagraphs"] = "inductor"
    "torch.compile backend."
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    "torch.compile mode; inductor only. null: torch's default, but reduce-overhead (CUDA graphs) for adapters on one GPU whose blocks are so short that the host would be slower than the GPU (docs/adapters.md)."
    options: dict[str, Any] | None = None
    "Inductor's own options, which override those of mode, by their names in torch._inductor.config: {shape_padding: true, coordinate_descent_tuning: true}."
    dynamic: bool | None = False
    "false: static shapes; null lets torch.compile decide after the first recompile."
    fullgraph: bool = False
    "true: a graph break is an error."
    activation_memory_budget: Fraction | None = None
    "Share of a block's activations that may be kept for the backward pass; the rest is recomputed, cheapest first. null: as train.memory says."
    on_recompile: Literal["error", "warn"] = "error"
    "If a step after the warm-up needs to compile, or the warm-up finds a graph break. error: stop and name the failed guard; warn: warn, compile it and count it."
    cache: FilePath | None = None
    "File, folder or fsspec URL from which compiled code is loaded before the warm-up and to which it is saved after it."
    on_failure: Literal["warn", "error"] = "warn"
    "If this machine has no working compiler. warn: warn once and train eagerly; error: stop."


@settings
class GraphConfig:
    """The graph engine (train.engine graph): what is captured, and what is done with the graph."""

    passes: Annotated[tuple[str, ...], Field(description=describe_passes())] = ()
    dump: bool = False
    "Write the graphs of each shape before and after every pass into <run>/captured_graphs/, from the main rank."


@settings
class EvalConfig:
    """Evaluation on the eager orig_model."""

    every: Positive | None = None
    "Steps between evaluations; null: only at the end."
    at_start: bool = False
    "Also evaluate before the first step, to compare with later evaluations."
    tasks: tuple[str, ...] = ()
    "What is measured at each evaluation besides the validation loss: families (the held-out built-in task families), mmlu, arc_easy, arc_challenge, hellaswag, piqa, openbookqa, boolq, gsm8k, humaneval, mbpp; with backend lm_eval any task of lm-evaluation-harness."
    backend: Literal["sftkit", "lm_eval"] = "sftkit"
    "What runs the tasks: sftkit, or lm-evaluation-harness (extra eval), in one process."
    data: FilePath | None = None
    "Folder with the rows of the tasks (mmlu_test.jsonl.gz, ...); null: the Hugging Face hub."
    shots: NonNegative | None = None
    "Worked examples before each question; null: the task's own number."
    format: Literal["completion", "chat"] = "completion"
    "completion: a text to continue, as published for base models; chat: a user message in the chat template."
    allow_code_execution: bool = False
    "Run programs that the model writes, in a sandbox; humaneval and mbpp need it."
    max_examples: Positive | None = None
    "Maximum number of examples of a task; with families, of each family; null: all."
    batch_size: Positive = 64
    "Prompts that go through the model together; fewer if memory requires it. Changes speed and memory, not results: exactly in fp32; in bf16 log-likelihoods may change by a few hundredths of a nat."
    max_new_tokens: Positive | None = None
    "Longest answer in tokens; null: the task's own, 32 for families and samples."
    samples: NonNegative = 3
    "Validation prompts answered at each evaluation, kept in samples.jsonl."


@settings
class CheckpointConfig:
    """Checkpoints: written in the background under a temporary name, renamed when complete."""

    every: Positive | None = None
    "Steps between checkpoints; null: only the final one."
    keep: Annotated[int, Field(ge=2, le=LARGEST)] = 2
    "Newest checkpoints kept. One with a file named PINNED in its directory is never deleted."
    best: str | None = None
    "Metric of the evaluations by which the best checkpoint is kept too: val/loss, or any other. Higher is better for names that begin with eval/, except errors such as perplexity; lower for all others."


@settings
class LogConfig:
    """Logging: always to metrics.jsonl and the console, and optionally to dashboards."""

    every: Positive = 10
    "Steps between logged lines."
    trace_at: Annotated[int, Field(ge=2)] | None = None
    "First of three steps that torch.profiler records, in trace/; null: none."
    tracker: Annotated[tuple[Literal["wandb", "tensorboard"], ...], BeforeValidator(one_or_several)] = ("wandb",)
    "Dashboards that get the lines of metrics.jsonl too: wandb, tensorboard (event files in run.dir/tensorboard; extra tensorboard), both, or none: []."
    wandb: Literal["online", "offline", "off"] | None = None
    "How wandb runs; null: online with a wandb key on this machine, offline without; off: not at all."
    project: str = "sftkit"
    "Project on wandb."


@settings
class Config:
    """A recipe."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    adapter: AdapterConfig | None = None
    adapters: tuple[NamedAdapter, ...] | None = None
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


def where_columns(source: SourceConfig) -> dict[str, Any]:
    """Return the conditions of `where` on columns of rows."""
    return {name: value for name, value in (source.where or {}).items() if name not in COUNTED}


def where_counts(source: SourceConfig) -> dict[str, int]:
    """Return the limits of `where` on the size of documents: min_tokens, max_tokens, min_turns, max_turns."""
    return {name: value for name, value in (source.where or {}).items() if name in COUNTED}


def source_label(source: SourceConfig) -> str:
    """Return the name of a source in metrics: its `name`, else the last part of its path without data file suffixes."""
    if source.name is not None:
        return source.name
    whole = source.path.rstrip("/").replace(":", "/")
    # A URL may end with a query; a pattern has the name of the folder that it is for, if there is one.
    label = (re.sub(r"[?].*|/[^/]*[*].*", "", whole) or whole).rpartition("/")[2]
    return re.sub(r"(\.(jsonl|ndjson|csv|tsv|json|parquet|arrow|txt|tar|bin|npy|ds|gz|bz2|xz|zst))+$", "", label)


def has_cuda_graphs(compile: CompileConfig) -> bool:
    """Return whether graphs of the compiler will be recorded as CUDA graphs and replayed."""
    of_mode = compile.mode in ("reduce-overhead", "max-autotune")
    by_option: bool = (compile.options or {}).get("triton.cudagraphs", of_mode)
    return compile.backend == "cudagraphs" or by_option
