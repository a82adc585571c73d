"""compile.modules and compile.options: which modules are compiled and with what, checked
before anything is compiled."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, get_origin

import torch
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from sftkit.config.schema import CompileConfig, CompileModuleConfig
from sftkit.errors import ConfigError
from sftkit.models.structure import decoder, decoder_blocks, output_projection
from sftkit.runtime.words import first_of

LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)
"Containers that are never called themselves: their items are compiled one by one."
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
CUDA_GRAPHS = "triton.cudagraphs"
"The option that these modes turn on."
ROW_DIMENSIONS = {1: (0,), 2: (1,), 3: (1,), 4: (2, 3)}
"""Number of a tensor's dimensions -> those that follow the row length: boundaries [D], ids [B, T], states
[B, T, H], masks [B, 1, T, T]."""


class CompiledPart(NamedTuple):
    """A module that becomes graphs of its own."""

    path: str
    module: torch.nn.Module
    compile: CompileConfig
    "settings of this module"


def named_parts(orig_model: PreTrainedModel, compile: CompileConfig, *, sharded: bool = False) -> list[CompiledPart]:
    """Return the modules that compile.modules names, in the model's order; of two paths to one module
    the longer counts.

    Args:
        sharded: weights will be gathered block by block, so no module that holds a block is compiled as one.

    Raises:
        ConfigError: a path that the model does not have, that a step never calls or that lies inside another
            one; it names what there is.
    """
    assert compile.modules is not None
    parts: dict[str, CompiledPart] = {}
    # Short paths first, so that a longer one to the same module replaces them, or takes it out if it is switched off.
    for path, own in sorted(compile.modules.items(), key=lambda item: item[0].count(".")):
        for named, at in _at(orig_model, path):
            place, module = _without_head(orig_model, named, at)
            parts[place] = CompiledPart(place, module, with_own(compile, own))
            if not own.enabled:
                del parts[place]
    _check_apart(parts)
    _check_called(orig_model, parts, sharded=sharded)
    order = {module: i for i, module in enumerate(orig_model.modules())}
    return sorted(parts.values(), key=lambda part: order[part.module])


def with_own(compile: CompileConfig, own: CompileModuleConfig) -> CompileConfig:
    """Return the settings of one module: its own over those of compile."""
    return replace(compile, modules=None, **{key: value for key, value in vars(own).items() if value is not None})


def _at(orig_model: PreTrainedModel, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the path and module at a path, or those of the items of a list there."""
    module: torch.nn.Module = orig_model
    there: list[str] = []
    for name in path.split("."):
        children = dict(module.named_children())
        if name not in children:
            near = difflib.get_close_matches(name, children, n=1)
            where = f"in {'.'.join(there)}" if there else f"in {type(orig_model).__name__}"
            raise ConfigError(
                f'compile.modules: "{path}": there is no {name or "empty name"} {where}, which has '
                f"{first_of(list(children), 12) or 'no modules'}." + (f' Did you mean "{near[0]}"?' if near else "")
            )
        module = children[name]
        there.append(name)
    if isinstance(module, LISTS):
        yield from ((f"{path}.{name}", child) for name, child in module.named_children())
    else:
        yield path, module


def _without_head(orig_model: PreTrainedModel, path: str, module: torch.nn.Module) -> tuple[str, torch.nn.Module]:
    """Return the decoder and its path for a module that is the decoder with its head, as GPT-2 behind a ViT; else as
    given. A step calls the decoder alone."""
    inner = decoder(orig_model)
    if isinstance(module, PreTrainedModel) and inner in module.modules():
        return next((name, inner) for name, one in orig_model.named_modules() if one is inner)
    return path, module


def _check_apart(parts: dict[str, CompiledPart]) -> None:
    """Refuse a path that lies inside another one."""
    for path in parts:
        outer = next((other for other in parts if path.startswith(f"{other}.")), None)
        if outer is not None:
            raise ConfigError(
                f'compile.modules: "{path}" lies in "{outer}", which is one graph with all that it holds: name only '
                "one of them"
            )


def _check_called(orig_model: PreTrainedModel, parts: dict[str, CompiledPart], *, sharded: bool) -> None:
    """Refuse modules that a step does not call, or that cannot be a graph of their own."""
    projection, blocks = output_projection(orig_model), set(decoder_blocks(orig_model))
    for path, part in parts.items():
        inside, reason = set(part.module.modules()), None
        if projection in inside:
            reason = "is not called in a step, where the loss reads the weight of the head in a kernel of its own"
        elif type(part.module).__module__.startswith("torch.nn"):
            reason = f"is a {type(part.module).__name__} of torch, which Dynamo does not trace on its own"
        elif sharded and inside & blocks - {part.module}:
            reason = "holds blocks whose sharded weights are gathered between graphs"
        if reason is not None:
            others = first_of(_good_paths(orig_model), 12)
            raise ConfigError(f'compile.modules: "{path}" {reason}: name other modules, such as {others}')


def _good_paths(orig_model: PreTrainedModel) -> list[str]:
    """Return the paths of the children of the decoder that are worth naming."""
    inside = decoder(orig_model)
    prefix = next(name for name, module in orig_model.named_modules() if module is inside)
    return [
        f"{prefix}.{name}".lstrip(".")
        for name, child in inside.named_children()
        if next(child.parameters(), None) is not None
        and (isinstance(child, LISTS) or not type(child).__module__.startswith("torch.nn"))
    ]


