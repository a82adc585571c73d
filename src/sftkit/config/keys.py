"""Every key of a recipe, dotted, with its type, default and meaning from schema.py: for --help, and for messages about
a wrong value or an unknown key, with the key that was probably meant. Names of other trainers are understood too."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import ErrorDetails

from sftkit.config.commands import typed
from sftkit.config.schema import Config
from sftkit.config.yaml import KeyPath, Plain, dotted, keys_of

JsonSchema = dict[str, Any]
"A JSON schema, as pydantic types it: Any, for its keys have values of many types."
USAGE = "RECIPE.yaml [key.sub=value ...] [--print-config] [--help]"


@functools.cache
def adapter() -> TypeAdapter[Config]:
    """Return pydantic's validator of Config; it takes a moment to build, so it is built once."""
    return TypeAdapter(Config)


@dataclasses.dataclass(frozen=True)
class Key:
    """One setting as help shows it."""

    kind: str
    doc: str
    required: bool
    default: Plain
    is_path: bool
    "Its text is a path, or may be one."


@functools.cache
def key_table() -> dict[str, Key]:
    """Return every dotted key in the order of schema.py. N stands for the index of a list item, PATH for a key of a
    mapping of modules."""
    return dict(_rows("Config", ""))


@functools.cache
def section_classes() -> dict[str, str]:
    """Return section name -> name of its class."""
    return {section: str(name).removesuffix(" | None") for section, name in Config.__annotations__.items()}


@functools.cache
def optional_sections() -> frozenset[str]:
    """Return the sections that a recipe may leave out as a whole, with a meaning of its own."""
    return frozenset(section for section, name in Config.__annotations__.items() if str(name).endswith(" | None"))


@functools.cache
def _classes() -> dict[str, JsonSchema]:
    """Return class -> its schema, whose descriptions are the docstring and the strings under the fields."""
    schema = adapter().json_schema()
    return {**schema["$defs"], "Config": schema}


def _rows(name: str, prefix: str) -> Iterator[tuple[str, Key]]:
    schema = _classes()[name]
    for field, prop in schema["properties"].items():
        target = _target(prop)
        parts = (prop, *prop.get("anyOf", ()))
        key = prefix + field
        if prefix:
            required = field in schema.get("required", ())
            is_path = any(part.get("format") == "path" for part in parts)
            yield key, Key(_kind(prop), prop["description"], required, prop.get("default"), is_path)
        if target:
            named = any("additionalProperties" in part for part in parts)
            inner = f"{key}.N." if prop.get("type") == "array" else f"{key}.PATH." if named else f"{key}."
            yield from _rows(target, inner)


def _target(prop: JsonSchema) -> str | None:
    """Return the class that a property, its items or values, or its non-null alternative refers to."""
    parts = (prop, prop.get("items", {}), *prop.get("anyOf", ()), *prop.get("allOf", ()))
    for part in (*parts, *(part.get("additionalProperties") for part in parts if isinstance(part, dict))):
        if isinstance(part, dict) and "$ref" in part:
            reference: str = part["$ref"]
            return reference.rpartition("/")[2]
    return None


def _kind(prop: JsonSchema) -> str:
    if "anyOf" in prop:
        return " | ".join(_kind(part) for part in prop["anyOf"])
    if "enum" in prop or "const" in prop:
        return " | ".join(json.dumps(value).strip('"') for value in prop.get("enum") or [prop["const"]])
    # pydantic writes `gt` as exclusiveMinimum; an upper bound is told of fractions alone, others have LARGEST.
    low = next((f" {sign} {prop[b]:g}" for b, sign in (("exclusiveMinimum", ">"), ("minimum", ">=")) if b in prop), "")
    if "minimum" in prop and "maximum" in prop and prop["type"] == "number":
        return f"number {prop['minimum']:g} to {prop['maximum']:g}"
    if prop.get("type") == "array":
        items = prop.get("items") if isinstance(prop.get("items"), dict) else (prop.get("prefixItems") or [{}])[0]
        return f"list of ({_kind(items or {})})"
    kind: str = prop.get("type", "object")
    words = {"integer": "int", "boolean": "true | false", "string": "text", "object": "mapping"}
    return words.get(kind, kind) + low


