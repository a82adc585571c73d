"""Recipes made of the YAML files of TRL, Axolotl and LLaMA-Factory: `sftkit convert FILE`. Their keys mean what the
messages about unknown keys say (hints.yaml). No torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sftkit.config import keys, load, terminal
from sftkit.config.yaml import KeyPath, RecipeLoader, dotted, render_yaml
from sftkit.errors import ConfigError, hint, texts

CONVERT_USAGE = """usage: sftkit convert FILE > recipe.yaml
       sftkit convert --keys

Prints the recipe that a YAML file of TRL (trl sft --config), Axolotl or LLaMA-Factory stands for, with the origin of
each setting, their defaults where ours differ, and below it what was not taken over and why. --keys lists their keys
and ours (docs/coming_from.md)."""
Theirs = Mapping[str, Any]
Named = tuple[str, Any]

_TABLES: Any = texts("config/convert.yaml")
DEFAULTS: dict[str, dict[str, Any]] = _TABLES["defaults"]
"Trainer -> what a file that leaves a key out gets there, where sftkit's default is another."
COPIED: list[str] = _TABLES["copied"]
"Our settings that take their values as they are."
VALUES: dict[str, dict[Any, Any]] = _TABLES["values"]
"Our settings -> their value -> ours."
REASONS: dict[str, str] = _TABLES["reasons"]
"Our settings -> why a value that is not known was not taken over."
_SILENT = {*_TABLES["silent"].split()}
_NUMBERS = {*_TABLES["numbers"].split()}
_STANDARD = _TABLES["standard"]
_COLUMNS = _TABLES["columns"]
_TAGS = _TABLES["tags"]
_FIELDS = _TABLES["fields"]


class _Conversion:
    """A recipe in the making."""

    def __init__(self, trainer: str, given: Theirs, folder: Path) -> None:
        self.trainer = trainer
        self.given = {key: value for key, value in given.items() if value not in (None, "", [], {})}
        self.theirs = {**DEFAULTS[trainer], **self.given}
        self.folder = folder
        self.stage = "base" if given.get("stage") == "pt" or "pretraining_dataset" in given else "sft"
        self.recipe: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        "our key -> the comment behind it"
        self.left: dict[str, str] = {}
        "their key -> why it was not taken over"
        self.notes: list[str] = []

    def put(self, ours: str, value: Any, theirs: str = "") -> None:
        """Set one of our settings, with the key that it comes from."""
        section, _, name = ours.partition(".")
        self.recipe.setdefault(section, {})[name] = value
        if theirs:
            default = "" if any(key in self.given for key in theirs.split(", ")) else f"{self.trainer}'s default of "
            self.origins[ours] = f"{default}{theirs}"

    def first(self, *names: str) -> Named | None:
        """Return (key, value) of the first of these keys that is set."""
        return next(((name, self.theirs[name]) for name in names if name in self.theirs), None)

    def adapter(self) -> bool:
        """Return whether the file trains an adapter."""
        on = self.theirs.get("adapter") in ("lora", "qlora") or bool(self.theirs.get("use_peft"))
        return on or (self.trainer == "LLaMA-Factory" and self.theirs["finetuning_type"] == "lora")

    def table(self) -> None:
        """Take over every key that the tables have."""
        for name, value in self.theirs.items():
            if name in _SILENT:
                continue
            ours = our_key(name)
            if ours is None:
                if value is not False:
                    self.left[name] = keys.instead_of("no_key", name) or "no setting of sftkit is known for it"
            elif ours.startswith("adapter.") and not self.adapter():
                if value is not False and name in self.given:
                    self.left[name] = "the file trains all weights"
            elif ours in COPIED:
                self.put(ours, value, name)
            elif not isinstance(value, (dict, list)) and value in VALUES.get(ours, {}):
                self.put(ours, VALUES[ours][value], name)
            elif value not in (False, "auto", "tokenizer_default"):
                known = VALUES.get(ours)
                allowed = f"known are {', '.join(map(str, known))}" if known else "set it by hand"
                self.left[name] = REASONS.get(ours, f"{ours} has no such value; {allowed}")

    def optimization(self) -> None:
        """Take over what several keys say together: betas, warm-up, length, batch, layout."""
        self.put("optim.betas", [self.theirs["adam_beta1"], self.theirs["adam_beta2"]], "adam_beta1, adam_beta2")
        end = self.theirs.get("lr_scheduler_kwargs")
        if isinstance(end, dict) and "min_lr_rate" in end:
            self.put("optim.min_lr_ratio", end["min_lr_rate"], "lr_scheduler_kwargs")
            del self.left["lr_scheduler_kwargs"]
        steps = self.theirs.get("max_steps", -1)
        name, epochs = self.first("num_train_epochs", "num_epochs") or ("", 1.0)
        if steps > 0:
            self.put("train.max_steps", steps, "max_steps")
        elif float(epochs).is_integer():
            self.put("train.epochs", int(epochs), name)
        else:
            self.left[name] = "epochs are whole numbers: set train.max_steps"
        warm = self.theirs.get("warmup_steps", 0)
        if 0 < warm < 1 or (warm > 0 and steps > 0):
            self.put("optim.warmup_ratio", warm if warm < 1 else round(warm / steps, 6), "warmup_steps")
        elif warm:
            self.left["warmup_steps"] = f"optim.warmup_ratio is a share: {warm} / the steps of the run"
        micro, rows = self.first("micro_batch_size", "per_device_train_batch_size") or ("", 1)
        accumulated = self.theirs["gradient_accumulation_steps"]
        self.put("train.micro_batch_size", rows, micro)
        self.put("train.global_batch_size", rows * accumulated, f"{micro}, gradient_accumulation_steps")
        self.notes.append(hint("batch of all GPUs"))
        packed = any(self.theirs.get(key) for key in ("packing", "sample_packing", "neat_packing"))
        self.put("data.layout", "packed" if packed else "bucketed")
        self.origins["data.layout"] = "as packing there" if packed else "a document a row, as without packing there"
        saved = self.theirs.get("save_strategy", "steps")
        every = self.theirs.get("save_steps", 1)
        if saved != "steps" or every < 1:
            self.recipe.get("checkpoint", {}).pop("every", None)
            self.left["save_steps"] = "checkpoint.every counts steps"
        of_steps = self.theirs.get("eval_strategy", self.theirs.get("evaluation_strategy", "steps")) == "steps"
        if "eval_steps" in self.given and not (of_steps and self.given["eval_steps"] >= 1):
            self.recipe["eval"].pop("every", None)
            self.left["eval_steps"] = "eval.every counts steps"
        if self.recipe.get("checkpoint", {}).get("keep", 2) < 2:
            self.put("checkpoint.keep", 2, "save_total_limit")

    def learned(self) -> None:
        """Take over which tokens are learned, and adapters and their layers."""
        for name, value in (("train_on_inputs", "all"), ("train_on_prompt", "all"), ("mask_history", "last_turn")):
            if self.theirs.get(name):
                self.put("data.targets", value, name)
        if self.trainer == "TRL":
            if self.theirs.get("completion_only_loss") is False:
                self.put("data.targets", "all", "completion_only_loss")
            elif not self.theirs.get("assistant_only_loss") and "completion_only_loss" not in self.theirs:
                self.notes.append(hint("targets of TRL"))
        if not self.adapter():
            return
        self.recipe.setdefault("adapter", {})
        if self.recipe.get("optim", {}).get("name") == "adamw8bit":
            del self.recipe["optim"]["name"]
            self.left["optimizer"] = "an adapter has few states, which are kept in fp32"
        if self.theirs.get("adapter") == "qlora":
            self.put("adapter.base", "nf4", "adapter")
        rank = self.recipe["adapter"].get("rank", 8)
        if self.trainer == "LLaMA-Factory" and "lora_alpha" not in self.theirs:
            self.put("adapter.alpha", 2 * rank, "lora_alpha")
        name, layers = self.first("lora_target", "lora_target_modules") or ("", None)
        if self.theirs.get("lora_target_linear"):
            name = "lora_target_linear"
            layers = "all"
        if layers in ("all", "all-linear", "all_linear"):
            self.put("adapter.targets", ["all-linear"], name)
        elif layers is not None:
            named = [part.strip() for part in layers.split(",")] if isinstance(layers, str) else list(layers)
            self.put("adapter.targets", named, name)
        else:
            self.notes.append(hint("layers of peft", trainer=self.trainer))

    def logging(self) -> None:
        """Take over dashboards."""
        reported = self.theirs.get("report_to", [])
        named = [reported] if isinstance(reported, str) else list(reported)
        named += ["tensorboard"] * bool(self.theirs.get("use_tensorboard")) + ["wandb"] * (
            "wandb_project" in self.given
        )
        trackers = [name for name in dict.fromkeys(named) if name in ("wandb", "tensorboard")]
        source = next((key for key in ("report_to", "use_tensorboard", "wandb_project") if key in self.given), None)
        self.put("log.tracker", trackers, source or "report_to")
        if "wandb_project" in self.given:
            self.put("log.project", self.given["wandb_project"], "wandb_project")
        if others := [name for name in named if name not in (*trackers, "none")]:
            self.left["report_to"] = f"{', '.join(others)}: take wandb or tensorboard; metrics.jsonl has every line"

    def data(self) -> None:
        """Take over the data sets.

        Raises:
            ConfigError: the file names none.
        """
        listed = self.theirs.get("datasets") or self.theirs.get("pretraining_dataset") or []
        train = [source for one in as_list(listed) for source in self.source("datasets", one)]
        val = [source for one in as_list(self.theirs.get("test_datasets", [])) for source in self.source("test", one)]
        if self.trainer == "TRL" and not train and "dataset_name" in self.theirs:
            found: dict[str, Any] = {"path": self.theirs["dataset_name"]}
            found |= {"subset": self.theirs["dataset_config"]} if "dataset_config" in self.theirs else {}
            split = self.theirs.get("dataset_train_split", "train")
            train = [found | ({"split": split} if split != "train" else {})]
            if self.theirs.get("eval_strategy", "no") != "no":
                val = [found | {"split": self.theirs.get("dataset_test_split", "test")}]
        if self.trainer == "LLaMA-Factory":
            train = list(self.named_sources("dataset"))
            val = list(self.named_sources("eval_dataset"))
        if not train:
            raise ConfigError("it names no data set that can be read: name one, and convert it again")
        self.put("data.train", train)
        if val:
            self.put("data.val", val)
        name, share = self.first("val_set_size", "val_size", "test_split_size") or ("", 0)
        if 0 < share < 1 and not val:
            self.put("data.val_fraction", share, name)
        elif share >= 1:
            self.left[name] = "data.val_fraction is a share of the rows"

    def source(self, name: str, one: Theirs | str) -> Iterator[dict[str, Any]]:
        """Yield the sources of a data set of Axolotl or TRL. `name`: the name of its list."""
        one = {"path": one} if isinstance(one, str) else one
        one = {**one, **(one["type"] if isinstance(one.get("type"), dict) else {})}
        found: dict[str, Any] = {"path": one.get("path")}
        for theirs, value in one.items():
            where = f"{name}.{theirs}"
            if value in (None, "", [], {}, False) or theirs in ("path", "type", "ds_type", "data_files"):
                continue
            if theirs == "name":
                found["subset"] = value
            elif theirs in ("split", "revision"):
                found |= {theirs: value} if value != "train" else {}
            elif theirs in _FIELDS:
                found["columns"] = found.get("columns", {}) | (
                    {_FIELDS[theirs]: value} if value != _FIELDS[theirs] else {}
                )
            elif theirs == "system_prompt":
                found["system"] = value
            elif theirs == "roles" and isinstance(value, dict):
                found["roles"] = {alias: role for role, aliases in value.items() for alias in as_list(aliases)}
            elif theirs == "message_property_mappings" and isinstance(value, dict):
                if any(column not in _STANDARD.get(part, (part,)) for part, column in value.items()):
                    self.left[where] = "messages have role and content, or from and value (docs/data_formats.md)"
            elif not (theirs == "roles_to_train" and value == ["assistant"]):
                instead = keys.instead_of("no_key", theirs) or "no setting of a source (docs/data_formats.md)"
                self.left[where] = instead
        if isinstance(one.get("type"), str) and one["type"].partition(".")[0] in ("completion", "pretrain"):
            self.stage = "base"
            self.notes.append("these are texts, and `sftkit base` learns every token; run.stage=mid: with `sftkit mid`")
        files = as_list(one.get("data_files", []))
        if files and found["path"] in ("json", "csv", "parquet", "text", "arrow"):
            yield from ({**found, "path": file} for file in files)
        else:
            yield found | ({"files": files} if files else {})

    def named_sources(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the sources of LLaMA-Factory's data sets, which its dataset_info.json describes."""
        given = self.theirs.get(name, "")
        names = [part.strip() for part in given.split(",")] if isinstance(given, str) else list(given)
        folder = Path(self.theirs.get("dataset_dir", "data"))
        table = next((p for p in (folder, self.folder / folder) if (p / "dataset_info.json").is_file()), None)
        known = json.loads((table / "dataset_info.json").read_text(encoding="utf-8")) if table else {}
        for one in filter(None, names):
            entry = known.get(one)
            if entry is None:
                where = folder / "dataset_info.json"
                self.notes.append(f"{one}: not found in {where}: put the path of its file, or its hub id, for it")
                entry = {"hf_hub_url": one}
            at = entry.get("hf_hub_url") or str((table or folder) / entry.get("file_name", one))
            found: dict[str, Any] = {"path": at}
            found |= {key: entry[key] for key in ("subset", "split") if entry.get(key)}
            if most := self.theirs.get("max_samples") or entry.get("num_samples"):
                found["max_rows"] = most
            given_columns = entry.get("columns", {})
            columns = {_COLUMNS[k]: v for k, v in given_columns.items() if k in _COLUMNS and v != _COLUMNS[k]}
            found |= {"columns": columns} if columns else {}
            given_tags = entry.get("tags", {})
            roles = {v: _TAGS[k] for k, v in given_tags.items() if k in _TAGS and v != _TAGS[k]}
            found |= {"roles": roles} if roles else {}
            parts = {f"{part}_tag": columns for part, columns in _STANDARD.items()}
            lost = [f"columns.{k}" for k in given_columns if k not in _COLUMNS]
            lost += [f"tags.{k}" for k, v in given_tags.items() if k not in _TAGS and v not in parts.get(k, ())]
            lost += ["ranking"] * bool(entry.get("ranking"))
            self.left |= {f"{one}: {key}": "no setting of a source (docs/data_formats.md)" for key in lost}
            yield found


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, and anything else as a list of one."""
    return value if isinstance(value, list) else [value]


def our_key(name: str) -> str | None:
    """Return the setting of ours that a key of theirs means; None if there is none, or several."""
    if found := keys.own_names(name):
        return found[-1] if name in ("optimizer", "optim") else found[0] if len(found) == 1 else None
    if name == "optim":
        return "optim.name"
    same = [key for key in (*COPIED, *VALUES) if key.rpartition(".")[2] == name]
    return same[0] if len(same) == 1 else None


def converted(path: Path) -> str:
    """Return, as text, the recipe that does what a file of another trainer does.

    Raises:
        ConfigError: there is no such file, it is no YAML, of no trainer that is known, or trains what sftkit does not.
    """
    try:
        text = path.read_text(encoding="utf-8")
        given = yaml.load(text, Loader=RecipeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        what = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(f"{path}: {what}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: no mapping of keys")
    trainer = next((name for name, marks in _TABLES["marks"].items() if given.keys() & {*marks}), None)
    if trainer is None:
        own = ": it is a recipe of sftkit" if {"extends", "run", "data"} & given.keys() else ""
        raise ConfigError(f"{path}: no keys of {', '.join(DEFAULTS)}{own}\n\n{CONVERT_USAGE}")
    stage = given.get("stage", "sft")
    if stage not in ("sft", "pt") or given.get("rl") or given.get("reward_model") is True:
        raise ConfigError(f"{path}: {keys.instead_of('no_key', 'rl')}")
    _check_numbers(given, text, path)
    made = _Conversion(trainer, given, path.parent)
    try:
        made.table()
        made.optimization()
        made.learned()
        made.logging()
        made.data()
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(f"{path}: a value is not one that {trainer} takes: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    made.recipe.setdefault("run", {}).setdefault("dir", f"runs/{path.stem}")
    made.put("run.stage", made.stage)
    order = [section for section in keys.section_classes() if section in made.recipe]
    text = render_yaml({section: made.recipe[section] for section in order}, lambda at: made.origins.get(_key(at), ""))
    head = [
        f"made by sftkit convert of a file of {trainer}; the comment behind a setting is its key there",
        *made.notes,
    ]
    lines = [*(f"# {line}" for line in head), f"# sftkit {made.stage} THIS_FILE", text.rstrip("\n")]
    if made.left:
        lines += ["", "# Not taken over:", *(f"#   {key}: {reason}" for key, reason in made.left.items())]
    return "\n".join(lines)


def _check_numbers(given: Theirs, text: str, path: Path) -> None:
    """Reject words where numbers are expected. `text`: of the file at `path`."""
    whole = yaml.compose(text, Loader=RecipeLoader)
    assert whole is not None, "it is a mapping"
    lines = {key.value: key.start_mark.line + 1 for key, _ in whole.value}
    problems = []
    for name, value in given.items():
        ours = our_key(str(name))
        is_number = name in _NUMBERS or (ours in COPIED and keys.key_table()[ours].kind.startswith(("int", "number")))
        if is_number and value and isinstance(value, str | list | dict):
            place = f"{path}:{lines.get(name, 1)}: {name}"
            problems.append(hint("word for a number", place=place, value=keys.shorten(value)))
    if problems:
        raise ConfigError("\n".join(problems))


def _key(at: KeyPath) -> str:
    return dotted(at[:2])


def key_tables() -> str:
    """Return their keys and ours as two tables of Markdown: keys that mean settings, and keys that have none."""
    hints = keys.hints()
    rows = ["| sftkit | keys of other trainers | it takes |", "|---|---|---|"]
    named: list[tuple[str, str]] = list(hints["other_names"].items())
    named += [(f"data.train.N.{ours}", theirs) for ours, theirs in hints["of_sources"].items()]
    for ours, theirs in named:
        cell = ", ".join(f"`{key}`" for key in ours.split(", "))
        names = ", ".join(f"`{key}`" for key in theirs.split())
        rows.append(f"| {cell} | {names} | {hints['takes'].get(ours, '')} |")
    rows += ["", "| keys of other trainers | instead |", "|---|---|"]
    for instead, theirs in hints["no_key"].items():
        rows.append(f"| {', '.join(f'`{key}`' for key in theirs.split())} | {instead} |")
    return "\n".join(rows)


def print_recipe(words: Sequence[str]) -> None:
    """Print what the words of `sftkit convert` ask for. Exits with code 2 if they are wrong."""
    if words in (["-h"], ["--help"]):
        terminal.print_text(CONVERT_USAGE)
    elif words == ["--keys"]:
        terminal.print_text(key_tables())
    elif len(words) != 1 or words[0].startswith("-"):
        load.fail(CONVERT_USAGE)
    else:
        try:
            text = converted(Path(words[0]))
        except ConfigError as error:
            load.fail(f"\nerror: {error}")
        terminal.print_text(text)
