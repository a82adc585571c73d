"""Matrix products of a block of Qwen3's shapes over 16,384 positions: cuBLAS layer by layer, cuBLAS with the weights of
several layers as one matrix, and QuACK's kernels with the best of some tiles, SwiGLU in what they write included.

python benchmarks/h200_step/gemms.py OUT.json [--sizes 0.6B 1.7B 4B 8B] [--seconds 80]

Needs the extra attention-fa4, which brings quack-kernels; without it the columns of cuBLAS remain. On a CPU the shapes
are small, and the numbers say that the script works. Errors are relative, by the norm, to products in fp32. The last
rows run whole operators (ops/joined.py) forward and backward, and compare their gradients.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from sftkit.ops import joined, quack_products
from sftkit.ops.quack_products import Tile, product, swiglu_gradient_product, swiglu_product

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16
ROWS = 16384 if ON_GPU else 64
Work = Callable[[], Any]


class Size(NamedTuple):
    """Widths of a model's layers, and its blocks."""

    hidden: int
    queries: int
    keys: int
    ffn: int
    blocks: int


SIZES = {
    "0.6B": Size(1024, 2048, 1024, 3072, 28),
    "1.7B": Size(2048, 2048, 1024, 6144, 28),
    "4B": Size(2560, 4096, 1024, 9728, 36),
    "8B": Size(4096, 4096, 1024, 12288, 36),
}
if not ON_GPU:
    SIZES = {"tiny": Size(64, 128, 64, 96, 2)}
WIDE = [
    Tile(128, 256, pingpong=False, cluster=(2, 1)),
    Tile(128, 192, pingpong=True, cluster=(2, 1)),
    Tile(256, 128, pingpong=False, cluster=(2, 1)),
    Tile(256, 192, pingpong=False, cluster=(2, 1)),
    Tile(128, 160, pingpong=True, cluster=(2, 1)),
    Tile(128, 256, pingpong=False, cluster=(1, 2)),
]
NARROW = [
    Tile(128, 128, pingpong=True, cluster=(2, 1)),
    Tile(128, 192, pingpong=True, cluster=(2, 1)),
    Tile(256, 128, pingpong=False, cluster=(2, 1)),
    Tile(128, 192, pingpong=False, cluster=(2, 1)),
    Tile(128, 160, pingpong=True, cluster=(2, 1)),
    Tile(128, 128, pingpong=True, cluster=(1, 2)),
]
TILES = {
    "forward": WIDE,
    "input": WIDE,
    "input added": WIDE,
    "weight": WIDE,
    "gated": WIDE,
    "gated gradient": NARROW,
    "input of both": WIDE,
    "weights of both": [*WIDE[:5], WIDE[0]._replace(swapped=True)],
}


class Row(NamedTuple):
    """A product in all ways that compute it."""

    name: str
    flops: int
    exact: Callable[[], Tensor]
    "fp32, in the columns of `apart`"
    apart: Work
    joined: Work | None
    kind: str
    quack: Callable[[Tile], Any]
    columns: Callable[[Any], Tensor] = lambda out: out
    "what QuACK wrote, in the columns of `exact`"


def empty(*shape: int) -> Tensor:
    """Return memory for an output."""
    return torch.empty(shape, device=DEVICE, dtype=DTYPE)


def milliseconds(work: Work, flops: int) -> float:
    """Return the device's milliseconds of a call, queued behind other work so that launching is hidden."""
    if not ON_GPU:
        started = time.perf_counter()
        work()
        return (time.perf_counter() - started) * 1e3
    repeats = min(max(int(6e-3 * 600e12 / flops), 4), 30)
    work()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(6_000_000)  # 3 to 4 ms
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def error(found: Tensor, exact: Tensor) -> float:
    """Return the relative error of a result, by the norm."""
    return float((found.float() - exact).norm() / exact.norm())


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return silu(gate) * up


