"""Load or make the model that a stage starts from: new, a local folder, a run's checkpoint, or the hub.

If save_pretrained would reject the generation_config, it is repaired without changing its meaning. End-of-turn tokens
become stops.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from sftkit.config.schema import AdapterConfig, ModelConfig, RopeScaling
from sftkit.data.tokens import chat
from sftkit.errors import ConfigError, config_error, did_you_mean, hint
from sftkit.models import files as model_files
from sftkit.models.kind import kind_of, model_kind
from sftkit.models.structure import scale_rope, use_document_lengths, vocab_size
from sftkit.models.vocabulary import MEAN_ROWS, added_tokens, check_rows, make_room_for, make_rows, pad_vocabulary
from sftkit.ops.attention import plain_implementation
from sftkit.rundir.files import check_loadable
from sftkit.rundir.names import resolve, trained_length, unresolved_reason
from sftkit.runtime.hub import download_help, hub_answers, unreachable
from sftkit.runtime.script import first_of, working

if TYPE_CHECKING:
    from sftkit.models.adapter_files import AdapterFiles
    from sftkit.models.adapters import Adapters
    from sftkit.models.quantized import Weight

log = logging.getLogger(__name__)

_REFUSALS = (ValueError, TypeError, AttributeError, StrictDataclassError)
"Errors that transformers raises for an invalid config; AttributeError for a field of the wrong type."
CONFIG_MAPPING = transformers.CONFIG_MAPPING
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_options(path: str, model: ModelConfig) -> dict[str, object]:
    """Return the arguments for from_pretrained; if the hub is unreachable, only the local cache is used, at once."""
    return {
        "revision": model.revision or "main",
        "trust_remote_code": model.trust_remote_code,
        "local_files_only": os.path.isdir(path) or not hub_answers(),
    }


@contextmanager
def loading(path: str, kind: str = "model") -> Iterator[None]:
    """Turn any error of loading a model or tokenizer into a ConfigError that names the fault of the files, or the
    download and its location.
    """
    try:
        with model_files.reading_files(path, f"the {kind}"):
            yield
    except ConfigError as error:
        if error.__cause__ is None or os.path.isdir(path) or hub_answers():
            raise
        words = {"reason": unreachable(), "help": download_help(path)}
        raise config_error("incomplete in the cache", path=path, kind=kind, **words) from error.__cause__


def local_folder(path: str, options: Mapping[str, object]) -> Path:
    """Return the folder of a model's files, downloaded first for a model of the hub."""
    if os.path.isdir(path):
        return Path(path)
    given: Any = {name: options[name] for name in ("revision", "local_files_only")}
    return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"], **given))


