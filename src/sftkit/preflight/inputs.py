"""Check before a run starts, without torch, that what its recipe names exists and fits: data with columns that the
stage learns from, the model, the run before, the metric that checkpoint.best names, and an engine that can run on the
processes of the launch.

Launcher, chain and scripts read a recipe with these rules, so that one report has all that is missing and all that
is wrong. They look at first records and file names; a run finds what shows only when it is loaded. What the config
leaves to the defaults of transformers, and a model whose config is not there yet, is left to the engines, which ask
the same rules (config/rules.py).
"""

import difflib
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache

from sftkit.config import rules as recipe_rules
from sftkit.config import schema
from sftkit.config.commands import similar_paths
from sftkit.config.keys import adapter, section_classes
from sftkit.config.load import to_yaml
from sftkit.config.rules import Get, OfLaunch, Problem, Rule
from sftkit.config.tables import CHAT_TEMPLATES, METRICS_IN_CHAT, STAGE_SCRIPTS, TASK_METRICS
from sftkit.config.topology import Topology
from sftkit.config.yaml import RecipeLoader, flattened
from sftkit.data.reading import columns, conversation, readers, rows
from sftkit.data.reading import origin as hub
from sftkit.data.reading.origin import find_here
from sftkit.data.reading.readers import RawRow
from sftkit.data.types import Row
from sftkit.errors import ConfigError, DataError, LeftOut, did_you_mean, hint
from sftkit.models import files as model_files
from sftkit.models.trained import frozen_names, pattern_problem, unmatched
from sftkit.rundir import names as rundir
from sftkit.rundir.files import WEIGHTS, read_base_digest, read_manifest
from sftkit.runtime.hub import find_model
from sftkit.runtime.launcher import may_have_gpu
from sftkit.runtime.script import counted, first_of

OF_CAPTIONS = tuple(f"eval/captions/{metric}" for metric in ("exact_match", "token_f1", "low", "high"))
"Metrics that a captioning run writes for the captions of its data.val (evals/scoring.py)."


def best(get: Get, stage: str | None) -> Iterator[Problem]:
    """Reject a run that names, in checkpoint.best, a metric which it never writes: it would train to its end and keep
    no best checkpoint."""
    wanted = get("checkpoint.best")
    tasks = get("eval.tasks")
    validation = [*get("data.val"), *(get("data.train") if get("data.val_fraction") else ())]
    if wanted is None or get("eval.every") is None or not (tasks or validation):  # the last two have rules of their own
        return
    # The names that evals.suite.validate gives values of validation sources, those of all together first.
    prefixes = (
        ["val", *(f"val/{schema.source_label(schema.SourceConfig(**one))}" for one in validation)] if validation else []
    )
    names = [f"{prefix}/{metric}" for prefix in prefixes for metric in ("loss", "bpb")]
    of_others = get("eval.backend") == "lm_eval" and tasks  # whose names are known when it has run
    names += [] if of_others else task_metrics(tasks, get("eval.format"))
    if stage == "caption" and validation:
        names += OF_CAPTIONS
    if wanted not in names and not (of_others and wanted.startswith("eval/")):
        listed = f"{first_of(names, 8)}.{did_you_mean(wanted, names)}"
        yield "checkpoint.best", f'"{wanted}" is no metric that an evaluation of this run writes: {listed}'


def task_metrics(tasks: Sequence[str], format: str) -> list[str]:
    """Return the names that evals.results.values_of gives the values of our tasks."""
    from sftkit.data.demo.builtin import FAMILIES

    names = []
    for task in tasks:
        metrics = METRICS_IN_CHAT.get(task, TASK_METRICS[task]) if format == "chat" else TASK_METRICS[task]
        names += [f"eval/{task}/{metric}" for metric in (*metrics, "low", "high")]
        if task == "families":
            names += [f"eval/{family}/{metric}" for family in FAMILIES for metric in metrics]
    return [*names, "eval/centred_mean"] if tasks else []


FIRST_ROWS = 100
"Rows at the beginning of a source that are looked at."
SMALL_BYTES = 2 * 2**20
"Largest file that is read to the end if no first row is found."