def row_of(keys: KeyPath) -> str:
    """Return the key of `key_table` for a place in a recipe."""
    parts: list[str] = []
    for key in keys:
        named = f"{'.'.join(parts)}.PATH"
        parts.append("N" if isinstance(key, int) else "PATH" if named in _mappings() else key)
    return ".".join(parts)


@functools.cache
def _mappings() -> frozenset[str]:
    """Return `key.PATH` of every mapping whose values are settings."""
    return frozenset(key.rpartition(".")[0] for key in key_table() if key.rpartition(".")[0].endswith(".PATH"))


def shorten(value: object) -> str:
    """Format a value for a message, cut to 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def help_text(description: str, command: str) -> str:
    """Return the text of --help: every key with type, default and meaning, in 100 columns."""
    lines = [f"usage: {command} {USAGE}", "", typed(description.strip()), ""]
    lines += ["Values are YAML: optim.lr=2e-5 data.bucket_lengths=[128,256] train.epochs=null data.val.0.repeat=2"]
    for section, cls in section_classes().items():
        lines += ["", f"{section}: {_classes()[cls]['description']}"]
        for key, row in key_table().items():
            if key.split(".")[0] != section:
                continue
            default = "required" if row.required else f"default {shorten(row.default).strip(chr(34))}"
            head = f"  {key}  {row.kind}"
            room = 100 - len(default) - 3
            # Key, kind and default on one line where they fit in 100 columns; else the default has the next line.
            if len(head) <= room:
                lines += [f"{head:<{room}}  {default}"]
            else:
                lines += [*([head] if len(head) <= 100 else [f"  {key}", f"      {row.kind}"]), f"{default:>99}"]
            lines += textwrap.wrap(row.doc, 100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


_OTHER_NAMES = {
    "optim.lr": "learning_rate peak_lr max_lr base_lr",
    "optim, optim.name": "optimizer optimizer_name",
    "optim.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optim.eps": "adam_epsilon adam_eps epsilon",
    "optim.max_grad_norm": "grad_clip clip_grad clip_grad_norm gradient_clip_val gradient_clipping max_norm",
    "optim.schedule": "lr_scheduler lr_scheduler_type lr_schedule scheduler",
    "optim.warmup_ratio": "warmup warmup_steps num_warmup_steps lr_warmup_steps warmup_iters",
    "optim.min_lr_ratio": "min_lr min_learning_rate",
    "train.epochs": "num_train_epochs num_epochs max_epochs n_epochs",
    "train.max_steps": "steps num_steps train_steps total_steps max_train_steps num_train_steps max_iters iterations",
    "train.global_batch_size, train.micro_batch_size": "batch_size train_batch_size",
    "train.micro_batch_size": "per_device_train_batch_size per_device_batch_size per_gpu_train_batch_size "
    "device_batch_size",
    "train.global_batch_size": "gradient_accumulation_steps gradient_accumulation grad_accum_steps accumulation_steps "
    "accumulate_grad_batches",
    "train.precision": "bf16 fp16 mixed_precision dtype torch_dtype",
    "train.resume": "resume_from resume_from_checkpoint",
    "data.max_length": "max_seq_length max_seq_len seq_length seq_len sequence_length sequence_len context_length "
    "context_len block_size cutoff_len model_max_length",
    "data.train": "dataset datasets dataset_name dataset_path train_dataset train_data train_file train_files "
    "data_path",
    "data.val": "eval_dataset val_dataset validation_dataset val_data validation_data val_file validation_file",
    "data.layout": "packing packed sample_packing",
    "data.targets": "train_on_inputs train_on_prompt train_on_input assistant_only_loss completion_only_loss",
    "data.num_workers": "dataloader_num_workers",
    "data.num_proc": "dataset_num_proc preprocessing_num_workers",
    "adapter.rank": "r lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "target_modules lora_target lora_targets lora_target_modules",
    "adapter.scaling": "use_rslora",
    "adapter.method": "use_dora",
    "adapter": "lora peft peft_config lora_config use_peft",
    "model.path": "model_name model_name_or_path pretrained_model_name_or_path base_model",
    "model.tokenizer": "tokenizer_name tokenizer_name_or_path",
    "train.memory": "gradient_checkpointing activation_checkpointing use_gradient_checkpointing",
    "attention.backend": "attn_implementation attn flash_attn flash_attention flash_attention_2 use_flash_attention",
    "compile.enabled": "compile torch_compile compile_model use_compile",
    "loss.label_smoothing": "label_smoothing_factor",
    "checkpoint.every": "save_steps save_every save_interval save_freq checkpoint_steps checkpoint_interval ckpt_every",
    "checkpoint.keep": "save_total_limit max_checkpoints keep_last_n keep_checkpoints",
    "checkpoint.best": "metric_for_best_model load_best_model_at_end",
    "eval.every": "eval_steps eval_interval eval_freq evaluation_steps val_every val_interval",
    "eval.batch_size": "per_device_eval_batch_size",
    "log.every": "logging_steps logging_every log_steps log_interval log_freq print_every",
    "log.tracker": "report_to logger",
    "log.project": "wandb_project",
    "run.dir": "output_dir out_dir output save_dir run_name experiment_name",
    "run.seed": "random_seed",
}
"Our keys -> the last parts of others' keys."
REMARKS = {
    "optim.warmup_ratio": "a share of the steps",
    "optim.min_lr_ratio": "a share of optim.lr",
    "train.global_batch_size": "accumulation follows from it and train.micro_batch_size",
    "train.precision": "bf16 or fp32",
    "adapter.scaling": "standard or rslora",
    "adapter.method": "lora or dora",
    "train.memory": "balanced or low",
    "data.layout": "packed",
    "checkpoint.best": "a metric, such as val/loss",
}
"What our keys take where it is not what the others' take."
OWN_NAMES = {name: tuple(ours.split(", ")) for ours, names in _OTHER_NAMES.items() for name in names.split()}
"Another trainer's name -> our keys."
_REMOVED = {
    "checkpoint.pin_every": "put a file named PINNED into a step directory that is to stay, or raise checkpoint.keep",
    "compile.modules.PATH.dynamic": "compile.dynamic holds for all modules",
    "compile.modules.PATH.enabled": "name the modules that are to be compiled, and no others",
    "compile.modules.PATH.fullgraph": "compile.fullgraph holds for all modules",
    "log.group": "set the environment variable WANDB_RUN_GROUP",
    "log.notes": "set the environment variable WANDB_NOTES",
    "log.tags": "set the environment variable WANDB_TAGS, with commas between the tags",
    "model.gradient_checkpointing": "train.memory=balanced or low recomputes activations, compiled or not",
}
"Keys of earlier versions -> what to do instead."
_SECTIONS = {"save": "checkpoint", "ckpt": "checkpoint", "logging": "log", "evaluation": "eval", "training": "train"}


def own_names(name: str) -> tuple[str, ...]:
    """Return the keys that another trainer's name means, or that a section and a key joined by _ mean (`log_every`)."""
    if name in OWN_NAMES:
        return OWN_NAMES[name]
    head, _, tail = name.partition("_")
    joined = f"{_SECTIONS.get(head, head)}.{tail}"
    return (joined,) if joined in key_table() else ()