def silu_times_backward(d_h: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `silu_times`."""
    g, u, d = gate.float(), up.float(), d_h.float()
    s = torch.sigmoid(g)
    return (d * u * (s + g * s * (1 - s))).to(gate.dtype), (d * g * s).to(gate.dtype)


# As one kernel each, which is what a compiled block has.
one_kernel = torch.compile(silu_times, dynamic=True) if ON_GPU else silu_times
one_kernel_backward = torch.compile(silu_times_backward, dynamic=True) if ON_GPU else silu_times_backward


def halves(both: Tensor) -> Tensor:
    """Return columns that alternate as gate next to up."""
    return torch.cat([both[:, ::2], both[:, 1::2]], 1)


def alternating(both: Tensor) -> Tensor:
    """Return gate next to up as columns that alternate."""
    return torch.stack(both.chunk(2, 1), 2).flatten(1)


def rows_of(size: Size) -> list[Row]:
    """Return the products of a block with random inputs, its gradients as large as its inputs."""
    random = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=DEVICE, generator=random) * scale).to(DTYPE)

    hidden, queries, keys, ffn, _ = size
    cuts = [queries, keys, keys]
    qkv = draw(sum(cuts), hidden, scale=hidden**-0.5)
    wq, wk, wv = qkv.split(cuts)
    wo = draw(hidden, queries, scale=queries**-0.5)
    both_weights = draw(2 * ffn, hidden, scale=hidden**-0.5)
    wg, wu = both_weights.chunk(2)
    wd = draw(hidden, ffn, scale=ffn**-0.5)
    x = draw(ROWS, hidden)
    d_y = draw(ROWS, hidden)
    attended = draw(ROWS, queries)
    d_qkv = draw(ROWS, sum(cuts))
    dq, dk, dv = (part.contiguous() for part in d_qkv.split(cuts, 1))
    both = x @ both_weights.t()
    gate, up = (part.contiguous() for part in both.chunk(2, 1))
    h = joined.swiglu(both)
    d_both = joined.swiglu_backward(d_y @ wd, both)[0]
    dg, du = (part.contiguous() for part in d_both.chunk(2, 1))
    mixed, d_mixed = alternating(both), alternating(d_both)

    def added_cublas() -> Tensor:
        return (dq @ wq).addmm_(dk, wk).addmm_(dv, wv)

    def added_quack(tile: Tile) -> Tensor:
        d_x = product(dq, wq.t(), empty(ROWS, hidden), tile)
        product(dk, wk.t(), d_x, tile, added=d_x)
        return product(dv, wv.t(), d_x, tile, added=d_x)

    def copied() -> Tensor:
        return torch.cat([dq, dk, dv], 1) @ qkv

    def gated(tile: Tile) -> Tensor:
        out = empty(ROWS, ffn)
        swiglu_product(x, both_weights, empty(ROWS, 2 * ffn), out, tile)
        return out

    def gradient(tile: Tile) -> Tensor:
        out = empty(ROWS, 2 * ffn)
        swiglu_gradient_product(d_y, wd, mixed, out, empty(ROWS, ffn), tile)
        return out

    def exact_gradient() -> Tensor:
        found = silu_times_backward(d_y.float() @ wd.float(), *both.float().chunk(2, 1))
        return torch.cat(found, 1)

    def exact_gated() -> Tensor:
        g, u = (x.float() @ both_weights.float().t()).chunk(2, 1)
        return silu(g) * u

    def plain(name: str, a: Tensor, b: Tensor, kind: str, apart: Work | None = None, whole: Work | None = None) -> Row:
        flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]

        def quack(tile: Tile) -> Tensor:
            return product(a, b.t(), empty(a.shape[0], b.shape[1]), tile)

        def one() -> Tensor:
            return a @ b

        return Row(name, flops, lambda: a.float() @ b.float(), apart or one, whole, kind, quack)

    def both_input(tile: Tile) -> Tensor:
        return product(d_mixed, both_weights.t(), empty(ROWS, hidden), tile, alternating="B")

    def both_weight(tile: Tile) -> Tensor:
        return product(d_mixed.t(), x.t(), empty(2 * ffn, hidden), tile, alternating="out")

    wide = 4 * ROWS * hidden * ffn
    in_qkv = 2 * ROWS * hidden * sum(cuts)
    exact_dx = lambda: d_qkv.float() @ qkv.float()  # noqa: E731
    exact_dx_both = lambda: d_both.float() @ both_weights.float()  # noqa: E731
    exact_dw_both = lambda: d_both.float().t() @ x.float()  # noqa: E731
    return [
        plain("qkv forward", x, qkv.t(), "forward", lambda: [x @ wq.t(), x @ wk.t(), x @ wv.t()], lambda: x @ qkv.t()),
        plain("qkv input", d_qkv, qkv, "input", lambda: [dq @ wq, dk @ wk, dv @ wv], lambda: d_qkv @ qkv),
        Row("qkv input, added up", in_qkv, exact_dx, added_cublas, copied, "input added", added_quack),
        plain(
            "qkv weight", d_qkv.t(), x, "weight", lambda: [dq.t() @ x, dk.t() @ x, dv.t() @ x], lambda: d_qkv.t() @ x
        ),
        plain("o forward", attended, wo.t(), "forward"),
        plain("o input", d_y, wo, "input"),
        plain("o weight", d_y.t(), attended, "weight"),
        plain(
            "gate, up forward", x, both_weights.t(), "forward", lambda: [x @ wg.t(), x @ wu.t()],
            lambda: x @ both_weights.t(),
        ),
        Row(
            "gate, up forward with SwiGLU", wide, exact_gated, lambda: one_kernel(x @ wg.t(), x @ wu.t()),
            lambda: joined.swiglu(x @ both_weights.t()), "gated", gated,
        ),
        Row(
            "gate, up input", wide, exact_dx_both, lambda: (dg @ wg).addmm_(du, wu), lambda: d_both @ both_weights,
            "input of both", both_input,
        ),
        Row(
            "gate, up weight", wide, exact_dw_both, lambda: [dg.t() @ x, du.t() @ x], lambda: d_both.t() @ x,
            "weights of both", both_weight,
        ),
        plain("down forward", h, wd.t(), "forward"),
        plain("down input", d_y, wd, "input"),
        Row(
            "down input with SwiGLU's gradient", wide // 2, exact_gradient,
            lambda: [*one_kernel_backward(d_y @ wd, gate, up)],
            lambda: joined.swiglu_backward(d_y @ wd, both)[0], "gated gradient", gradient, halves,
        ),
        plain("down weight", d_y.t(), h, "weight"),
    ]  # fmt: skip


def measured(row: Row, deadline: float, *, with_quack: bool) -> dict[str, Any]:
    """Return milliseconds and errors of a product in each way; QuACK's tiles are tried first."""
    exact = row.exact()
    outs: dict[str, Any] = {"apart": row.apart}
    if row.joined is not None:
        outs["joined"] = row.joined
    found: dict[str, Any] = {"name": row.name, "kind": row.kind, "flops": row.flops}
    times: dict[str, float] = {}
    for tile in TILES[row.kind] if with_quack else ():
        if time.monotonic() > deadline:
            found["cut"] = True
            break
        label = tile_name(tile)
        try:
            wrong = error(row.columns(row.quack(tile)), exact)
            if not wrong < 0.02:
                raise ValueError(f"error {wrong:.3g}")
            times[label] = milliseconds(lambda tile=tile: row.quack(tile), row.flops)
        except Exception as problem:  # a tile that does not fit is a row of its own
            found.setdefault("failed", {})[label] = " ".join(repr(problem).split())[:200]
    if times:
        best = min(times, key=times.__getitem__)
        found |= {"tiles": times, "tile": best}
        chosen = next(tile for tile in TILES[row.kind] if tile_name(tile) == best)
        outs["quack"] = lambda: row.quack(chosen)
    for way, work in outs.items():
        result = work()
        if isinstance(result, list):
            dim = 0 if row.kind.startswith("weight") else 1
            result = sum(result[1:], result[0]) if row.kind == "input" else torch.cat(result, dim)
        found[f"{way} error"] = error(row.columns(result) if way == "quack" else result, exact)
    # In turns, so that the card's clock is the same for all.
    rounds: dict[str, list[float]] = {way: [] for way in outs}
    for _ in range(3):
        for way, work in outs.items():
            rounds[way].append(milliseconds(work, row.flops))
    return found | {way: median(values) for way, values in rounds.items()}


def tile_name(tile: Tile) -> str:
    """Return a tile in words."""
    kind = "pingpong" if tile.pingpong else "cooperative"
    return f"{tile.m}x{tile.n} {kind} {tile.cluster[0]}x{tile.cluster[1]}{' swapped' * tile.swapped}"


def operators(size: Size, best: dict[str, Tile], *, with_quack: bool) -> list[dict[str, Any]]:
    """Return milliseconds, host's microseconds and errors of whole operators, forward and backward."""
    random = torch.Generator(DEVICE).manual_seed(1)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=DEVICE, generator=random) * scale).to(DTYPE)

    hidden, queries, keys, ffn, _ = size
    cuts = [queries, keys, keys]
    x = draw(ROWS, hidden).requires_grad_()
    gate, up = (w.requires_grad_() for w in draw(2 * ffn, hidden, scale=hidden**-0.5).chunk(2))
    down = draw(hidden, ffn, scale=ffn**-0.5).requires_grad_()
    qkv = [w.requires_grad_() for w in draw(sum(cuts), hidden, scale=hidden**-0.5).split(cuts)]
    d_y = draw(ROWS, hidden)
    d_parts = [draw(ROWS, n) for n in cuts]
    own = dict(joined.TILES)
    joined.TILES.update({kind: tile for kind, tile in best.items() if kind in own})

    def mlp_apart(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
        gated = silu_times if x.dtype == torch.float32 else one_kernel
        return (linear(gated(linear(x, gate), linear(x, up)), down),)

    def layers_apart(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x, weight) for weight in weights)

    rows = []
    for name, apart, weights, grads in (
        ("mlp", mlp_apart, [gate, up, down], [d_y]),
        ("qkv", layers_apart, qkv, d_parts),
    ):
        copies = [t.detach().float().requires_grad_() for t in (x, *weights)]
        outs = apart(*copies)
        exact = [*outs, *torch.autograd.grad(outs, copies, [g.float() for g in grads])]
        exact = [t.detach() for t in exact]
        flops = 2 * ROWS * sum(w.numel() for w in weights)
        for way in ("apart", "cublas", *(["quack"] if with_quack else [])):
            if way == "apart":
                forward = lambda: apart(x, *weights)  # noqa: E731, B023
            elif name == "mlp":
                forward = lambda way=way: (joined.joined_mlp(x, gate, up, down, way)[0],)  # noqa: E731
            else:
                forward = lambda way=way: joined.joined_layers(x, qkv, way)  # noqa: E731

            def work(forward: Work = forward, given: Any = (x, *weights), grads: Any = grads) -> list[Tensor]:
                outs = forward()
                return [*outs, *torch.autograd.grad(outs, given, grads)]

            row: dict[str, Any] = {"operator": name, "way": way}
            try:
                errors = [error(f.detach(), e) for f, e in zip(work(), exact, strict=True)]
                row["errors"] = [float(f"{e:.3g}") for e in errors]
                row["same bits again"] = all(torch.equal(a, b) for a, b in zip(work(), work(), strict=True))
                row["ms"] = median(milliseconds(work, 3 * flops) for _ in range(3))
                if ON_GPU:
                    torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(5):
                    work()
                row["host us"] = (time.perf_counter() - started) / 5 * 1e6
            except Exception as problem:
                row["failed"] = " ".join(repr(problem).split())[:300]
            rows.append(row)
    joined.TILES.update(own)
    return rows


