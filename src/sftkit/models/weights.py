"""Load weights from safetensors into a live model: each rank reads only its own shards."""

import copy
import itertools
from collections.abc import Set
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Linear
from transformers import AutoConfig, PreTrainedModel

from sftkit.config.schema import ModelConfig
from sftkit.errors import config_error
from sftkit.models import files as model_files
from sftkit.models import load, structure, towers
from sftkit.models.trained import adapters_of, factors, members_in
from sftkit.models.vocabulary import NewRows, fill, new_rows, rows_of_files, vocabulary_of
from sftkit.ops.nf4 import fill_layer, matrix_of
from sftkit.ops.tensors import local, local_part
from sftkit.runtime.script import first_of, working


def make_room(orig_model: PreTrainedModel, device: torch.device) -> None:
    """Allocate the parameters on the meta device; move buffers and real parameters to the device."""
    # Private: the parameters that from_pretrained keeps in fp32 (huggingface/transformers#39058), the bias that
    # balances experts.
    exact = set(orig_model._keep_in_fp32_modules_strict or ())
    for module in orig_model.modules():
        # An assigned buffer keeps its persistence (pytorch/pytorch#125971).
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(module, name, buffer.to(device, torch.float32 if name in exact else None))
    if any(p.is_meta for p in orig_model.parameters()):
        fill_with_memory(orig_model, device)
    else:
        orig_model.to(device)  # type: ignore[arg-type]
    # Each module allocates its own weights from the meta device, so tied weights are two tensors by now.
    orig_model.tie_weights()


def fill_with_memory(module: torch.nn.Module, device: torch.device) -> None:
    """Allocate memory for weights, or shards of weights, on the meta device; buffers do not change."""
    # to_empty would lose the computed values of buffers (pytorch/pytorch#148926).
    buffers = [(part, [*part.named_buffers(recurse=False, remove_duplicate=False)]) for part in module.modules()]
    module.to_empty(device=device)
    for part, named in buffers:
        for name, buffer in named:
            setattr(part, name, buffer)


def materialize_weights(orig_model: PreTrainedModel, source: ModelConfig | None, device: torch.device) -> None:
    """Move a model to the device; for an empty model, read the weights of the recipe's model.path."""
    empty = any(p.is_meta for p in orig_model.parameters())
    make_room(orig_model, device)
    if empty:
        load_model_weights(orig_model, source)


def load_model_weights(orig_model: PreTrainedModel, model: ModelConfig | None) -> None:
    """Load the weights of the recipe's model.path into the live model; rows of added tokens are the mean."""
    assert model is not None, "an empty model has a source"
    with working(f"reading the weights of {model.path}"):
        files = model_files.adapter_at(model)
        path = load.checked_folder(model, files)
        folder = load.local_folder(path, load.load_options(path, model if files is None else files.base))
        model_files.check_model_files(folder)
        new = new_rows(orig_model)
        of_files = {i for ids in ({} if files is None else files.tokens).values() for i in ids}
        if of_files and adapters_of(orig_model) is None and new is not None and (more := {*new.ids} - of_files):
            raise config_error("rows of two origins", path=model.path, more=min(more))
        load_weights(orig_model, folder, new)
        if adapters_of(orig_model) is not None or files is not None:
            from sftkit.models.adapters import fill_factors, merge_files

            if files is None or adapters_of(orig_model) is not None:
                fill_factors(orig_model)
            else:
                merge_files(orig_model, files)


def load_checkpoint(orig_model: PreTrainedModel, folder: Path) -> None:
    """Load what a step directory holds of the model: all weights, or the adapter alone; no collective.

    Raises:
        ConfigError: it does not fit the model.
    """
    if members_in(orig_model):
        from sftkit.models.many_adapters import load_many

        load_many(orig_model, folder)
    elif adapters_of(orig_model) is not None:
        from sftkit.models.adapters import load_factors

        load_factors(orig_model, folder)
    else:
        load_weights(orig_model, folder)
        if towers.whole_of(orig_model) is not None:  # of the checkpoint: the start may have changed
            towers.belongs_to_whole(orig_model, AutoConfig.from_pretrained(folder), folder)


