"""Rules between settings of the compiler."""

from __future__ import annotations

import json
from collections.abc import Iterator

from sftkit.config.optimizers import DEFAULT
from sftkit.config.rule import Get, Problem, Rule
from sftkit.config.schema import FROM_COMPILER


def _compiled_only(get: Get) -> Iterator[Problem]:
    debug = get("compile.debug")
    if get("compile.enabled"):
        hidden = ", ".join(sorted(FROM_COMPILER & set(debug)))
        if hidden and get("compile.cache") is not None:
            problem = f"{hidden} needs everything compiled anew and does not go with compile.cache: set it to null"
            yield "compile.debug", problem
        return
    if debug:
        yield "compile.debug", "only goes with compile.enabled true: nothing is compiled"
    if get("train.fp8") is not None:
        yield "train.fp8", "only goes with compile.enabled true: uncompiled, the scaling costs more than float8 saves"
    if get("compile.cache") is not None:
        yield "compile.cache", "only goes with compile.enabled true: there is no compiled code to keep"


def _implementation(get: Get) -> Iterator[Problem]:
    implementation = get("optim.implementation")
    if implementation == "auto":
        if get("optim.static_gradients"):
            yield "optim.static_gradients", "only goes with optim.implementation compiled or foreach_map, not auto"
        return
    if get("optim.name") != DEFAULT:
        yield "optim.implementation", f"{implementation} only goes with optim.name {DEFAULT}, not {get('optim.name')}"
    if not get("compile.enabled"):
        yield "optim.implementation", f"{implementation} only goes with compile.enabled true: nothing is compiled"


def _inductor_only(get: Get) -> Iterator[Problem]:
    backend, modules, mode = get("compile.backend"), get("compile.modules") or {}, get("compile.mode")
    # With the graph engine they have no effect at all: config.engine_rules.
    if backend == "inductor" or get("train.engine") == "graph":
        return
    if mode is not None:
        yield (
            "compile.mode",
            f"{mode} only goes with compile.backend inductor, not {backend}: set compile.backend=inductor",
        )
    if get("compile.options") is not None:
        yield "compile.options", f"only goes with compile.backend inductor, not {backend}"
    for path, own in modules.items():
        for name in ("mode", "options"):
            if own.get(name) is not None:
                yield "compile.modules", f"{path}: {name} only goes with compile.backend inductor, not {backend}"


def _options(get: Get) -> Iterator[Problem]:
    named, modules = {"compile.options": get("compile.options")}, get("compile.modules") or {}
    named |= {f"compile.modules.{path}.options": own.get("options") for path, own in modules.items()}
    for place, options in named.items():
        for name, value in (options or {}).items():
            if not isinstance(value, bool | int | float | str):
                yield place, f"{name}: must be true, false, a number or text, not {json.dumps(value)}"


def _compile_modules(get: Get) -> Iterator[Problem]:
    modules, layout = get("compile.modules"), get("data.layout")
    if modules is None:
        return
    # An empty mapping comes here too: it would leave everything eager in silence.
    if not any(own.get("enabled", True) for own in modules.values()):
        problem = "names nothing to compile: null compiles as compile.scope says, compile.enabled=false nothing"
        yield "compile.modules", problem
    for path, own in modules.items():
        dynamic = own.get("dynamic")
        if dynamic == "marked" and layout != "dynamic":
            yield "compile.modules", f"{path}: dynamic: marked only goes with layout dynamic, not {layout}"
        elif isinstance(dynamic, bool) and layout == "dynamic":
            yield "compile.modules", f"{path}: dynamic: layout dynamic makes the row length symbolic: marked or null"


COMPILE_RULES: tuple[Rule, ...] = (_compiled_only, _implementation, _inductor_only, _options, _compile_modules)