def load_model(
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    precision: str = "fp32",
    *,
    empty: bool = False,
    adapter: AdapterConfig | None = None,
    several: Callable[[Adapters], Adapters] = lambda adapters: adapters,
    rounded: bool = True,
    nf4_of: torch.dtype | None = None,
) -> PreTrainedModel:
    """Load or make the model with a row for every token and weights in the run's precision, bf16 or fp32.

    A model with `model.path` gets rows for the tokens that load_tokenizer added; any model gets the padding of
    model.pad_vocab_to_multiple_of (models/vocabulary.py). The optimizer keeps the part of an update that bf16 weights
    would lose, see docs/optimizers.md.

    Args:
        empty: whether the weights of a model with `model.path` stay on the meta device, until they are read to where
            they are needed (models/weights.py): each rank its own shards, or matrices that are quantized at once.
        adapter: settings of the adapters that the frozen model gets; an adapter at model.path gives their start. None:
            the model gets none, and an adapter at model.path is merged into its base.
        several: function that adds the members of a run with several adapters (many_adapters.members_of).
        rounded: whether a vocabulary that grows gets a multiple of 64 rows. With adapters it does not: peft grows its
            model to the tokens of the tokenizer.
        nf4_of: as merge_files has it, of an adapter that is merged.

    Raises:
        ConfigError: there is no model, its files are damaged, transformers rejects its config, the tokenizer has more
            tokens than the model has rows, or the model cannot have these adapters.
    """
    files = None
    if model.scratch is not None:
        with working("making a new model"):
            orig_model = from_scratch(model.scratch, tokenizer, seed, precision)
    else:
        files = model_files.adapter_at(model)
        source = model if files is None else files.base
        path = checked_folder(model, files)
        load = empty_model if empty else full_model
        with nullcontext() if empty else working(f"loading {path}"), loading(path):
            orig_model = load(path, precision, load_options(path, source), model.rope_scaling)
        if files is not None and adapter is None and not empty:
            from sftkit.models.adapters import merge_files

            with working(f"merging the adapter {files.folder}"):
                merge_files(orig_model, files, nf4_of)
        elif files is not None:
            for ids in files.tokens.values():
                make_room_for(orig_model, ids)
    # Vocabulary: first a row for each token, then padding after them.
    check_rows(orig_model, tokenizer)
    if model.scratch is None:
        make_rows(orig_model, tokenizer, 64 if rounded and adapter is None else 1)
    if model.pad_vocab_to_multiple_of is not None:
        pad_vocabulary(orig_model, model.pad_vocab_to_multiple_of)
    kind_of(orig_model.config).prepare(orig_model, tokenizer)
    # Set up the model for training and checkpoints.
    settle_generation_config(orig_model, tokenizer)
    compute_here(orig_model)
    if adapter is not None:
        _adapt(orig_model, tokenizer, adapter, seed, model, files, several)
    return orig_model


def compute_here(orig_model: PreTrainedModel) -> None:
    """Let positions and experts of a model be computed by this project's code, for packed rows."""
    use_document_lengths(orig_model)
    if any(type(module).__name__.endswith(("Experts", "Moe")) for module in orig_model.modules()):
        from sftkit.models.experts import compute_experts_here

        compute_experts_here(orig_model)


def checked_folder(model: ModelConfig, files: AdapterFiles | None) -> str:
    """Return the folder or hub id that the weights of model.path are read from, after a look at the files there and at
    those of an adapter.

    Raises:
        ConfigError: a damaged file, or an adapter of other weights.
    """
    path = resolve(model.path or "")
    check_loadable(path)
    if files is not None:
        path = resolve(str(files.base.path))
        check_loadable(path)
    if os.path.isdir(path):
        model_files.check_model_files(Path(path))
    if files is not None:
        from sftkit.models.adapter_files import check_adapter

        check_adapter(files, None if files.digest is None else local_folder(path, load_options(path, files.base)))
    return path


def _adapt(
    orig_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: AdapterConfig,
    seed: int,
    model: ModelConfig,
    files: AdapterFiles | None,
    several: Callable[[Adapters], Adapters],
) -> None:
    """Give the model its adapters.

    Args:
        files: the adapter at model.path, which training continues; None: a whole model is there.

    Raises:
        ConfigError: adapters that the model cannot have, or other ones than those of the files.
    """
    from sftkit.models.adapter_files import base_digest, check_continued
    from sftkit.models.adapters import Adapters, add_adapters
    from sftkit.models.joined_adapters import join_layers
    from sftkit.models.token_rows import tokens_to_train

    if model.path is None:
        raise ConfigError("adapter: a new model has no weights that adapters could be added to: set model.path")
    if orig_model.config.is_encoder_decoder:
        raise ConfigError(f"adapter: {model_files.not_causal(orig_model.config.model_type, 'an adapter')}")
    base = model if files is None else files.base
    path = resolve(str(base.path))
    options = load_options(path, base)
    with nullcontext() if os.path.isdir(path) else working(f"hashing {path}"):
        folder = local_folder(path, options)
        digest = base_digest(folder)
    # Other programs read the files of the adapter in other folders, and later: an absolute path, or the hub's commit.
    if os.path.isdir(path):
        base = replace(base, path=str(Path(path).absolute()))
    else:
        base = replace(base, path=path, revision=folder.name if folder.parent.name == "snapshots" else base.revision)
    tokens, known = tokens_to_train(orig_model, tokenizer, files)
    start = None if files is None else files.folder
    adapters = several(Adapters(config, seed, base, digest, start, tokens=tokens, known=known))
    if adapters.members and (files is not None or tokens):
        raise config_error("adapters that continue")
    if files is not None:
        check_continued(files, config)
    with nullcontext() if files is None else working(f"continuing the adapter {files.folder}"):
        add_adapters(orig_model, adapters)
    join_layers(orig_model)