def compile_share(index: int, count: int) -> None:
    """Compile every count-th kernel into the folder that they are kept in; nothing runs."""
    works = [(kind, tile) for kind, tiles in TILES.items() for tile in tiles]
    for kind, tile in works[index::count]:
        try:
            joined.compile_kernel(kind, tile)
        except Exception as problem:
            print(f"{kind} {tile_name(tile)}: {' '.join(repr(problem).split())[:300]}", flush=True)


def compile_ahead(seconds: float) -> float:
    """Compile all kernels in several processes, and return how long it took."""
    started = time.monotonic()
    count = max(min(len(os.sched_getaffinity(0)) - 2, 14), 1)
    command = [sys.executable, __file__, "-", "--compile"]
    environment = os.environ | {"QUACK_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a"}  # no worker needs the GPU
    workers = [subprocess.Popen([*command, f"{i}/{count}"], stdout=sys.stderr, env=environment) for i in range(count)]
    for worker in workers:
        try:
            worker.wait(max(seconds - (time.monotonic() - started), 1))
        except subprocess.TimeoutExpired:
            worker.kill()
    return time.monotonic() - started


def line(row: dict[str, Any]) -> str:
    """Return the row of a product in the table."""

    def shown(way: str) -> str:
        if way not in row:
            return "-"
        return f"{row[way]:.3f} ({row['flops'] / row[way] / 1e9:.0f}; {row[f'{way} error']:.1e})"

    note = row.get("tile", "") + (f"; {len(row['failed'])} failed" if "failed" in row else "")
    return f"| {row['name']} | {shown('apart')} | {shown('joined')} | {shown('quack')} | {note} |"