# ---- inductor's options ----


def check_options(compile: CompileConfig) -> None:
    """Refuse options that the installed torch does not have.

    Raises:
        ConfigError: a name that torch._inductor.config lacks, with the nearest one, or a value of another type.
    """
    named = {"compile.options": compile.options}
    named |= {f"compile.modules: {path}: options": own.options for path, own in (compile.modules or {}).items()}
    for place, options in named.items():
        for name, value in (options or {}).items():
            _check_option(place, name, value)


def _check_option(recipe_key: str, name: str, value: object) -> None:
    """Refuse a name or a type of value that Inductor's config does not have. `recipe_key`: of the option
    in the recipe."""
    # Private, but its names are those of torch.compile(options=...), as its documentation says. Imported late: it takes
    # a moment.
    from torch._inductor import config

    known = config.get_config_copy()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1) or [key for key in known if key.endswith(f".{name}")]
        hint = f'Did you mean "{near[0]}"?' if near else "torch._inductor.list_options() has them all"
        raise ConfigError(f'{recipe_key}: "{name}" is no option of Inductor in torch {torch.__version__}. {hint}')
    wanted = config.get_type(name)  # type: ignore[attr-defined]
    if get_origin(wanted) is None and not isinstance(value, wanted):  # as torch.compile asks
        raise ConfigError(
            f"{recipe_key}: {name} must be of type {wanted.__name__}, not {type(value).__name__} ({value})"
        )


def compile_arguments(compile: CompileConfig, *, dynamic_layout: bool = False) -> dict[str, Any]:
    """Return the arguments of torch.compile.

    It takes a mode or options, not both: with options the mode's are among them.

    Args:
        dynamic_layout: row lengths vary freely, so all sizes are symbolic, unless the row length alone is marked.
    """
    dynamic = None if compile.dynamic == "marked" else True if dynamic_layout else compile.dynamic
    found: dict[str, Any] = {"backend": compile.backend, "fullgraph": compile.fullgraph, "dynamic": dynamic}
    if compile.options:
        # Of a private module, but torch.compile's documentation names it, and reads a mode's options with it.
        of_mode = torch._inductor.list_mode_options(compile.mode, dynamic) if compile.mode else {}
        return {**found, "options": {**of_mode, **compile.options}}
    return found if compile.mode is None else {**found, "mode": compile.mode}


def has_cuda_graphs(compile: CompileConfig) -> bool:
    """Return whether any graph will be recorded as a CUDA graph and replayed."""
    own = [with_own(compile, module) for module in (compile.modules or {}).values() if module.enabled] or [compile]
    return any(c.backend == "cudagraphs" or (c.options or {}).get(CUDA_GRAPHS, c.mode in CUDA_GRAPH_MODES) for c in own)


def recording_advice(compile: CompileConfig, *, dynamic_layout: bool) -> str | None:
    """Return a warning where every row length would have CUDA graphs of its own; None: none is due."""
    if not (dynamic_layout and has_cuda_graphs(compile)):
        return None
    return (
        "warning: data.layout=dynamic with CUDA graphs (compile.mode) records new graphs for each row length during "
        "training: steps may be slower than eager ones. Take compile.mode=default or max-autotune-no-cudagraphs, or "
        "a layout of fixed shapes"
    )


def check_marked(compile: CompileConfig, backend: str) -> None:
    """Refuse a marked row length where attention has sizes of its own that follow from it.

    Raises:
        ConfigError: attention by blocks of positions.
    """
    asked = [compile.dynamic, *(own.dynamic for own in (compile.modules or {}).values())]
    if backend == "flex" and "marked" in asked:
        raise ConfigError(
            "compile.dynamic: marked does not go with attention.backend flex, whose masks are blocks of 128 positions: "
            "set compile.dynamic=false, which lets layout dynamic make all sizes symbolic, or "
            "attention.backend=varlen or sdpa"
        )


def compile_part(module: torch.nn.Module, compile: CompileConfig, *, dynamic_layout: bool = False) -> None:
    """Compile in place, lazily. With compile.dynamic=marked the row length of every given tensor is marked."""
    module.compile(**compile_arguments(compile, dynamic_layout=dynamic_layout))
    if compile.dynamic == "marked":
        assert module._compiled_call_impl is not None
        # Private: the compiled call (pytorch/pytorch#97565). Dynamo cannot trace a mark (pytorch/pytorch#167269), so it
        # is set around that call; a hook would be inside it.
        module._compiled_call_impl = _marking(module._compiled_call_impl)


def _marking(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call with the row dimensions of its tensors marked as dynamic before it."""

    def marked(*args: Any, **kwargs: Any) -> Any:
        # Private: torch 2.13 has no public pytree (pytorch/pytorch#65761). tree_leaves finds the tensors inside named
        # tuples and lists, too.
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                for dimension in ROW_DIMENSIONS.get(leaf.ndim, ()):
                    if leaf.shape[dimension] > 1:  # torch specialises on sizes 0 and 1
                        # Documented, but torch.compiler has no name for it. Unmarked, a row length is compiled as a
                        # constant and again with a symbol at the second length: a recompile that the contract forbids.
                        torch._dynamo.mark_dynamic(leaf, dimension)
        return call(*args, **kwargs)

    return marked