def _readable(row: Row) -> list[conversation.Message] | None:
    """Return the messages of a conversation with any roles; None: a text."""
    return None if row.messages is None else conversation.validated(row, ())


def _learnable(row: Row) -> None:
    if row.is_tokenized:
        return
    if (messages := _readable(row)) is not None:
        conversation.require_answer(messages, row.where)


def _conversation(row: Row) -> None:
    if not row.is_tokenized:
        rows.require_conversation(row)
    _learnable(row)


REQUIRED: dict[str, Callable[[Row], object]] = {
    "base": lambda row: None if row.is_tokenized else rows.require_text(row),
    "mid": _learnable,
    "sft": _conversation,
    "caption": rows.require_source_and_texts,
}
"Stage -> the function that rejects a row that the stage cannot learn from; a stage that is not here takes any row."


def input_rules(stage: str | None, made: Collection[str] | None = ()) -> list[Rule]:
    """Return rules for all that a run of a stage starts from.

    Args:
        stage: None: of a script that is none of ours, which may learn from any row.
        made: run directories that there will be by then, of earlier stages of a chain; None: which they are is not
            known.
    """
    first = [] if made is None else [partial(one, made=made) for one in (_model, _max_length, _patterns)]
    last = (
        partial(_resume, made=made),
        _eval_data,
        partial(best, stage=stage),
        partial(_adapter, stage=stage, made=made),
    )
    named = partial(named_stage, stage=stage)
    return [named, *first, partial(_tokenizer, stage=stage), _chat_template, *data_rules(stage), *last]


def named_stage(get: Get, stage: str | None) -> Iterator[Problem]:
    """Yield a problem if the recipe names another stage than the script's; None: the script is none of ours."""
    named = get("run.stage")
    if stage is not None and named not in (None, stage):
        script = STAGE_SCRIPTS[named]
        words = {"named": named, "script": script, "own": STAGE_SCRIPTS[stage], "stage": stage}
        yield "run.stage", hint("script of another stage", **words)


def data_rules(stage: str | None) -> list[Rule]:
    """Return rules for the sources that a stage reads."""
    require = REQUIRED.get(stage or "", _readable)
    learned = [partial(_sources, part=part, require=require) for part in ("data.train", "data.val")]
    return [
        *learned,
        partial(_special_tokens, stage=stage),
        _trees,
        partial(_adapter_sources, require=require),
        partial(_sources, part="model.train_tokenizer.sources", require=None),
    ]


def checks_of_stage(stage: str) -> list[Rule]:
    """Return the rules for what a look at the data and costs of a stage needs."""
    return [*data_rules(stage), partial(_patterns, made=()), partial(_adapter, stage=stage, made=())]


def _special_tokens(get: Get, stage: str | None) -> Iterator[Problem]:
    if stage in ("sft", "caption") and get("data.special_tokens_in_text") != "split":
        why = f"is for plain texts: {STAGE_SCRIPTS[stage]} takes special tokens in no text. Leave it out"
        yield "data.special_tokens_in_text", why


def _as_problem(key: str, check: Callable[..., str | None], *args: Any) -> Iterator[Problem]:
    """Yield what a check returns, or raises, as the problem of a key."""
    try:
        problem = check(*args)
    except (ConfigError, DataError) as error:
        problem = str(error).removeprefix("data source ")
    except OSError as error:
        problem = f"{error.filename}: cannot be read: {error.strerror}"
    if problem:
        yield key, problem


# ---- data ------------------------------------------------------------------------------------------------------------


def _sources(get: Get, part: str, require: Callable[[Row], object] | None) -> Iterator[Problem]:
    """Yield the problems of the sources in one part of the data settings.

    Args:
        part: the key of their list.
        require: rejects a row that cannot be learned from; None: only the text of a row is read.
    """
    skips = get("data.on_bad_row") == "skip"
    # One by one, because another source of the list may be one that cannot be read.
    for i in itertools.count():
        try:
            values = get(f"{part}.{i}")
        except recipe_rules.Unusable as gone:
            # The whole list cannot be read; else only this source, which has its own problem, is skipped.
            if f"{part}.".startswith(f"{gone}."):
                return
            continue
        if values is None:
            return
        yield from _as_problem(
            f"{part}.{i}.path", partial(_check_source, skips=skips), schema.SourceConfig(**values), require
        )