def operator_line(row: dict[str, Any], blocks: int) -> str:
    """Return the row of an operator in the table."""
    if "failed" in row:
        return f"| {row['operator']} | {row['way']} | {row['failed']} | | | | |"
    times = f"{row['ms']:.3f} | {row['ms'] * blocks:.1f} | {row['host us']:.0f}"
    errors = " ".join(f"{e:.1e}" for e in row["errors"])
    return f"| {row['operator']} | {row['way']} | {times} | {row['same bits again']} | {errors} |"


def main() -> None:
    """Measure each size until time is up, print tables, and write all numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--seconds", type=float, default=80.0, help="of all, compiling included")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        index, count = map(int, args.compile.split("/"))
        compile_share(index, count)
        return
    deadline = time.monotonic() + args.seconds
    reason = quack_products.quack_unsupported_reason(DEVICE)
    result: dict[str, Any] = {"torch": torch.__version__, "quack": reason or "runs", "rows": ROWS, "sizes": {}}
    result["device"] = torch.cuda.get_device_name() if ON_GPU else "cpu"
    print(f"{result['device']}, torch {torch.__version__}, QuACK {reason or 'runs'}", flush=True)
    if reason is None:
        result["compile_seconds"] = compile_ahead(min(60.0, args.seconds / 2))
        print(f"kernels compiled in {result['compile_seconds']:.1f} s", flush=True)
    if ON_GPU:  # warm, so that the first row is not measured at another clock
        warm = torch.randn(8192, 8192, device=DEVICE).to(DTYPE)
        for _ in range(200):
            warm @ warm
        torch.cuda.synchronize()
    for name in args.sizes:
        if time.monotonic() > deadline:
            print(f"{name}: time is up")
            break
        size = SIZES[name]
        print(
            f"\n{name}, ms (TFLOP/s; error)\n\n| product | apart | joined | QuACK | best tile |\n|---|---|---|---|---|"
        )
        measured_rows = []
        best: dict[str, tuple[int, Tile]] = {}
        for row in rows_of(size):
            if time.monotonic() > deadline:
                break
            try:
                found = measured(row, deadline, with_quack=reason is None)
            except Exception as problem:  # the other rows are worth having
                print(f"| {row.name} | {' '.join(repr(problem).split())[:300]} | | | |", flush=True)
                continue
            measured_rows.append(found)
            print(line(found), flush=True)
            for label, problem in found.get("failed", {}).items():
                print(f"  {label}: {problem}", file=sys.stderr)
            if "tile" in found and row.flops > best.get(row.kind, (0, None))[0]:
                tile = next(t for t in TILES[row.kind] if tile_name(t) == found["tile"])
                best[row.kind] = (row.flops, tile)
        rows = operators(size, {kind: tile for kind, (_, tile) in best.items()}, with_quack=reason is None)
        print("\n| operator | way | ms | ms of all blocks | host us | same bits again | errors: outputs, x, weights |")
        print("|---|---|---|---|---|---|---|")
        for found in rows:
            print(operator_line(found, size.blocks), flush=True)
        result["sizes"][name] = {"products": measured_rows, "operators": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{args.out}, {args.seconds - (deadline - time.monotonic()):.0f} s")


if __name__ == "__main__":
    main()
