"""The subject of an explanation: a module with calls. It is the decoder or encoder of a recipe's model, or the return
value of a function in a user's file.
"""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree  # private (pytorch/pytorch#65761); torch.compile traverses arguments this way
from transformers import PretrainedConfig, PreTrainedModel

from labs.explain.run import file_of
from sftkit.compile.contract import check_options
from sftkit.config.schema import Config, ModelConfig
from sftkit.data.batches.collate import Batch, collate, warm_up_batch
from sftkit.data.batches.pack import Layout, make_layout
from sftkit.data.types import Examples
from sftkit.errors import ConfigError
from sftkit.models.kind import kind_of
from sftkit.models.load import (
    DTYPES,
    from_config,
    load_options,
    loading,
    scratch_config,
    start_config,
    trained_config,
)
from sftkit.models.structure import decoder, decoder_blocks, encoder, vocab_size
from sftkit.models.tokenizer import load_tokenizer
from sftkit.objectives.objective import Caption, ModelWithLoss, NextToken
from sftkit.ops.attention import choose_backend, kernel_order, plain_implementation
from sftkit.rundir.names import resolve, trained_length, unresolved_reason
from sftkit.runtime.script import counted
from sftkit.runtime.start import Runtime


@dataclass(frozen=True)
class ModuleCall:
    """Arguments of a module."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: str = ""
    "shape as text: 8 x 128"


@dataclass(frozen=True)
class Tokens:
    """The fields of a tokenizer that determine a new model."""

    num_tokens: int
    bos_token_id: int | None = None
    eos_token_id: int = 0
    pad_token_id: int | None = None

    def __len__(self) -> int:
        return self.num_tokens


@dataclass(frozen=True)
class ProfiledStep:
    """The other parts of a recipe's step, for the profile."""

    model: ModelWithLoss
    batch: Batch
    dynamic_layout: bool
    "whether row lengths vary freely"


@dataclass(frozen=True)
class Subject:
    """A module with calls of it, on its device."""

    name: str
    module: torch.nn.Module
    call: ModuleCall
    again: ModuleCall
    "the same shapes with other values"
    other: ModuleCall | None
    "another shape; None: unknown"
    source: str
    "Python that makes `module`, for a reproduction"
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    "context for every call"
    trained: ProfiledStep | None = None
    "None: not from a recipe"
    beside: str | None = None
    "examined part of the model, in words; None: all of it"

    def run(self, call: ModuleCall) -> Any:
        """Run the module in its current form, compiled in place or eager, and return its output."""
        with self.around():
            return self.module(*call.args, **call.kwargs)