def _adapter_sources(get: Get, require: Callable[[Row], object] | None) -> Iterator[Problem]:
    for i in range(len(get("adapters") or ())):
        yield from _sources(get, f"adapters.{i}.data", require)


def _check_source(source: schema.SourceConfig, require: Callable[[Row], object] | None, *, skips: bool) -> None:
    """Find a source and look at its first rows. Rows that the run would skip are rejected if the source has no others,
    or if the columns of all of the first rows are wrong in the same way.

    Raises:
        DataError: the source has no rows, or none that can be learned from.
    """
    origin = find_here(source)
    if origin is None:
        hub.check_dataset(source)
        return
    errors: list[DataError] = []
    left_out: list[LeftOut] = []
    seen = 0
    most = FIRST_ROWS if source.max_rows is None else min(FIRST_ROWS, source.max_rows)
    # Small files are read to their end where their beginning decides nothing.
    small = origin.num_bytes is not None and origin.num_bytes <= SMALL_BYTES
    if source.columns:
        raws = origin.part() if small else itertools.islice(origin.beginning(), most)
        _check_columns(source.columns, itertools.islice(raws, source.max_rows), whole=small)
    for raw in itertools.islice(origin.beginning(), most):
        try:
            row = rows.parse(raw)
            if require is not None:
                require(row)
        except LeftOut as out:
            left_out.append(out)
            continue
        except DataError as error:
            if not skips:
                # To skip rows whose columns are wrong would skip all of them.
                raise error if error.reason in rows.WRONG_COLUMNS else columns.advised(error) from error
            errors.append(error)
        seen += 1
    unknown = left_out and not seen and all(out.reason.endswith(columns.NO_COLUMN) for out in left_out)
    if unknown and (len(left_out) < most or "Did you mean" in str(left_out[0])):
        raise DataError(f"where: none of the first {len(left_out)} rows has it: {left_out[0]}")
    if not seen and small and next(origin.part(), None) is None:
        raise readers.no_rows(source)
    if not errors or len(errors) < seen:
        return
    if seen < FIRST_ROWS:  # the source has no other rows
        raise errors[0]
    reasons = {error.reason for error in errors}
    if len(reasons) == 1 and reasons <= rows.WRONG_COLUMNS:
        like = f"All of the first {seen} rows are like this, so on_bad_row=skip does not skip them"
        raise DataError(f"{errors[0]}. {like}")


def _check_columns(paths: Mapping[str, str], raws: Iterable[RawRow], *, whole: bool) -> None:
    """Reject a column that the `columns` of a source names and no row has.

    Args:
        paths: meaning -> name of the column in the source.
        raws: the first rows, or all. whole: they are all. Otherwise later rows may have a column, unless rows are read
            by it or one of a similar name is there.
    """
    absent = dict(paths)
    there: dict[str, None] = {}
    first = ""
    number = 0
    for raw in raws:
        try:
            row = readers.parsed(raw)
        except DataError:  # of this row alone
            continue
        if isinstance(row, dict):
            first = first or raw[0]
            number += 1
            there.update(dict.fromkeys(columns.column_names(row)))
            absent = {name: path for name, path in absent.items() if not columns.has_column(row, path)}
        if not absent:
            return
    for name, path in absent.items() if there else ():
        near = difflib.get_close_matches(path, there, n=3)
        if whole or near or columns.is_recognised(name):
            words = {"seen": f"{'its' if whole else 'the first'} {counted(number, 'row')}", "first": first}
            words["known"] = first_of(list(dict.fromkeys([*near, *there])), 12)
            words["meant"] = f'Did you mean "{near[0]}"? ' if near else ""
            raise DataError(hint("no such column", name=name, path=path, **words))


