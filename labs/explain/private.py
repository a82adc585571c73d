"""Use what torch does not promise to keep, beside Dynamo's own names, with an error that says so if it is gone."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._inductor.config

from sftkit.errors import ConfigError

TRIED = "2.13"
"The torch that these were tried on."


def _needed(owner: Any, name: str, where: str) -> Any:
    """Return a private attribute of torch.

    Raises:
        ConfigError: this torch has none of that name.
    """
    if not hasattr(owner, name):
        raise ConfigError(
            f"sftkit explain: torch {torch.__version__} has no {where}.{name}, which torch {TRIED} has: take that "
            "one, or leave --kernels and --labs out"
        )
    return getattr(owner, name)


def quiet_profiler() -> None:
    """Leave out the two lines that Kineto prints for each profile as of torch 2.13 (USDT: profiler_start). Only without
    a GPU, whose profiler's errors are wanted. Kineto reads the variable when the first profile begins."""
    if not torch.cuda.is_available():
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def kernels_in_profile() -> AbstractContextManager[None]:
    """Have generated C++ marked, inside, around each kernel, so that a profile on a CPU shows them by name."""
    # Private: the option that marks generated kernels (pytorch/pytorch#89367).
    cpp = _needed(torch._inductor.config, "cpp", "torch._inductor.config")
    _needed(cpp, "enable_kernel_profile", "torch._inductor.config.cpp")
    # A patch of Inductor's settings, undone when the context is left.
    return torch._inductor.config.patch({"cpp.enable_kernel_profile": True})


def dispatch_keys(tensor: torch.Tensor) -> list[str]:
    """Return the dispatch keys of a tensor, the first that is asked for a kernel first."""
    # Private: torch has no public view of dispatch keys (pytorch/pytorch#26207). Its text lists the lowest priority
    # first.
    keys = str(_needed(torch._C, "_dispatch_keys", "torch._C")(tensor))
    return [word.strip() for word in keys.partition("(")[2].rstrip(")").split(",") if word.strip()][::-1]


def has_kernel(operator: str, key: str) -> bool:
    """Return whether an overload of an operator such as aten::linear, but those with out=, has a kernel of its own for
    a dispatch key, or for the alias that AutogradCPU and its kin have in common."""
    # Private: the public torch.library.get_kernel (pytorch/pytorch#158393) gives the kernel that would run, which may
    # be registered for another key. Some overloads are known to Python alone, and asking about the keys of one of those
    # is an error, so `known` is asked first.
    known = _needed(torch._C, "_dispatch_has_kernel", "torch._C")
    asked = _needed(torch._C, "_dispatch_has_kernel_for_dispatch_key", "torch._C")
    space, _, name = operator.partition("::")
    overloads = [one for one in getattr(getattr(torch.ops, space), name).overloads() if "out" not in one]
    names = [operator if overload == "default" else f"{operator}.{overload}" for overload in overloads]
    keys = (key, "Autograd") if key.startswith("Autograd") else (key,)
    return any(known(each) and asked(each, one) for each in names for one in keys)
