"""Matrix products by QuACK's kernels (Tri Dao's CuTe kernels for Hopper), with SwiGLU in what they write.

Gate and up are one matrix [2F, H], first all rows of gate, then all of up. The kernels read it as if rows of both
alternated (`concat_layout`), since a tile must hold both halves of a pair. What they write and read between the
products has columns that alternate: g0 u0 g1 u1 ...
"""

import os
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from sftkit.runtime.hardware import user_cache

KNOWN_VERSIONS = ("0.4.",)
"Of quack-kernels: arguments by place are those of these."


class Tile(NamedTuple):
    """The work of a thread block: rows and columns, whether two groups of warps alternate, and blocks in a cluster."""

    m: int
    n: int
    pingpong: bool
    cluster: tuple[int, int]
    swapped: bool = False
    "the transposed product is computed"


def kernels_folder() -> Path:
    """Return where compiled kernels are kept. The folder is the user's own, since what lies there is run."""
    return Path(os.environ.get("QUACK_CACHE_DIR") or user_cache() / "quack")


@cache
def quack() -> tuple[ModuleType, ModuleType, ModuleType]:
    """Import QuACK's modules of plain products, of those with an activation, and of its gradient.

    Raises:
        ImportError: it is not installed, or in a version that is not known.
    """
    import quack as package
    from quack import cache_utils, gemm, gemm_act, gemm_dact

    # Not by the variable alone, which is read when the module is imported, and FlashAttention-4 imports it.
    cache_utils.CACHE_DIR = str(kernels_folder())
    if not package.__version__.startswith(KNOWN_VERSIONS):
        raise ImportError(f"quack-kernels {package.__version__} is not one of {', '.join(KNOWN_VERSIONS)}x")
    return gemm, gemm_act, gemm_dact


def quack_unsupported_reason(device: torch.device) -> str | None:
    """Return why the products, which are of bf16 matrices, cannot run on this device; None if they can."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return "needs a Hopper GPU"
    try:
        quack()
    except Exception as error:  # not installed, or versions that do not fit each other
        return f"cannot be imported ({' '.join(str(error).split())[:120]})"
    return None


def product(
    a: Tensor, b: Tensor, out: Tensor, tile: Tile, *, alternating: str | None = None, added: Tensor | None = None
) -> Tensor:
    """Write a bᵀ, plus `added`, into `out` and return it.

    Args:
        a: [M, K]. b: [N, K]. out, added: [M, N]. Each has one dimension of stride 1.
        alternating: B or out, which then is gate above up or gate next to up, and is used with alternating ones.
    """
    a, b, out = (x.detach().unsqueeze(0) for x in (a, b, out))
    added = None if added is None else added.unsqueeze(0)
    if tile.swapped:
        a, b = b, a
        alternating = "A" if alternating == "B" else alternating
        result, added = out.mT, None if added is None else added.mT
    else:
        result = out
    given = (a, b, result, added, None, tile.m, tile.n, *tile.cluster)
    layout = None if alternating is None else (alternating,)
    quack()[0].gemm(*given, pingpong=tile.pingpong, concat_layout=layout)
    return out[0]


def swiglu_product(x: Tensor, gate_up: Tensor, both: Tensor, h: Tensor, tile: Tile) -> None:
    """Write x gate_upᵀ, its columns alternating, into `both`, and silu(gate) * up into h.

    Args:
        x: [N, H]. gate_up: [2F, H], gate above up. both: [N, 2F]. h: [N, F].
    """
    x, gate_up, both, h = (t.detach().unsqueeze(0) for t in (x, gate_up, both, h))
    given = (x, gate_up, both, None, h, None, "swiglu", tile.m, tile.n, *tile.cluster)
    quack()[1].gemm_act(*given, pingpong=tile.pingpong, concat_layout=("B",))


def swiglu_gradient_product(d_y: Tensor, down: Tensor, both: Tensor, d_both: Tensor, h: Tensor, tile: Tile) -> None:
    """Write the gradient by `both` into d_both, both with alternating columns, and h again, given that by the output.

    Args:
        d_y: [N, H]. down: [H, F]. both, d_both: [N, 2F]. h: [N, F].
    """
    d_y, weight, both, d_both, h = (t.detach().unsqueeze(0) for t in (d_y, down.t(), both, d_both, h))
    given = (d_y, weight, d_both, both, h, None, "swiglu", tile.m, tile.n, *tile.cluster)
    quack()[2].gemm_dact(*given, pingpong=tile.pingpong)