# ---- models ----------------------------------------------------------------------------------------------------------


def _model(get: Get, made: Collection[str]) -> Iterator[Problem]:
    path = get("model.path")
    if path is not None and not _is_made(path, made):
        yield from _as_problem("model.path", _check_model, path, get("model.revision"))


def _check_model(path: str, revision: str | None) -> str | None:
    folder = Path(find_model(path, revision))
    if not folder.is_dir():
        if isinstance(cached := try_to_load_from_cache(path, "config.json", revision=revision or "main"), str):
            model_files.format_of(model_files.json_object(Path(cached)), f"{path}: config.json")
        return None
    if (adapter := model_files.adapter_at(schema.ModelConfig(path=path, revision=revision))) is not None:
        from sftkit.models.adapter_files import check_adapter

        if (problem := _check_model(str(adapter.base.path), adapter.base.revision)) is None:
            check_adapter(adapter, Path(find_model(str(adapter.base.path), adapter.base.revision)))
        return problem
    if not any(origin for pattern in WEIGHTS for origin in folder.glob(pattern)):
        return f"{folder}: there are no weights in it ({', '.join(WEIGHTS)}): copy or download the model again"
    model_files.check_model_files(folder)
    return None


def _adapter(get: Get, stage: str | None, made: Collection[str] | None) -> Iterator[Problem]:
    """Yield what is wrong with adapters for this stage and model, as far as the model's files say it."""
    if get("adapter") is None:
        return
    if stage in ("base", "caption"):
        yield "adapter", f"does not go with {STAGE_SCRIPTS[stage]}: mid_train.py and chat_sft.py train adapters"
        return
    path = get("model.path")
    if get("model.scratch") is not None:
        yield "adapter", "does not go with model.scratch, whose weights are in no file: name a model in model.path"
    elif path is not None and made is not None and not _is_made(path, made) and get("adapter.targets"):
        config = schema.AdapterConfig(
            **{**get("adapter"), "targets": tuple(schema.one_or_several(get("adapter.targets")))}
        )
        model = schema.ModelConfig(path=path, revision=get("model.revision"))
        entries = get("adapters") or ()
        if entries and (problem := _check_several(model, get("model.chat_template"))):
            yield "adapters", problem
            return
        ranks = {f"adapters.{i}.rank": entry["rank"] for i, entry in enumerate(entries) if entry.get("rank")}
        if not entries or len(ranks) < len(entries):
            ranks = {"adapter.rank": config.rank, **ranks}
        for at, rank in ranks.items():
            found = [*_as_problem("adapter", _check_adapter, model, replace(config, rank=rank))]
            for key, problem in found:
                # The file or command line that set the key is named before it.
                named = f"adapter.rank={rank}: "
                key = at if problem.startswith(named) else "adapter.targets"
                key = "adapter" if problem.startswith("adapter: ") else key
                yield key, problem.removeprefix(named).removeprefix(f"{key}: ").replace("adapter.rank=", f"{at}=")
            if found:
                return  # the others have it too


def _check_several(model: schema.ModelConfig, template: str | None) -> str | None:
    """Return what several adapters cannot start from, as far as the model's files say it."""
    from sftkit.models.adapter_files import known_shapes

    try:
        files = model_files.adapter_at(model)
        shapes = known_shapes(model)
    except ConfigError:  # that the model is not there, or damaged, is told without this
        return None
    if files is not None:
        return hint("adapters that continue one", files=files)
    if shapes is not None and shapes[1]:
        return "do not go with a mixture of experts yet, whose tokens change places: leave adapters out, and train one"
    file = Path(rundir.resolve(model.path or "")) / "tokenizer.json"
    if template in CHAT_TEMPLATES and file.is_file():
        known = file.read_text(encoding="utf-8", errors="replace")
        if new := [token for token in CHAT_TEMPLATES[template] if json.dumps(token) not in known]:
            return hint("adapters with added tokens", template=template, added=first_of(new))
    return None