def of_recipe(cfg: Config, layers: int | None, rt: Runtime, *, of_encoder: bool = False) -> Subject:
    """Return the decoder, or encoder, of a recipe's model with random weights, and batches of the recipe's shape with
    random tokens: neither weights nor data are read.

    Args:
        layers: number of first blocks to keep; None: all.
        of_encoder: whether to return the encoder instead of the decoder.

    Raises:
        ConfigError: the model's config or tokenizer is missing, it has fewer blocks or no encoder, or this torch does
            not know a compiler option.
    """
    check_options(cfg.compile)
    # Model, layout, attention and loss are those of the run. Document lengths are made up, from an eighth to all of
    # max_length; they determine the slots and buckets that a recipe derives from its data.
    config = config_of(cfg.model, layers)
    encodes = config.is_encoder_decoder
    if of_encoder and not encodes:
        raise ConfigError(
            f"--encoder: the model of this recipe ({config.model_type}) has none: leave it out; "
            "recipes/captioning/caption.yaml has one"
        )
    orig_model = _new_model(config, cfg.model, cfg.run.seed, rt)
    length = cfg.data.max_length or (trained_length(Path(resolve(cfg.model.path))) if cfg.model.path else None)
    if length is None:
        raise ConfigError(f"data.max_length: {unresolved_reason(cfg.model.path)}")
    lengths = np.linspace(max(length // 8, 1), length, 64).astype(np.int64)
    layout = make_layout(cfg.data, cfg.train, lengths, length, encoded=encodes)
    execution = {"compiled": cfg.compile.enabled, "captured": cfg.train.engine == "graph"}
    backend = choose_backend(cfg.attention.backend, orig_model, layout, rt, **execution).backend
    model = ModelWithLoss(orig_model, backend, (Caption if encodes else NextToken)(cfg.loss))
    # Three batches: like the warm-up's, with other values of the same shape, and of another length.
    rows, row_length = layout.shapes[-1]
    kinds = (row_length, None), (row_length, 1), (other_length(row_length), 1)
    batches = [batch_of(layout, orig_model, rows, columns, seed).to(rt.device) for columns, seed in kinds]
    calls = [_calls(model, batch) for batch in batches]
    call, again, other = (of_decoder for of_decoder, _ in calls)
    name = f"{type(orig_model).__name__}, {counted(len(decoder_blocks(orig_model)), 'block')}"
    subject = Subject(
        name,
        decoder(orig_model),
        call,
        again,
        other,
        source=_source(config, cfg.model, orig_model),
        around=partial(kernel_order, backend),
        trained=ProfiledStep(model, batches[0], layout.dynamic),
    )
    if not encodes:
        return subject
    # Another shape for an encoder: for any row length, a picture has one size and a text is padded to
    # data.max_length, so only their number in a micro-batch may differ from bucket to bucket.
    others = [shape for shape in layout.shapes if of_encoder and shape[0] != rows][:1]
    found = [_calls(model, batch_of(layout, orig_model, *shape, 1).to(rt.device))[1] for shape in others]
    source = _source(config, cfg.model, orig_model, part=".get_encoder()")
    return _with_encoder(subject, encoder(orig_model), (calls[0][1], *found), source, of_encoder=of_encoder)


def _with_encoder(
    subject: Subject, module: Any, calls: Sequence[ModuleCall | None], source: str, *, of_encoder: bool
) -> Subject:
    """Return the subject of a model with an encoder: the decoder, or the encoder instead.

    Args:
        module: encoder. calls: its calls, the second with another shape if one is known. source: Python code that
            makes it.
    """
    both = "--kernels measures a step of both"
    if not of_encoder:
        return replace(subject, beside=f"the decoder alone: --encoder examines {type(module).__name__}; {both}")
    call, *others = calls
    assert call is not None
    return replace(
        subject,
        name=f"{subject.name.partition(',')[0]}: its encoder, {type(module).__name__}",
        module=module,
        call=call,
        again=replace(call, kwargs={key: _flipped(value) for key, value in call.kwargs.items()}),
        other=next(iter(others), None),
        source=source,
        beside=f"the encoder alone; {both}",
    )


def _flipped(value: Any) -> Any:
    """Return a tensor with its values in another order; a mask, or a value that is not a tensor, unchanged."""
    return value.flip(-1) if torch.is_tensor(value) and value.dtype != torch.bool else value


def config_of(model: ModelConfig, layers: int | None) -> PretrainedConfig:
    """Return the config of a recipe's model, cut to the first blocks.

    Raises:
        ConfigError: it is missing, transformers rejects it, or it has fewer blocks.
    """
    if model.scratch is not None:
        # A tokenizer that is not trained yet will have this many tokens; its end tokens do not change a graph.
        training = model.train_tokenizer
        tokenizer: Any = Tokens(training.vocab_size) if training else load_tokenizer(model)
        config = scratch_config(dict(model.scratch), tokenizer)
    else:
        path = resolve(model.path or "")
        with loading(path):
            config = trained_config(start_config(path, load_options(path, model)))
    text = config.get_text_config()
    if layers is not None:
        # If one config has both, the plain name belongs to the encoder.
        name = "num_decoder_layers" if hasattr(text, "num_decoder_layers") else "num_hidden_layers"
        if layers > (blocks := getattr(text, name)):
            raise ConfigError(f"--layers: {layers}, but the model has {counted(blocks, 'block')}")
        setattr(text, name, layers)
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    return config


def _new_model(config: PretrainedConfig, model: ModelConfig, seed: int, rt: Runtime) -> PreTrainedModel:
    """Return the model of a config with random weights in the run's precision, on the device, in training mode."""
    torch.manual_seed(seed)
    orig_model = from_config(config, DTYPES[rt.precision], trust_remote_code=model.trust_remote_code)
    return orig_model.to(rt.device).train()  # type: ignore[arg-type]


def batch_of(layout: Layout, orig_model: PreTrainedModel, rows: int, row_length: int, seed: int | None) -> Batch:
    """Return a batch [rows, row_length] of random tokens, with noise for an encoder.

    Args:
        seed: None: the warm-up's batch, with the longest documents; otherwise other tokens, in documents of
            other lengths.
    """
    longest = min(layout.max_doc_length, row_length)
    shape, vocabulary = layout.batch_shape(rows, row_length), vocab_size(orig_model)
    made_up = partial(kind_of(orig_model.config).made_up_inputs, orig_model, length=layout.max_length)
    if seed is None:
        return warm_up_batch(rows, shape, vocabulary, made_up=made_up)
    rng = np.random.default_rng(seed)
    sizes = rng.integers(max(longest // 2, 1), longest + 1, rows).tolist()
    ids = rng.integers(0, vocabulary, sum(sizes) + rows)
    return collate(Examples.of(ids, sizes, made_up(rows)), tuple((row,) for row in range(rows)), shape)


def other_length(row_length: int) -> int:
    """Return another row length: three quarters, and a multiple of 8 if possible."""
    return max(2, row_length * 3 // 4 // 8 * 8) if row_length >= 16 else max(2, row_length - 1)


def _calls(model: ModelWithLoss, batch: Batch) -> tuple[ModuleCall, ModuleCall | None]:
    """Return the call of the decoder, with the encoder's output for noise if there is an encoder, and the call
    of the encoder.
    """
    of_encoder: list[ModuleCall] = []

    def listen(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        shape = " x ".join(map(str, (*args, *kwargs.values())[0].shape))
        of_encoder.append(ModuleCall(args, kwargs, shape))

    def stop(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        raise _Called(kwargs)

    first = encoder(model.orig_model)
    with ExitStack() as stack:
        if first is not None:
            stack.enter_context(first.register_forward_pre_hook(listen, with_kwargs=True))
        stack.enter_context(decoder(model.orig_model).register_forward_pre_hook(stop, with_kwargs=True))
        try:
            with torch.no_grad():
                model.kind.hidden_states(model.orig_model, batch, model.backend)
        except _Called as call:
            (kwargs,) = call.args
    return ModuleCall((), kwargs, "{} x {}".format(*batch.shape)), of_encoder[0] if of_encoder else None


class _Called(Exception):
    """The decoder was called, with these arguments: it does not have to compute."""


def _source(config: PretrainedConfig, model: ModelConfig, orig_model: PreTrainedModel, part: str | None = None) -> str:
    """Return Python code that makes the same decoder, or another part, from its config: self-contained, or from the
    model's folder if it comes with code.

    Args:
        part: other part, as an expression after the model.
    """
    num_blocks = config.get_text_config().num_hidden_layers
    if model.trust_remote_code and model.path:
        path = str(Path(resolve(model.path)).absolute())
        make = f"config = AutoConfig.from_pretrained({path!r}, trust_remote_code=True)\n"
        make += f"config.get_text_config().num_hidden_layers = {num_blocks}\n"
    else:
        fields = {k: v for k, v in config.to_diff_dict().items() if k not in ("transformers_version", "dtype")}
        kind = fields.pop("model_type", config.model_type)
        make = f"config = AutoConfig.for_model({kind!r}, **{fields!r})\n"
    # Some models wrap their decoder in another model, so it is asked for twice.
    part = part or ".get_decoder()" * (1 if orig_model.get_decoder() is decoder(orig_model) else 2)
    remote = ", trust_remote_code=True" if model.trust_remote_code else ""
    return (
        f"from transformers import AutoConfig, {kind_of(config).auto_class.__name__}\n\n{make}"
        f"model = {kind_of(config).auto_class.__name__}.from_config(config, dtype={orig_model.dtype}, "
        f"attn_implementation={plain_implementation(config)!r}{remote})\n"
        f"module = model{part}.to({str(orig_model.device)!r}).train()\n"
    )


def of_file(words: str, device: torch.device) -> Subject:
    """Return the subject from a function in a file, which returns (module, args) or (module, args, args of
    another shape).

    Args:
        words: FILE.py:FUNCTION; the function takes no arguments.

    Raises:
        ConfigError: the function does not exist, fails or returns something else, or its module does not
            run uncompiled.
    """
    path, (file, _, name) = file_of(words), words.rpartition(":")
    with _failures_of(words, "importing the file"):
        # Under the file's own name, so that a `__main__` part does not run.
        loaded = runpy.run_path(str(path), run_name=path.stem)
    make = loaded.get(name)
    if not callable(make):
        own = [key for key, value in loaded.items() if getattr(value, "__module__", None) == path.stem]
        own = [key for key in own if callable(loaded[key]) and not isinstance(loaded[key], type)]
        raise ConfigError(f"{words}: {file} has no function {name}; it has: {', '.join(own) or 'none'}")
    with _failures_of(words, "calling the function"):
        made = make()
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], torch.nn.Module)):
        raise ConfigError(f"{words}: must return (module, args) or (module, args, args of another shape)")
    if not all(isinstance(args, tuple | list) for args in made[1:]):
        raise ConfigError(f"{words}: args must be a tuple, even of one tensor: return module, (tensor,)")
    module = made[0].to(device)
    there = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tuple(map(tuple, made[1:])))
    call, *more = (ModuleCall(args, shape=_shapes(args)) for args in there)
    # A module that fails in eager would otherwise end as an error of the compiler.
    for each in (call, *more):
        doing = "calling the module uncompiled with its args"
        with _failures_of(words, doing), torch.random.fork_rng(), torch.no_grad():
            module(*each.args)
    # The reproduction contains the whole file as a string and executes it.
    text = path.read_text(encoding="utf-8").replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    source = (
        f'import types\n\nSOURCE = """\\\n{text}"""\n'
        f"loaded = types.ModuleType({path.stem!r})\n"
        f"exec(compile(SOURCE, {path.name!r}, 'exec'), loaded.__dict__)\n"
        f"module = loaded.{name}()[0].to({str(device)!r})\n"
    )
    return Subject(words, module, call, _other_values(call), more[0] if more else None, source)


@contextmanager
def _failures_of(words: str, doing: str) -> Iterator[None]:
    """Report an exception of the user's code as such, with its last line in their file."""
    try:
        yield
    except Exception as error:
        file = str(file_of(words))
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        at = f", at {file}:{lines[-1]}" if lines else ""
        raise ConfigError(f"{words}: {doing} fails{at}: {type(error).__name__}: {error}") from error


def _shapes(args: Any) -> str:
    found = [tensor for tensor in pytree.tree_leaves(args) if isinstance(tensor, torch.Tensor)]
    return ", ".join(" x ".join(map(str, tensor.shape)) for tensor in found)


def _other_values(call: ModuleCall) -> ModuleCall:
    """Return a call of the same shapes: floats reversed along the first axis and scaled, integers unchanged."""

    # Integers may be indices, which do not allow every value.
    def changed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flip(0) * 0.9 if tensor.is_floating_point() and tensor.dim() else tensor

    return replace(call, args=pytree.tree_map_only(torch.Tensor, changed, call.args))