def load_weights(orig_model: PreTrainedModel, folder: Path, new: NewRows | None = None) -> None:
    """Load the weights from a folder of safetensors into the live model, in the model's precision; no collective. The
    factors of adapters, which are in other files, do not change.

    If names in the model differ from those in the files (fused experts, for example), the whole model is loaded on
    the host by from_pretrained, which knows every layout that save_pretrained writes.

    Args:
        new: rows of the vocabulary that the files lack; None if they lack only padding.

    Raises:
        ConfigError: the folder has no safetensors, a file cannot be read, or a weight is missing or has
            another shape.
    """
    # In the order of transformers: if a single file and an index exist, one process and several must read the
    # same weights.
    files = model_files.text_weights(folder)
    if not files:
        raise config_error("no safetensors", folder=folder, one=model_files.SINGLE_FILE, other=model_files.INDEX_FILE)
    quantized = model_files.dequantized_in(folder)
    if quantized is not None:
        quantized = {own: quantized[stored] for own, stored in model_files.trained_names(quantized).items()}
    # keep_vars returns the parameters themselves, which are filled in place. Those of other ranks are on the
    # meta device.
    own = factors(orig_model)
    state = orig_model.state_dict(keep_vars=True)
    tensors = [(name, t) for name, t in state.items() if name not in own and not t.is_meta]
    # A shared tensor keeps its first name. No file holds the scales of quantized matrices.
    first = {id(tensor): name for name, tensor in reversed(tensors)}
    layers = {id(m.weight): m for m in orig_model.modules() if isinstance(m, Linear) and matrix_of(m) is not None}
    scales = {id(tensor) for layer in layers.values() for tensor in matrix_of(layer) or ()} - layers.keys()
    wanted = {name: tensor for name, tensor in tensors if first[id(tensor)] == name and id(tensor) not in scales}

    @torch.no_grad()
    def fill_one(tensor: Tensor, source: Any) -> None:
        """Fill this rank's part of a weight from the whole weight, with the new rows of a grown vocabulary."""
        if (layer := layers.get(id(tensor))) is not None:
            # A tensor of files is mapped into memory: only the one that is quantized is there.
            fill_layer(layer, source[:].to(tensor.device).to(orig_model.dtype))
        elif (rows := grown.get(id(tensor))) is not None:
            fill(tensor, source, rows)
        else:
            local(tensor).copy_(local_part(source, tensor))

    new = new or rows_of_files(orig_model)
    grown = {id(tensor): new for tensor in vocabulary_of(orig_model)} if new is not None else {}
    # If the files lack a name, all weights take the slow path: a converted weight may need several of them.
    others = [name for name in wanted if name not in (quantized or files)]
    if others:
        for name, whole in _load_full(orig_model, wanted.keys(), others, folder).items():
            fill_one(wanted[name], whole)
        return
    # By file, so that each is opened once; a quantized weight opens the files that hold its parts.
    places = {name: folder if quantized is not None else files[name][1] for name in wanted}
    for path, names in itertools.groupby(sorted(wanted, key=places.__getitem__), places.__getitem__):
        opened: Any = nullcontext() if quantized is not None else safe_open(path, "pt")
        with model_files.reading_files(path, "its weights"), opened as file:
            for name in names:
                tensor = wanted[name]
                rows = grown.get(id(tensor))
                source = file.get_slice(files[name][0]) if quantized is None else quantized[name]
                shape = list(source.get_shape())
                there = [*tensor.shape] if rows is None else [rows.before, *tensor.shape[1:]]
                if (layer := layers.get(id(tensor))) is not None:
                    there = [layer.out_features, layer.in_features]
                if shape != there:
                    raise config_error("shape of weights", place=path, weight=name, there=shape, here=there)
                fill_one(tensor, source)


def _load_full(orig_model: PreTrainedModel, wanted: Set[str], others: list[str], folder: Path) -> dict[str, Tensor]:
    """Return the weights of all `wanted` names of a whole model on the host; `others` holds names in no file."""
    # The original class: FSDP's class in front of it cannot load.
    plain: Any = structure.plain_class(orig_model)
    found_type = model_files.json_object(folder / "config.json").get("model_type")
    with model_files.reading_files(folder, f"{first_of(others)} of {plain.__name__}"):
        renamed = None if found_type == orig_model.config.model_type else model_files.TEXT_NAMES
        reporting = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        given: dict[str, Any] = {"pretrained_model_name_or_path": folder}
        if (weights := model_files.dequantized_in(folder)) is not None:
            given = {"pretrained_model_name_or_path": None, "state_dict": weights}
            given["config"] = copy.deepcopy(orig_model.config)
        whole, loading_info = plain.from_pretrained(**given, dtype=orig_model.dtype, key_mapping=renamed, **reporting)
    # The config could not express that these weights are untied (models.load.differing_ties), and names
    # were converted.
    tied = whole.get_expanded_tied_weights_keys(all_submodels=True).keys()
    if lost := (tied - whole.all_tied_weights_keys.keys()) - wanted:
        raise config_error("tied weights differ", folder=folder, lost=first_of(sorted(lost)))
    # Weights that transformers would leave at random values are an error here.
    saved = whole.state_dict()
    missing = loading_info["missing_keys"] | (wanted - saved.keys())
    load.check_complete(folder, plain, missing, loading_info["mismatched_keys"])
    return {name: saved[name] for name in wanted}