def _check_adapter(model: schema.ModelConfig, config: schema.AdapterConfig) -> str | None:
    from sftkit.models.adapter_files import check_adapter, check_continued, known_shapes, target_layers

    try:
        if (files := model_files.adapter_at(model)) is not None:
            check_adapter(files, None)
        shapes = known_shapes(model)
    except ConfigError:  # that the model is not there, or damaged, is told without this
        return None
    fields = model_files.fields_of(model) or {}
    if fields.get("is_encoder_decoder"):
        return f"adapter: {model_files.not_causal(str(fields.get('model_type')), 'an adapter')}"
    if shapes is not None and shapes[1] and config.base == "nf4":
        return "adapter: base nf4 does not go with a mixture, whose experts are most of it: set adapter.base=bf16"
    layers = None if shapes is None else target_layers(shapes[0], config, experts=shapes[1])
    if files is not None:
        check_continued(files, config, layers)
    return None


def _patterns(get: Get, made: Collection[str]) -> Iterator[Problem]:
    patterns = get("train.freeze")
    scaled = get("optim.lr_scale") or {}
    path = get("model.path")
    if get("adapter") is not None:  # then no pattern of train.freeze is right, and others are of factors
        return
    # Where transformers names parameters otherwise than the files do, it is found out when the model is loaded.
    known = _text_config(get).get("model_type") in model_files.GATED
    if not (patterns or scaled) or path is None or _is_made(path, made) or not known:
        return
    with suppress(ConfigError):  # what is wrong with the files is told without this
        sizes, tied = model_files.stored_sizes(Path(find_model(path, get("model.revision"))))
        if sizes and (problem := pattern_problem([*sizes, *tied], patterns)):
            yield "train.freeze", problem
        trained = {*sizes, *tied} - frozen_names([*sizes, *tied], patterns)
        if trained and (problem := unmatched(trained, scaled, "trained parameter")):
            yield "optim.lr_scale", problem


def _max_length(get: Get, made: Collection[str]) -> Iterator[Problem]:
    path, length, fields = get("model.path"), get("data.max_length"), _text_config(get)
    # The start computes the reach of a model with a rope factor or an encoder.
    ropes = [get("model.rope_scaling"), *(fields.get(name) for name in ("rope_parameters", "rope_scaling"))]
    plain = "factor" not in str(ropes) and not {"encoder", "is_encoder_decoder", "vision_config"} & fields.keys()
    positions = fields.get("max_position_embeddings")
    if plain and length is not None and isinstance(positions, int) and length > positions:
        yield "data.max_length", hint("more than the positions", length=length, positions=positions)
    if length is None and (path is None or not _is_made(path, made)) and (path or get("model.scratch") is not None):
        with suppress(ConfigError, ValueError):  # another rule reports a missing or damaged model
            if path is None or rundir.trained_length(Path(rundir.resolve(path))) is None:
                yield "data.max_length", rundir.unresolved_reason(path)


def _trees(get: Get) -> Iterator[Problem]:
    if get("data.layout") != "tree":
        return
    fields = _text_config(get)
    kinds = {*(fields.get("layer_types") or ())}
    named = sorted(kinds - {"full_attention", "sliding_attention", "attention"})
    if not named and (_is_recurrent(fields) or fields.get("attention_chunk_size")):
        named = ["layers that are not only attention over all positions or a window"]
    named += ["longrope"] * ("longrope" in str([fields.get(name) for name in ("rope_parameters", "rope_scaling")]))
    named += ["an encoder"] * bool(fields.get("is_encoder_decoder") or "encoder" in fields)
    if named:
        problem = f"tree does not go with {fields.get('model_type')}, which has {', '.join(named)}: take packed"
        yield "data.layout", problem


def _is_made(path: str, made: Collection[str]) -> bool:
    return any(Path(path).absolute() == Path(run_dir).absolute() for run_dir in made)