def trained_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the part that is trained.

    For a multimodal model this is its text model, if transformers has a class for it (Gemma 3 from 4B on); the other
    parts are not loaded, and copied into checkpoints (models/towers.py). For any other model it is the whole config.
    """
    text = config if config.is_encoder_decoder else config.get_text_config()
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if text is not config:
        from sftkit.models.towers import register_text_model, tied_by_whole

        register_text_model(config)
    if text is config or type(text) not in causal:
        pictures = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if pictures and type(config) not in causal and not config.is_encoder_decoder:
            raise config_error("no text model alone", model_type=config.model_type)
        return config
    if tied_by_whole(config):
        text.tie_word_embeddings = config.tie_word_embeddings
    return text


def full_model(
    path: str, precision: str, options: dict[str, object], rope: RopeScaling | None = None, *, independent: bool = False
) -> PreTrainedModel:
    """Load the model with from_pretrained; a missing weight or a wrong shape is an error, never filled at random.

    Args:
        precision: bf16, fp32, or "auto": the precision of the files, which are then mapped into memory, not copied.
        rope: model.rope_scaling.
        independent: whether transformers de-quantizes quantized files, if it can, instead of this package.

    Raises:
        ConfigError: a weight is missing or has another shape.
    """
    config = start_config(path, options)
    start_generation_config(path, options)  # otherwise an error in the config would not name the file
    trained = trained_config(config)
    scale_rope(trained, rope)
    # Let transformers report a weight of another shape without an exception, so that the error below can name it.
    reporting = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    attention = plain_implementation(trained)
    made = {"config": trained, "dtype": DTYPES.get(precision, precision), "attn_implementation": attention}
    renamed = None if trained is config else model_files.TEXT_NAMES
    weights = dequantized(path, options)
    if weights is not None and independent:
        from sftkit.models.quantized import settings_for_transformers

        if (settings := settings_for_transformers(local_folder(path, options))) is not None:
            trained.quantization_config = settings
            weights = None
    if weights is None:
        orig_model, loading_info = kind_of(trained).auto_class.from_pretrained(
            path, key_mapping=renamed, **made, **reporting, **options
        )
        if independent and precision in DTYPES:  # transformers de-quantizes mxfp4 to bf16 whatever it is asked for
            for parameter in orig_model.parameters():
                parameter.data = parameter.data.to(DTYPES[precision])
    else:
        # transformers takes weights that it does not read itself without a path, which its auto classes need.
        cls: Any = type(_on_meta(trained, torch.bfloat16, trust_remote_code=bool(options["trust_remote_code"])))
        orig_model, loading_info = cls.from_pretrained(
            None, state_dict=weights, key_mapping=renamed, **made, **reporting
        )
        name_start(orig_model, path, options)
    if trained is not config:
        # Private: the name mapping used in loading. save_pretrained would map the names back to those of the whole
        # model (huggingface/transformers#42396).
        orig_model._weight_conversions = None
        from sftkit.models.towers import belongs_to_whole

        belongs_to_whole(orig_model, config, local_folder(path, options))
    check_complete(path, type(orig_model), loading_info["missing_keys"], loading_info["mismatched_keys"])
    if not os.path.isdir(path):
        # Files of the hub are downloaded by now; those of a folder were checked before.
        cached = try_to_load_from_cache(path, "config.json", revision=str(options["revision"]))
        if isinstance(cached, str):
            model_files.check_model_files(Path(cached).parent)
    unused = loading_info["unexpected_keys"]
    if trained is not config:  # other parts are copied into checkpoints
        unused &= model_files.text_weights(local_folder(path, options)).keys()
    if unused:
        words = {"name": type(orig_model).__name__, "weights": first_of(sorted(unused))}
        _warn_once(hint("weights of no module", path=path, **words))
    # If tied weights differ in the files, transformers leaves them untied and removes them only from this table.
    tied = orig_model.get_expanded_tied_weights_keys(all_submodels=True)
    untie(orig_model, tied.keys() - orig_model.all_tied_weights_keys.keys(), path)
    return orig_model


def start_config(path: str, options: dict[str, object]) -> PretrainedConfig:
    """Return the config of the model at this path, without the format that its weights are de-quantized from.

    Raises:
        ConfigError: its weights are quantized in a format that is not de-quantized.
    """
    config = AutoConfig.from_pretrained(path, **options)
    if model_files.format_of(config.to_dict(), f"{path}: config.json") is not None:
        for holder in {id(one): one for one in (config, config.get_text_config())}.values():
            vars(holder).pop("quantization_config", None)
    return config


def dequantized(path: str, options: dict[str, object]) -> dict[str, Weight] | None:
    """Return name -> the weight in the quantized files of a model, de-quantized when it is read; None: plain files."""
    if not model_files.quantizations(AutoConfig.from_pretrained(path, **options).to_dict()):
        return None
    return model_files.dequantized_in(local_folder(path, options))


def name_start(orig_model: PreTrainedModel, path: str, options: dict[str, object]) -> None:
    """Give a model that transformers did not read from this path its name and generation config."""
    orig_model.name_or_path = path
    if (generation := start_generation_config(path, options)) is not None:
        orig_model.generation_config = generation


def start_generation_config(path: str, options: dict[str, object]) -> GenerationConfig | None:
    """Return the generation_config.json of the model at this path; None if it has none.

    Raises:
        ConfigError: transformers rejects it.
    """
    with model_files.reading_files(f"{path}: generation_config.json", "its settings"):
        try:
            return GenerationConfig.from_pretrained(path, **options)  # type: ignore[arg-type]
        except OSError:
            return None


def untie(orig_model: PreTrainedModel, own: Set[str], path: str) -> None:
    """Untie the named weights in the config: the files hold different values for them, which transformers keeps.
    Otherwise a checkpoint, or a layout that builds the model from its config, would lose them.

    Raises:
        ConfigError: the model ties other weights too, and no config can express that.
    """
    if not own:
        return
    config = orig_model.config
    tied = orig_model.get_expanded_tied_weights_keys(all_submodels=True)
    where = (
        f"{path}: tie_word_embeddings is true, but in the files {first_of(sorted(own))} differs from its tied weight"
    )
    if own != tied.keys() or config.is_encoder_decoder:
        raise config_error("some tied weights differ", place=where, cls=type(orig_model).__name__)
    for holder in (config, config.get_text_config()):
        holder.tie_word_embeddings = False
    _warn_once(f"{where}: trained untied and saved with tie_word_embeddings false")


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    """Log a fault of the start files once: the reference model of the checks reads them again."""
    log.warning(text)


def model_of_files(
    model: ModelConfig,
    checkpoint: Path | None = None,
    adapters: Adapters | None = None,
    precision: str = "auto",
    device: torch.device | None = None,
) -> PreTrainedModel | None:
    """Load the run's start files as transformers does, on the host and in their own precision, so that they are
    mapped into memory. None for model.scratch, which has no files.

    Args:
        checkpoint: step directory that the run resumes from. The model under its adapter is read from where this run
            has read it: it may have moved since.
        adapters: adapters of the trained model, which this model gets too, filled from the files; None: an adapter in
            the files is merged.
        precision: of the run, in which it read the weights that an adapter was merged into, or whose lengths it took.
        device: which quantizes the weights under adapters.

    Raises:
        ConfigError: the files cannot be loaded.
    """
    if checkpoint is None and not model.path:
        return None
    if checkpoint is not None:
        model = replace(model, path=str(checkpoint), rope_scaling=None)  # its config.json has it
    many = adapters is not None and bool(adapters.members)
    files = None if many else model_files.adapter_at(model, with_base=adapters is None)
    source = adapters.base if adapters is not None else model if files is None else files.base
    path = resolve(str(source.path))
    with loading(path):
        options = load_options(path, source)
        own = adapters is None and files is None and dequantized(path, options) is None
        orig_model = full_model(path, "auto" if own else precision, options, model.rope_scaling, independent=True)
    if adapters is None and files is None:
        return orig_model
    from sftkit.models.adapters import add_adapters, merge_files

    if adapters is not None:
        known = adapters.known if checkpoint is None else None  # a checkpoint has the rows of tokens
        start = checkpoint if many else None if files is None else files.folder
        add_adapters(orig_model, replace(adapters, start=start, known=known), device)
    elif files is not None:
        merge_files(orig_model, files)
    return orig_model


def check_complete(
    where: str | Path, model_class: type, missing: Set[str], mismatched: Set[tuple[str, torch.Size, torch.Size]]
) -> None:
    """Reject files that lack weights of the model.

    Args:
        missing, mismatched: weight names as from_pretrained reports them, mismatched ones with both shapes.

    Raises:
        ConfigError: a weight that is missing or of another shape.
    """
    if missing:
        raise config_error("missing weights", place=where, missing=first_of(sorted(missing)), cls=model_class.__name__)
    if mismatched:
        name, there, here = min(mismatched)
        raise config_error("shape of weights", place=where, weight=name, there=list(there), here=list(here))


def empty_model(
    path: str, precision: str, options: dict[str, object], rope: RopeScaling | None = None
) -> PreTrainedModel:
    """Build the model at this path with computed buffers and parameters on the meta device. `rope`: as in full_model"""
    whole = start_config(path, options)
    config = trained_config(whole)
    scale_rope(config, rope)
    dtype = DTYPES[precision]
    remote = bool(options["trust_remote_code"])
    orig_model = _on_meta(config, dtype, trust_remote_code=remote)
    if orig_model.get_expanded_tied_weights_keys(all_submodels=True):
        own = differing_ties(orig_model, local_folder(path, options), dtype)
        untie(orig_model, own, path)
        if own:
            orig_model = _on_meta(config, dtype, trust_remote_code=remote)
    orig_model.tie_weights()
    name_start(orig_model, path, options)
    # A preview may have the config alone.
    if config is not whole and model_files.files_of_weights(folder := local_folder(path, options)):
        from sftkit.models.towers import belongs_to_whole

        belongs_to_whole(orig_model, whole, folder)
    return orig_model


def _on_meta(config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool) -> PreTrainedModel:
    # Not under torch.device("meta"): no file holds buffers such as rotary frequencies, so they are computed here.
    with no_init_weights(), init_empty_weights(include_buffers=False):
        return from_config(config, dtype, trust_remote_code=trust_remote_code)


def differing_ties(orig_model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> set[str]:
    """Return the tied weights whose values in a folder's files differ from the weight they are tied to. Values are
    compared in the run's precision, as from_pretrained compares them.
    """
    files = model_files.text_weights(folder)
    differing = set()
    for target, source in orig_model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if target not in files or source not in files:
            continue
        with ExitStack() as opened:
            one, other = (
                opened.enter_context(safe_open(path, "pt")).get_slice(name)
                for name, path in (files[target], files[source])
            )
            rows = int((one.get_shape() or [0])[0])
            if one.get_shape() != other.get_shape() or not all(
                torch.equal(one[at : at + MEAN_ROWS].to(dtype), other[at : at + MEAN_ROWS].to(dtype))
                for at in range(0, rows, MEAN_ROWS)
            ):
                differing.add(target)
    return differing


def from_config(config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build a model from a config, with random weights."""
    return kind_of(config).auto_class.from_config(
        config, dtype=dtype, attn_implementation=plain_implementation(config), trust_remote_code=trust_remote_code
    )


