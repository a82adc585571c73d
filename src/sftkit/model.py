"""The model and tokenizer that a stage starts from: new, a local folder, a run's checkpoint, or the hub."""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from accelerate import init_empty_weights
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from sftkit.config import ModelConfig, SourceConfig, TokenizerTraining
from sftkit.errors import ConfigError
from sftkit.hub import hub_answers
from sftkit.tokenizer import train_tokenizer, training_texts

if TYPE_CHECKING:
    from sftkit.runtime import Runtime

LATEST = "LATEST"
"Text file in a run directory: the name of its newest complete checkpoint."
STATE = "training_state"
"Folder of a step directory with all that plain transformers does not need: optimizer, random states, step."

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"What configs call the number of routed experts of a block."
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

TURN_MARK = re.compile(r"<\|\w+\|>")


def resolve(path: str) -> str:
    """A loadable folder or hub id: a run directory stands for its latest checkpoint.

    Raises:
        ConfigError: a local path that does not exist or holds no model.
    """
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return str(folder)
    if (folder / LATEST).is_file():
        return resolve(str(folder / (folder / LATEST).read_text().strip()))
    if folder.is_dir():
        raise ConfigError(
            f"{path}: no config.json and no {LATEST} in it, so neither a model nor a run with a checkpoint"
        )
    if path.startswith((".", "/", "~", "runs/")) or path.count("/") > 1:
        hint = "; run the stage before this one first (make base, make mid)" if path.startswith("runs/") else ""
        raise ConfigError(f"{path}: no such folder{hint}")
    return path


def newest_run(root: str = "runs") -> str:
    """The run directory under `root` whose checkpoint was written last.

    Raises:
        ConfigError: there is none.
    """
    found = [path for path in Path(root).glob(f"**/{LATEST}") if ".old-" not in str(path)]
    if not found:
        raise ConfigError(f"{root}/: no run with a checkpoint; make one (make smoke, make sft) or name a model")
    return str(max(found, key=lambda path: path.stat().st_mtime).parent)


def load_options(path: str, model: ModelConfig) -> dict[str, object]:
    """Arguments for from_pretrained; an unreachable hub means the local cache only, at once."""
    is_local = os.path.isdir(path)
    return {
        "revision": model.revision or "main",
        "trust_remote_code": model.trust_remote_code,
        "local_files_only": is_local or not hub_answers(),
    }