def explain_error(error: ErrorDetails, keys: KeyPath) -> tuple[str, list[KeyPath]]:
    """Return what is wrong in words, and the keys that were probably meant."""
    kind = error["type"]
    context = error.get("ctx", {})
    got = shorten(error.get("input"))
    key = key_table().get(row_of(keys))
    if kind == "unexpected_keyword_argument":
        return _unknown(keys)
    if kind in ("missing", "missing_argument"):
        return (f"is required: {key.doc}" if key and not isinstance(keys[-1], int) else "has too few values"), []
    null = bool(key and key.kind.endswith("| null"))
    if kind == "literal_error":
        allowed = [text or word.lower() for text, word in re.findall(r"'([^']*)'|(True|False)", context["expected"])]
        near = difflib.get_close_matches(str(error["input"]), allowed, n=1)
        hint = f' Did you mean "{near[0]}"?' if near else ""
        return f"{got} is not one of {', '.join(allowed + ['null'] * null)}.{hint}", []
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}{' or null' * null}, not {got}{_in_brackets(error, keys)}", []
    if kind in _BOUNDS:
        return f"must be {_BOUNDS[kind]} {next(iter(context.values()))}, not {got}", []
    return f"{error['msg']}, got {got}", []


def _in_brackets(error: ErrorDetails, keys: KeyPath) -> str:
    """Return how to write a single value, or several with commas, as the list that is wanted; empty where it is none,
    or its items are mappings."""
    key = key_table().get(row_of(keys))
    value = error["input"]
    if error["type"] != "tuple_type" or key is None or "mapping" in key.kind or isinstance(value, dict) or not value:
        return ""
    listed = f"[{value}]"
    return f': write {keys[-1]}: {listed} in a recipe, "{dotted(keys)}={listed}" on the command line'