def scratch_config(fields: dict[str, object], tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Build the config of a new model and fill in the fields that follow from the tokenizer.

    Raises:
        ConfigError: transformers rejects it.
    """
    try:
        model_type = str(fields["model_type"])
        encodes = model_type in CONFIG_MAPPING and getattr(CONFIG_MAPPING[model_type], "is_encoder_decoder", False)
        made = model_kind(model_files.auto_class({"is_encoder_decoder": encodes, **fields})).scratch(fields, tokenizer)
        return AutoConfig.for_model(str(made.pop("model_type")), **made)
    except _REFUSALS as error:
        reason = _unknown_type(fields) or f"transformers rejects this config: {' '.join(str(error).split())}"
        raise ConfigError(f"model.scratch: {reason}") from error


def _unknown_type(scratch: dict[str, object]) -> str | None:
    """Return the model_type in a config, nested ones included, that transformers does not know; None if it knows all.
    transformers' own message would list every type it has.
    """
    inside = [(f"{key}.", value) for key, value in scratch.items() if isinstance(value, dict)]
    for place, fields in (("", scratch), *inside):
        named = str(fields.get("model_type", "")) or None
        if named and named not in CONFIG_MAPPING:
            meant = did_you_mean(named, CONFIG_MAPPING, ". ") or ", which has names such as llama, gpt2, vit and t5"
            where = f"transformers {transformers.__version__}{meant}"
            return f'{place}model_type: "{named}" is not an architecture of {where}'
    return None


def from_scratch(
    fields: dict[str, object], tokenizer: PreTrainedTokenizerBase, seed: int, precision: str = "fp32"
) -> PreTrainedModel:
    """Make a model with random weights from a transformers config; vocabulary and special ids come from
    the tokenizer.

    Raises:
        ConfigError: transformers rejects the config.
    """
    config = scratch_config(fields, tokenizer)
    try:
        # Drawn on the CPU in fp32, then rounded: a seed gives the same weights in any precision on any device. The
        # generators keep their state: each rank has seeded its own for dropout.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            orig_model = from_config(config, torch.float32)
    except _REFUSALS as error:
        raise ConfigError(f"model.scratch: transformers rejects this config: {' '.join(str(error).split())}") from error
    for parameter in orig_model.parameters():  # not buffers: rotary frequencies stay in fp32
        parameter.data = parameter.data.to(DTYPES[precision])
    return orig_model


def resolve_max_length(
    model: ModelConfig,
    max_length: int | None,
    tokenizer: PreTrainedTokenizerBase,
    precision: str,
    positions: int | None = None,
) -> tuple[int, str]:
    """Return max_length, by default that of the run that the model comes from, and lines that report it.

    Raises:
        ConfigError: no max_length is known, or it exceeds `positions`, the model's number of positions.
    """
    length = max_length or (trained_length(Path(resolve(model.path))) if model.path else None)
    if length is None:
        raise ConfigError(f"data.max_length: {unresolved_reason(model.path)}")
    if positions is not None and length > positions:
        raise ConfigError(f"data.max_length: {hint('more than the positions', length=length, positions=positions)}")
    start = f"from {resolve(model.path)}" if model.path else "new model"
    if (stored := model_files.stored_format(model)) is not None:
        start += f", whose weights were {stored}, de-quantized while loading"
    source = tokenizer.chat_template
    template = hashlib.sha256(str(source).encode()).hexdigest()[:8] if source else "none"
    if added := added_tokens(tokenizer):
        template += f", {' and '.join(added.tokens)} added"
    how = "set in the recipe" if max_length else "inherited"
    return length, (
        f"{start}: {precision}, max_length {length} ({how})\n"
        f"tokenizer of {len(tokenizer):,} tokens, chat template {template}"
    )


SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"Fields that transformers reads only where do_sample is true, and does not save without it."
INERT = (
    *("early_stopping", "length_penalty", "output_attentions", "output_hidden_states", "output_scores"),
    *("output_logits", "cache_implementation", "cache_config", "pad_token_id"),
)
"""Other fields that transformers does not save if they have no effect: without beams, without a returned dict,
without a cache; also a negative padding token.
"""


def settle_generation_config(orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Repair fields that save_pretrained would reject, without changing their meaning, and add the end-of-turn tokens
    to the stops.

    Raises:
        ConfigError: the generation config cannot be saved as it is.
    """
    generation = orig_model.generation_config
    if generation is None:
        return
    where = orig_model.name_or_path or "the model"
    _make_saveable(generation, where)
    ends = chat.end_of_turn_ids(tokenizer)
    named = generation.eos_token_id
    start: list[Any] = list(named) if isinstance(named, list | tuple) else [] if named is None else [named]
    # A stop that transformers derived may be a default of the architecture: 2 for Llama, for any tokenizer. Such an
    # id is a stop only if it is a special token.
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    if getattr(generation, "_from_model_config", False):
        start = [i for i in start if i in special]
    rows = vocab_size(orig_model)
    if wrong := [one for one in start if type(one) is not int or not 0 <= one < rows]:
        raise config_error("stop that is no token", place=where, wrong=wrong[0], rows=rows)
    generation.eos_token_id = list(dict.fromkeys([*ends, *start]))
    if more := [i for i in generation.eos_token_id if i not in ends]:
        words = first_of([f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in more])
        log.info("generation also stops at %s, because the start model's generation_config lists it", words)


def stop_ids(orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end an answer. A model that load_model loaded has them in its generation_config, which
    servers read too; otherwise they are eos and the chat template's end of turn.
    """
    settled = getattr(orig_model.generation_config, "eos_token_id", None)
    return settled if isinstance(settled, list) else chat.end_of_turn_ids(tokenizer)


def _make_saveable(generation: GenerationConfig, where: str) -> None:
    """Make save_pretrained accept the generation config.

    Sampling fields without do_sample imply it. With do_sample false they have no effect and are removed, like other
    fields without effect.
    """
    if _problem(generation) is None:
        return
    changed = []
    # Fields that differ from their neutral value.
    neutral = {"top_k": 50, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
    used = [name for name in SAMPLING if getattr(generation, name, None) not in (None, neutral.get(name, 1.0))]
    if generation.do_sample is None and used:
        generation.do_sample = True
        changed.append("do_sample set to true, as its sampling fields imply")
    for name in used if generation.do_sample is False else ():
        setattr(generation, name, None)
        changed.append(f"{name} removed, which has no effect while do_sample is false")
    for name in INERT:
        before = _problem(generation)
        # Removed only if transformers rejects this field.
        if before is not None and getattr(generation, name, None) is not None:
            trial = copy.deepcopy(generation)
            setattr(trial, name, None)
            if _problem(trial) != before:
                setattr(generation, name, None)
                changed.append(f"{name} removed, which has no effect here")
    if (problem := _problem(generation)) is not None:
        raise config_error("generation config", place=where, problem=problem)
    log.warning("%s: generation_config.json: transformers would not save it as it is: %s", where, "; ".join(changed))


def _problem(generation: GenerationConfig) -> str | None:
    """Return the reason why transformers would not save the generation config; None if it would."""
    try:
        generation.validate(strict=True)
    except (ValueError, TypeError) as error:
        return " ".join(str(error).split())
    return None