def _tokenizer(get: Get, stage: str | None) -> Iterator[Problem]:
    path = get("model.tokenizer")
    if path is not None:
        if not (Path(path) / "tokenizer_config.json").is_file():
            yield from _as_problem("model.tokenizer", lambda: find_model(path) and None)
    elif stage in ("mid", "sft") and get("model.train_tokenizer") is not None and get("model.scratch") is not None:
        yield "model.train_tokenizer", hint("stage that trains no tokenizer", script=STAGE_SCRIPTS[stage])


def _chat_template(get: Get) -> Iterator[Problem]:
    path = get("model.chat_template")
    if path is None or path in CHAT_TEMPLATES or not re.search(r"[./\\]", path):  # a name that is none has its own rule
        return
    yield from _as_problem("model.chat_template", _missing, path, "file", Path.is_file)


# ---- runs and evaluation ---------------------------------------------------------------------------------------------


def _resume(get: Get, made: Collection[str] | None) -> Iterator[Problem]:
    setting = get("train.resume")
    if setting not in (None, "auto") and recipe_rules.STEP_PATH.search(setting):  # other words have a rule of their own
        found = [*_as_problem("train.resume", _check_checkpoint, setting)]
        yield from found
        folders = [] if found else [Path(setting)]
    else:
        folders = rundir.step_dirs(Path(get("run.dir"))) if setting == "auto" else []
    if folders and isinstance(read_manifest(folders[-1]), dict):
        sections = {name: value for name in section_classes() if (value := get(name)) is not None}
        cfg = adapter().validate_json(json.dumps(sections), strict=True)
        for key, problem in _as_problem("train.resume", _resume_problem, cfg, folders[-1], made):
            yield key, problem.replace("\n", "\n  ")  # one problem of several lines