_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text (quote it)",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys",
    "dataclass_type": "a mapping of keys",
}


_BOUNDS = {
    "greater_than": "greater than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}


def _unknown(keys: KeyPath) -> tuple[str, list[KeyPath]]:
    """Return what to say of an unknown key, and the keys that were probably meant."""
    name = str(keys[-1])
    parent = row_of(keys[:-1])
    prefix = f"{parent}." if parent else ""
    inside = [key.removeprefix(prefix) for key in key_table() if key.startswith(prefix)]
    level = [key for key in inside if "." not in key] if parent else list(section_classes())
    elsewhere = [key for key in key_table() if key.rpartition(".")[2] == name]
    if row_of(keys) in key_table() or name in key_table():
        return f"a dotted key works on the command line only: nest it here as {name.replace('.', ': {')}: ...", []
    if instead := _REMOVED.get(row_of(keys)):
        return f"was removed: {instead}", []
    # What was meant, best first: what other trainers call it, the same name elsewhere, a name like it here, a name like
    # it anywhere. An item of a list, or a module, has settings of its own, which no other trainer has.
    others = own_names(name) if len(keys) <= 2 else ()
    siblings = [prefix + near for near in difflib.get_close_matches(name, level, n=1)]
    section = [name] if name in section_classes() else []
    near_names = difflib.get_close_matches(name, {key.rpartition(".")[2] for key in key_table()}, n=1, cutoff=0.75)
    distant = [key for key in key_table() if key.rpartition(".")[2] in near_names]
    meant = [_indexed(key, keys) for key in others or elsewhere or siblings or section or distant]
    if meant:
        quoted = " or ".join(f'"{key}"' for key in meant)
        takes = f" ({REMARKS[others[0]]})" if len(others) == 1 and others[0] in REMARKS else ""
        return f"is not a known key. Did you mean {quoted}{takes}?", [keys_of(key) for key in meant]
    return f"is not a known key. Known here: {', '.join(level)}", []


def _indexed(key: str, keys: KeyPath) -> str:
    """Return a key of the table with its N and PATH filled in: from `keys` where both are in the same list or mapping,
    else as 0 and PATH."""
    parts = key.split(".")
    same = [len(keys) > i and row_of(keys[: i + 1]).split(".") == parts[: i + 1] for i in range(len(parts))]
    instead = {"N": "0", "PATH": "PATH"}
    return ".".join(str(keys[i]) if same[i] else instead.get(part, part) for i, part in enumerate(parts))
