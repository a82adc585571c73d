"""A text model that is trained inside a larger model, such as a vision-language model.

Only the text model is loaded. A checkpoint holds the whole model: trained tensors under their names in the start's
files, and all other tensors copied from file to file, so they take neither memory nor an optimizer.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import CausalLMOutputWithPast

from sftkit.errors import config_error
from sftkit.models import quantized, structure, trained
from sftkit.models.files import HEADER_BYTES, UNCHANGED, files_of_weights, header_of, text_name
from sftkit.rundir.files import content_stamp, read_manifest, sha256_of

WHOLE_MODEL = "sftkit_whole"
"Attribute of a text model that belongs to a larger model."
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_CHUNK = 2**24
"Bytes that are copied at a time."
_BODY = "model."
_HEAD = "lm_head."
"Prefixes of a text model's own names."

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Whole:
    """The model that a text model belongs to."""

    config: PretrainedConfig
    "as in the start's config.json"
    folder: Path
    "the start's files"
    body: str
    "prefix in the files of what the text model calls `model.`"
    head: str
    "the same for `lm_head.`"
    live: tuple[str, str]
    "the same two in transformers' class"
    unchanged: dict[str, tuple[Path, Mapping[str, Any]]]
    "name of each tensor that does not belong to the text model -> its file, and what the file's header says of it"
    stamps: dict[Path, list[int] | None]
    "size and time of those files when the model was loaded"
    processors: dict[str, bytes]
    "the files of PROCESSOR_FILES that are there: a checkpoint that a run resumes from may be deleted later"

    def stored(self, name: str) -> str:
        """Return the name in files of a tensor of the text model."""
        return _with_prefixes(name, self.body, self.head)

    def live_name(self, name: str) -> str:
        """Return what transformers' class calls a module or a tensor of the text model."""
        return _with_prefixes(name, *self.live)

    @property
    def model_class(self) -> Any:
        """Return the class of transformers that plain code loads the checkpoint with."""
        return class_of(self.config)

    @property
    def unchanged_bytes(self) -> int:
        """Return the size of the tensors that are copied."""
        return sum(_size(one) for _, one in self.unchanged.values())


class TextWithHead:
    """In front of a transformers class: a text model that transformers has without a head alone (Qwen3-VL)."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - transformers' own form
    body_class: Any

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg] # of transformers' class behind this one
        self.model = self.body_class(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def forward(
        self, input_ids: Any = None, labels: Any = None, logits_to_keep: Any = 0, **given: Any
    ) -> CausalLMOutputWithPast:
        """Return logits and loss, as transformers' causal models do."""
        outputs = self.model(input_ids=input_ids, **given)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, logits.shape[-1])  # type: ignore[attr-defined]
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)


def register_text_model(config: PretrainedConfig) -> None:
    """Let transformers' AutoModelForCausalLM make the text model of a vision-language model, if it has no class for it.

    Not for models whose weights are converted as a whole (experts): the text model alone would not be.
    """
    text = config.get_text_config()
    conversions = get_checkpoint_conversion_mapping(config.model_type) or ()
    if (
        type(text) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        or type(config) not in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        or type(text) not in transformers.MODEL_MAPPING
        or text is config
        or any(isinstance(one, WeightConverter) for one in conversions)
    ):
        return
    body: Any = transformers.MODEL_MAPPING[type(text)]
    of_transformers = {"config_class": type(text), "body_class": body, "__module__": body.__module__}
    made = type(f"{body.__name__}ForCausalLM", (TextWithHead, body.__base__, GenerationMixin), of_transformers)
    # Private: `register` ignores configs of transformers itself.
    transformers.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content[type(text)] = made


def whole_of(orig_model: torch.nn.Module) -> Whole | None:
    """Return the model that a text model belongs to; None: it is a model of its own."""
    return getattr(orig_model, WHOLE_MODEL, None)