def _resume_problem(cfg: schema.Config, folder: Path, made: Collection[str] | None) -> str | None:
    """Return all that files tell of the differences between a recipe and the checkpoint that it resumes from."""
    from sftkit.rundir.changes import compare_recipes, difference_lines, rejection

    recipe = to_yaml(cfg)
    allowed = cfg.train.resume_changes
    try:
        text = (folder / rundir.RECIPE).read_text()
        old, new = (yaml.load(one, Loader=RecipeLoader) for one in (text, recipe))
        there, here = dict(flattened(old)), dict(flattened(new))
        known = json.loads((folder / rundir.TRAINING_STATE).read_text()).get("identity") or {}
        settings, _ = compare_recipes(text, recipe, allowed)
        keys = ["data.layout"] if cfg.adapter else ["data.layout", "optim.name", "train.precision"]
        pairs = {key: (there[key], here[key]) for key in keys if "auto" not in (there[key], here[key])}
        had, has = _of_adapters(old), _of_adapters(new)
        # Several adapters on one side alone, or others by name, are a difference of the recipes.
        compared = had.keys() & has.keys() or had | has
        pairs |= {key: (had.get(key), has.get(key)) for key in sorted(compared)}
        # A recipe can name the same layers in several ways. The start compares layers that headers do not reveal.
        if had and has and _same_layers(cfg, known.get("adapter") or {}) is not False:
            del pairs["adapter.targets"], pairs["adapter.experts"]
        if (length := cfg.data.max_length) is not None:
            pairs["data.max_length"] = known.get("rows", {}).get("max_length", length), length
        sources = {} if cfg.adapters else {name: one["documents"] for name, one in known.get("sources", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return None  # the start itself reports what is wrong with these files
    fixed = difference_lines({key: (a, b) for key, (a, b) in pairs.items() if a != b})
    names = [schema.source_label(source) for source in cfg.data.train] if sources else []
    grown = [f"source {name} is new" for name in names if name not in sources and "data.train" not in allowed]
    for name in sorted(sources.keys() - names):
        words = {"name": name, "documents": sources[name], "why": hint("no such source")}
        fixed.append(hint("source that does not go on", **words))
    if cfg.adapter is not None and made is not None and cfg.model.path and not _is_made(cfg.model.path, made):
        fixed += _other_base(cfg.model, read_base_digest(folder))
    error = rejection(str(folder), settings, allowed, grown=grown, fixed=fixed)
    return None if error is None else str(error)


def _of_adapters(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return key -> value of what makes the adapters of a resolved recipe; empty: it has none."""
    from sftkit.models.adapter_files import scale_of

    if recipe.get("adapter") is None:
        return {}
    own = {**asdict(schema.AdapterConfig()), **recipe["adapter"]}
    found = {f"adapter.{key}": own[key] for key in ("method", "targets", "experts")}
    for one in recipe.get("adapters") or [{}]:
        at = f"adapters.{one['name']}" if one else "adapter"
        words = {key: one.get(key) or own[key] for key in ("rank", "alpha")}
        scale = scale_of(schema.AdapterConfig(**words, scaling=own["scaling"]))
        found |= {f"{at}.rank": words["rank"], f"{at}.scale": scale}
    return found


def _same_layers(cfg: schema.Config, known: Mapping[str, Any]) -> bool | None:
    """Return whether a recipe gives an adapter to the layers that have one in a checkpoint; None: not known before the
    model is loaded.

    Args:
        known: the checkpoint's adapters by its identity.
    """
    from sftkit.models.adapter_files import known_shapes, target_layers

    # Members have the same layers.
    one = known if isinstance(known.get("rank"), int) else next(iter(known.values()), {})
    with suppress(ConfigError):  # other rules report a wrong model or target
        shapes = known_shapes(cfg.model)
        if shapes is not None and cfg.adapter is not None:
            return {*target_layers(shapes[0], cfg.adapter, experts=shapes[1])} == {*one.get("modules", ())}
    return None


def _other_base(model: schema.ModelConfig, known: str | None) -> list[str]:
    """Return a line if the frozen weights at model.path are not those under the adapter of a checkpoint."""
    from sftkit.models.adapter_files import base_digest

    with suppress(ConfigError):  # that the model is not there, or damaged, is told without this
        files = model_files.adapter_at(model)
        folder = Path(find_model(str((model if files is None else files.base).path)))
        if known is not None and folder.is_dir() and base_digest(folder) != known:
            return [f"model.path: {folder}: other weights than those under the adapters of the checkpoint"]
    return []


def _check_checkpoint(path: str) -> str | None:
    folder = Path(path)
    if not folder.is_dir():
        return _missing(path, "folder", Path.is_dir)
    problem = read_manifest(folder)
    if folder.parent.name == rundir.ADAPTER_FOLDERS and isinstance(read_manifest(folder.parents[1]), dict):
        whole = f"{path}: one adapter of a run with several, which resumes as a whole: name {folder.parents[1]}"
        return f"{whole}, or start a new run from this adapter with model.path={path}"
    if not isinstance(problem, str):
        return None
    if (newest := rundir.latest_checkpoint(folder)) is not None:
        return f"{path}: a run, whose newest checkpoint is {newest}: name that"
    return f"{problem}, so nothing can be resumed from it{similar_paths(path)}"


def _eval_data(get: Get) -> Iterator[Problem]:
    path = get("eval.data")
    if path is not None and set(get("eval.tasks")) - {"families"}:
        yield from _as_problem("eval.data", _missing, path, "folder", Path.is_dir)


def _missing(path: str, kind: str, there: Callable[[Path], bool]) -> str | None:
    return None if there(Path(path)) else f"{path}: no such {kind} (looked in {Path.cwd()}){similar_paths(path)}"


def start_rules(stage: str) -> list[Rule | OfLaunch]:
    """Return rules for a script that trains a stage: for its inputs, and for the processes that have been started."""
    return [*input_rules(stage), *launch_rules(here=True)]


def launch_rules(*, here: bool = False) -> list[OfLaunch]:
    """Return rules for the processes of a launch.

    Args:
        here: they are on this machine, whose GPU counts if the launcher names no device.
    """
    return [OfLaunch(_shared), OfLaunch(_pipeline), *(OfLaunch(partial(rule, here=here)) for rule in (_graph, _nf4))]


RECURRENT = frozenset(("conv", "hybrid", "linear_attention", "mamba"))
"Types of layers, in a model's config, that carry a state along the row."
SIZES_OF_STATES = frozenset(("linear_num_value_heads", "mamba_d_conv", "ssm_state_size"))
"Fields of a config without a list of layers that only recurrent layers need."


def _shared(get: Get, topology: Topology) -> Iterator[Problem]:
    """Yield why processes cannot share a model or its rows, as far as the recipe and the model's config say it."""
    fields = _text_config(get)
    kind, size = fields.get("model_type"), topology.tensor
    if get("train.engine") == "reference" and topology.sharded:
        yield "train.engine", hint("reference in parts")
    if fields.get("is_encoder_decoder") and topology.partial:
        yield "model", hint("encoder in parts", model_type=kind)
        return
    if size > 1 and get("train.fp8") is not None:
        yield "train.fp8", hint("float8 with tensor parallelism", fp8=get("train.fp8"))
    if size > 1 and get("train.engine") == "blocks" and kind is not None:  # the graph engine has its own plans
        if kind not in (known := recipe_rules.TENSOR_MODEL_TYPES):
            yield "model", hint("no tensor-parallel plan", size=size, model_type=kind, known=", ".join(known))
        for name in recipe_rules.DIVIDED if kind in known else ():
            if isinstance(number := fields.get(name), int) and number % size:
                yield "model", hint("number that ranks do not divide", size=size, name=name, number=number)
    if topology.context > 1 and (backend := get("attention.backend")) in ("sdpa", "flex"):
        yield "attention.backend", f"{backend} attends within whole rows, which context parallelism cuts: take auto"
    if topology.context > 1 and _is_recurrent(fields):
        yield "model", hint("recurrent layers in chunks", model=kind, reason="a recurrent layer")


def _is_recurrent(fields: Mapping[str, Any]) -> bool:
    """Return whether a model's config has layers that carry a state along the row."""
    # Granite's files have the sizes of recurrent layers even if all of its layers are of attention.
    listed = fields.get("layer_types") or fields.get("layers_block_type")
    if isinstance(listed, list):
        return not RECURRENT.isdisjoint(map(str, listed))
    return not SIZES_OF_STATES.isdisjoint(fields)


def _nf4(get: Get, topology: Topology, *, here: bool) -> Iterator[Problem]:
    if get("adapter") is not None and get("adapter.base") == "nf4" and _on_cpu(topology, here=here):
        yield "adapter.base", "nf4 needs a GPU, and this run computes on the CPU: set adapter.base=bf16 here"


def _on_cpu(topology: Topology, *, here: bool) -> bool:
    """Return whether a launch computes on the CPU."""
    return topology.on_cpu or (here and not may_have_gpu())


def _pipeline(get: Get, topology: Topology) -> Iterator[Problem]:
    if get("train.engine") != "pipeline" or topology.stages == 1:
        return
    fields = _text_config(get)
    # A model with an encoder is rejected for more than its stages, when it is loaded.
    if "model_type" not in fields or fields.get("is_encoder_decoder") or "encoder" in fields:
        return
    layers = fields.get("num_hidden_layers")
    yield from recipe_rules.split_problems(
        get("train.pipeline_schedule"),
        get("train.pipeline_layers"),
        topology.stages,
        fields["model_type"],
        layers if isinstance(layers, int) else None,
    )


def _graph(get: Get, topology: Topology, *, here: bool) -> Iterator[Problem]:
    if get("train.engine") != "graph":
        return
    topology = replace(topology, on_cpu=_on_cpu(topology, here=here))
    if topology.on_cpu:
        yield from recipe_rules.passes_off_gpu(get("graph.passes"), get("attention.backend"), "cpu")
    yield from recipe_rules.graph_mesh_problems(topology)


def _text_config(get: Get) -> Mapping[str, Any]:
    """Return the fields of the model's config, those of its text part on top; none if they cannot be read."""
    path, revision, scratch = (get(f"model.{name}") for name in ("path", "revision", "scratch"))
    fields = model_files.fields_of(schema.ModelConfig(path=path, revision=revision, scratch=scratch)) or {}
    inner = fields.get("text_config")
    return {**fields, **inner} if isinstance(inner, dict) else fields