def offline_help(path: str, error: Exception, kind: str = "model") -> ConfigError:
    """What to put where when a hub name cannot be fetched."""
    if os.path.isdir(path) or hub_answers():
        return ConfigError(f"{path}: cannot load the {kind}: {str(error).splitlines()[0]}")
    return ConfigError(
        f"{path}: the Hugging Face hub cannot be reached and this {kind} is not in the local cache. On a machine with "
        f"network run `hf download {path} --local-dir DIR`, copy DIR here and set model.path=DIR"
    )


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.tokenizer`, else the one beside `model.path`, with `model.chat_template` if set."""
    own = model.tokenizer is not None and (Path(model.tokenizer) / "tokenizer_config.json").is_file()
    path = str(model.tokenizer) if own else resolve(model.tokenizer or model.path or "")
    options = load_options(path, model) | ({"revision": "main"} if model.tokenizer else {})
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise offline_help(path, error, "tokenizer") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"{path}: a slow tokenizer has no character offsets, which the loss mask needs; convert it")
    if model.chat_template is not None:
        tokenizer.chat_template = read_template(model.chat_template)
        missing = [t for t in TURN_MARK.findall(tokenizer.chat_template) if t not in tokenizer.get_vocab()]
        if missing:
            raise ConfigError(
                f"model.chat_template: {model.chat_template} writes {missing[0]}, which is no token of {path}; take a "
                "template made for this tokenizer, or add the token and resize the model first"
            )
    return with_pad_token(tokenizer)


def read_template(path: str) -> str:
    """The text of a chat template file."""
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"model.chat_template: {path}: {error.strerror}") from error


def with_pad_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Padding positions are never attended and never targets, so any token will do where a tokenizer has none."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def base_tokenizer(
    model: ModelConfig,
    train: tuple[SourceConfig, ...],
    on_bad_row: Literal["error", "skip"],
    run_dir: Path,
    rt: Runtime,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a base run: trained by rank 0 on its sources and kept in the run directory, or loaded."""
    if model.train_tokenizer is None:
        return load_tokenizer(model)
    folder = run_dir / "tokenizer"
    if rt.is_main and not folder.exists():
        temporary = run_dir / ".tokenizer.tmp"
        new_tokenizer(model, model.train_tokenizer, train, on_bad_row).save_pretrained(temporary)
        os.rename(temporary, folder)
    rt.barrier()
    return AutoTokenizer.from_pretrained(folder)


def new_tokenizer(
    model: ModelConfig,
    training: TokenizerTraining,
    train: tuple[SourceConfig, ...],
    on_bad_row: Literal["error", "skip"],
) -> PreTrainedTokenizerBase:
    """A tokenizer trained on its sources, with `model.chat_template` or our own template."""
    template = model.chat_template or str(Path(__file__).parent / "data" / "chatml.jinja")
    texts = training_texts(training.sources or train, on_bad_row)
    return train_tokenizer(texts, training.vocab_size, read_template(template))


def load_model(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int, precision: str = "fp32", empty: bool = False
) -> PreTrainedModel:
    """The model with room for every token, its weights in the precision of the run: bf16 or fp32.

    The optimizer keeps what bf16 weights would lose of an update, see optim.py.

    Args:
        empty: a model with `model.path` comes without memory for its weights (on the meta device): it will be sharded, and
            each rank then reads only its own pieces (weights.py).

    Raises:
        ConfigError: nothing there, a config that transformers refuses, or a tokenizer larger than the vocabulary.
    """
    if model.scratch is not None:
        orig_model = from_scratch(model.scratch, tokenizer, seed, precision)
    else:
        path = resolve(model.path or "")
        try:
            options = load_options(path, model)
            if empty:
                orig_model = empty_model(path, precision, options)
            else:
                orig_model = AutoModelForCausalLM.from_pretrained(
                    path, dtype=DTYPES[precision], attn_implementation="sdpa", **options
                )
        except (OSError, ValueError) as error:
            raise offline_help(path, error) from error
    if len(tokenizer) > vocab_size(orig_model):
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, the model embeds {vocab_size(orig_model)}: take the tokenizer that belongs "
            "to the model (model.tokenizer=null), or a model.scratch that fits"
        )
    generation = orig_model.generation_config
    if any(getattr(generation, name, None) not in (None, 1.0) for name in ("temperature", "top_p")):
        generation.do_sample = True  # what such values mean; transformers refuses to save them without it
    if getattr(orig_model.config.get_text_config(), "attn_logit_softcapping", None):
        orig_model.set_attn_implementation("eager")  # transformers' sdpa leaves the soft cap out
    if model.gradient_checkpointing:
        orig_model.gradient_checkpointing_enable({"use_reentrant": False})
    if precision == "fp32" and orig_model._can_set_experts_implementation():
        orig_model.set_experts_implementation("batched_mm")  # the fp32 fallback of grouped_mm cannot be traced
    return orig_model


def empty_model(path: str, precision: str, options: dict[str, object]) -> PreTrainedModel:
    """The model at this path, buffers computed, parameters on the meta device."""
    config = AutoConfig.from_pretrained(path, **options)
    with no_init_weights(), init_empty_weights(include_buffers=False):
        orig_model = AutoModelForCausalLM.from_config(
            config,
            dtype=DTYPES[precision],
            attn_implementation="sdpa",
            trust_remote_code=options["trust_remote_code"],
        )
    orig_model.tie_weights()
    orig_model.name_or_path = path
    with suppress(OSError):  # the model has none: that of its config stays
        orig_model.generation_config = GenerationConfig.from_pretrained(path, **options)  # type: ignore[arg-type]
    return orig_model


def from_scratch(
    fields: dict[str, object], tokenizer: PreTrainedTokenizerBase, seed: int, precision: str = "fp32"
) -> PreTrainedModel:
    """Random weights from a transformers config; the vocabulary and its special ids come from the tokenizer."""
    fields = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **fields,
    }
    torch.manual_seed(seed)
    try:
        config = AutoConfig.for_model(str(fields.pop("model_type")), **fields)
        orig_model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.scratch: transformers refuses this config: {error}") from error
    for parameter in orig_model.parameters():  # not buffers: rotary frequencies stay fp32
        parameter.data = parameter.data.to(DTYPES[precision])
    return orig_model


def inherit(
    model: ModelConfig,
    max_length: int | None,
    tokenizer: PreTrainedTokenizerBase,
    precision: str,
    positions: int | None = None,
) -> tuple[int, str]:
    """The row length, taken from the run that the model comes from unless set, and a line that says what is inherited.

    Raises:
        ConfigError: no row length anywhere, or one of more than `positions`, the most that the model has.
    """
    state = Path(resolve(model.path)) / STATE / "state.json" if model.path else None
    parent = json.loads(state.read_text()).get("max_length") if state is not None and state.is_file() else None
    length = max_length or parent
    if length is None:
        raise ConfigError(
            f"data.max_length: {model.path or 'a new model'} has no earlier run to inherit it from; set it, say 2048"
        )
    if positions is not None and length > positions:
        raise ConfigError(f"data.max_length: {length} is more than the model's {positions} positions")
    start = f"from {resolve(model.path)}" if model.path else "new model"
    template = (
        hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:8] if tokenizer.chat_template else "none"
    )
    how = "set in the recipe" if max_length else "inherited"
    return length, (
        f"{start}: tokenizer of {len(tokenizer):,} tokens (chat template {template}), max_length {length} ({how}), "
        f"{precision}"
    )


def vocab_size(orig_model: PreTrainedModel) -> int:
    """Rows of the input embedding, which may be more than the tokenizer has tokens."""
    return embedding_of(orig_model).shape[0]


def positions(orig_model: PreTrainedModel) -> int | None:
    """The most positions that the model was made for, None if its config does not say."""
    return getattr(orig_model.config.get_text_config(), "max_position_embeddings", None)


def embedding_module(orig_model: PreTrainedModel) -> torch.nn.Module:
    """The module of the input embedding."""
    found = orig_model.get_input_embeddings()
    assert isinstance(found, torch.nn.Module)
    return found


def embedding_of(orig_model: PreTrainedModel) -> torch.Tensor:
    """The input embedding, [V, H]."""
    weight = embedding_module(orig_model).weight
    assert isinstance(weight, torch.Tensor)
    return weight


def decoder(orig_model: PreTrainedModel) -> torch.nn.Module:
    """The model without its head: token ids in, hidden states out."""
    found = orig_model.get_decoder()
    assert isinstance(found, torch.nn.Module)
    return found


def head(orig_model: PreTrainedModel) -> torch.nn.Linear:
    """The output projection: weight [V, H], bias [V] or None."""
    found = orig_model.get_output_embeddings()
    if not isinstance(found, torch.nn.Linear):
        raise ConfigError(f"{type(orig_model).__name__} is not supported: it has no linear output projection")
    return found


def logit_softcap(orig_model: PreTrainedModel) -> float | None:
    """c of logits = c * tanh(logits / c), None where the model has none."""
    return getattr(orig_model.config.get_text_config(), "final_logit_softcapping", None)


def class_name(module: torch.nn.Module) -> str:
    """The name of a module's class; of a sharded module that without FSDP's own class in front."""
    return next(cls.__name__ for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def decoder_blocks(orig_model: PreTrainedModel) -> list[torch.nn.Module]:
    """The repeated blocks of the model, as transformers names them for device placement."""
    names = set(getattr(orig_model, "_no_split_modules", None) or ())
    return [module for module in orig_model.modules() if class_name(module) in names]


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters; `body` and `head` are those in matrix products (and the norms beside them)."""

    total: int
    body: int
    "of the blocks and norms; of routed experts only the share that a token visits"
    head: int
    "of the output projection, which may be the input embedding too"


def count_parameters(orig_model: PreTrainedModel) -> ParameterCount:
    """Parameters by the work they take per token."""
    total = sum(p.numel() for p in orig_model.parameters())
    embedding, projection = embedding_of(orig_model), head(orig_model)
    tied = projection.weight is embedding
    in_head = sum(p.numel() for p in projection.parameters())
    body = total - in_head - (0 if tied else embedding.numel())
    config = orig_model.config.get_text_config()
    experts = next((n for k in EXPERT_COUNTS if (n := getattr(config, k, None))), None)
    if experts:
        routed = [m for m in orig_model.modules() if type(m).__name__.endswith("Experts")]
        idle = 1.0 - config.num_experts_per_tok / experts
        body -= int(idle * sum(p.numel() for m in routed for p in m.parameters()))
    return ParameterCount(total, body, in_head)


def train_flops(orig_model: PreTrainedModel, num_tokens: int, num_targets: int, attention_pairs: int) -> float:
    """FLOPs of forward and backward without recomputation, of what the step computes: 6 per parameter of the blocks and
    token, 6 per parameter of the head and target, 6 x layers x heads x (query head + value head
    size) per (query, key) pair (PaLM,
    appendix B, counted per document instead of per row). Layers that slide a window count as if it were never reached."""
    config = orig_model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = (getattr(config, "qk_head_dim", None) or head_dim) + (getattr(config, "v_head_dim", None) or head_dim)
    per_pair = 6 * config.num_hidden_layers * config.num_attention_heads * sizes
    counted = count_parameters(orig_model)
    return 6.0 * (counted.body * num_tokens + counted.head * num_targets) + float(per_pair) * attention_pairs