def bytes_outside(orig_model: torch.nn.Module) -> int:
    """Return the size of the tensors outside a text model in its first checkpoint, which later ones share; an adapter
    is saved alone.
    """
    whole = None if trained.adapters_of(orig_model) else whole_of(orig_model)
    return 0 if whole is None else whole.unchanged_bytes


def class_of(config: PretrainedConfig) -> Any:
    """Return the class of transformers for a whole model with this config; None: there is none."""
    for mapping in (transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    return getattr(transformers, (config.architectures or [""])[0], None)


def tied_by_whole(config: PretrainedConfig) -> bool:
    """Return whether the whole model's tie_word_embeddings counts, not that of its text part: the head is beside it."""
    return bool(getattr(class_of(config), "_tied_weights_keys", None))


def belongs_to_whole(orig_model: PreTrainedModel, config: PretrainedConfig, folder: Path) -> None:
    """Note on a text model the larger model in whose files it was found.

    Args:
        config: of the whole model.

    Raises:
        ConfigError: no safetensors, or a model that transformers cannot load as a whole.
    """
    files = files_of_weights(folder)
    bodies = {}
    head = None
    for name in files:
        inside = text_name(name)
        if inside is None:
            continue
        if inside.startswith(_HEAD):
            head = name.removesuffix(inside) + _HEAD
        else:
            bodies[name.removesuffix(inside.removeprefix(_BODY))] = name
    field = next((key for key, value in vars(config).items() if value is config.get_text_config()), None)
    if len(bodies) != 1 or field is None or class_of(config) is None:
        raise config_error("text model in an unknown place", folder=folder, model_type=config.model_type)
    (body,) = bodies
    head = head or (body.removesuffix(_BODY) + _HEAD if body.endswith(f"language_model.{_BODY}") else _HEAD)
    headers = {path: header_of(path) for path in {*files.values()}}
    unchanged = {name: (path, headers[path][name]) for name, path in files.items() if text_name(name) is None}
    if odd := [name for name, (_, one) in unchanged.items() if one["dtype"] in quantized.PACKED]:
        raise config_error("quantized beside a text model", folder=folder, name=odd[0])
    stamps = {path: content_stamp(path) for path, _ in unchanged.values()}
    made = skeleton(config)
    modules = {id(module): name for name, module in made.named_modules()}
    live = f"{modules[id(structure.decoder(made))]}.", f"{modules[id(structure.output_projection(made))]}."
    processors = {name: (folder / name).read_bytes() for name in PROCESSOR_FILES if (folder / name).is_file()}
    whole = Whole(copy.deepcopy(config), folder, body, head, live, unchanged, stamps, processors)
    setattr(orig_model, WHOLE_MODEL, whole)


def whole_config(orig_model: PreTrainedModel, whole: Whole) -> PretrainedConfig:
    """Return the config of the whole model with the trained text model's part."""
    config = copy.deepcopy(whole.config)
    field = next(key for key, value in vars(config).items() if value is config.get_text_config())
    setattr(config, field, copy.deepcopy(orig_model.config))
    getattr(config, field)._name_or_path = ""  # nested, transformers would write the start's path
    if tied_by_whole(config):
        config.tie_word_embeddings = orig_model.config.tie_word_embeddings
    config.dtype = orig_model.dtype
    return config


def write_whole_config(orig_model: PreTrainedModel, whole: Whole, folder: Path) -> None:
    """Write config.json, generation_config.json and the start's processor files."""
    folder.mkdir(parents=True, exist_ok=True)
    whole_config(orig_model, whole).save_pretrained(folder)  # names the class of the start
    if orig_model.generation_config is not None:
        orig_model.generation_config.save_pretrained(folder)
    for name, content in whole.processors.items():
        (folder / name).write_bytes(content)


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """Return a whole model on the meta device."""
    # Some classes draw numbers on the host all the same.
    with torch.device("meta"), torch.random.fork_rng(devices=[]), no_init_weights():
        made: PreTrainedModel = class_of(config)(config)
    made.tie_weights()
    return made


def loading_faults(
    orig_model: PreTrainedModel, whole: Whole, tensors: Mapping[str, torch.Tensor]
) -> dict[str, list[str]]:
    """Return what transformers would find wrong in a checkpoint: missing, unexpected and mismatched names. No memory.

    Args:
        tensors: those of the text model on the meta device, by their names in files.
    """
    dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    held = dict(tensors)
    for name, (_, one) in whole.unchanged.items():
        held[name] = torch.zeros(one["shape"], dtype=dtypes.get(one["dtype"], torch.uint8), device="meta")
    given: dict[str, Any] = {"ignore_mismatched_sizes": True, "output_loading_info": True, "device_map": "meta"}
    logger = transformers.utils.logging.get_logger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        config = whole_config(orig_model, whole)
        _, info = whole.model_class.from_pretrained(None, config=config, state_dict=held, **given)
    finally:
        logger.setLevel(level)
    faults = {"lack": info["missing_keys"], "have another shape of": {name for name, *_ in info["mismatched_keys"]}}
    # A start may hold tensors that transformers' class ignores (heads that predict several tokens): they are kept.
    faults["hold what it does not have,"] = {name for name in info["unexpected_keys"] if name not in whole.unchanged}
    return {verb: sorted(names) for verb, names in faults.items() if names}


def write_unchanged(whole: Whole, folder: Path, earlier: Path | None = None) -> None:
    """Write the tensors of the whole model that are not trained, byte by byte.

    Args:
        earlier: checkpoint of this run, or else the start if it is a checkpoint: its file becomes a second name of the
            same bytes on the disk, or is copied.

    Raises:
        OSError: the start's files have changed since the model was loaded.
    """
    out = folder / UNCHANGED
    earlier = earlier or whole.folder
    if not isinstance(known := read_manifest(earlier), str) and UNCHANGED in known:
        try:
            os.link(earlier / UNCHANGED, out)
        except OSError:  # a disk without hard links, or another one
            with suppress(OSError):
                shutil.copyfile(earlier / UNCHANGED, out)
        if out.is_file() and sha256_of([out]) == [known[UNCHANGED].sha256]:
            return
        out.unlink(missing_ok=True)
    for path, stamp in whole.stamps.items():
        if content_stamp(path) != stamp:
            raise OSError(f"{path} has changed since the model was loaded, and its other tensors belong into {folder}")
    # The widest first, so that every tensor begins at a multiple of its own width.
    sizes = {name: _size(one) // max(math.prod(one["shape"]), 1) for name, (_, one) in whole.unchanged.items()}
    order = sorted(sizes, key=lambda name: -sizes[name])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        _, one = whole.unchanged[name]
        header[name] = {**one, "data_offsets": [end, end + _size(one)]}
        end += _size(one)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with out.open("wb") as target:
        target.write(len(text).to_bytes(HEADER_BYTES, "little") + text)
        for name in order:
            path, one = whole.unchanged[name]
            begin, stop = one["data_offsets"]
            with path.open("rb") as source:
                start = HEADER_BYTES + int.from_bytes(source.read(HEADER_BYTES), "little")
                source.seek(start + begin)
                for at in range(begin, stop, _CHUNK):
                    target.write(source.read(min(_CHUNK, stop - at)))
    if header_of(out).keys() != whole.unchanged.keys():  # also of the length that its header says
        raise OSError(f"{out}: not all tensors were copied")


def _size(tensor: Mapping[str, Any]) -> int:
    begin, end = tensor["data_offsets"]
    return int(end - begin)


def _with_prefixes(name: str, body: str, head: str) -> str:
    if f"{name}.".startswith(_HEAD):
        return (head + f"{name}.".removeprefix(_HEAD))[:-1]
    return body + name.removeprefix(_BODY)
