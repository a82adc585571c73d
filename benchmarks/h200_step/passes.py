"""Time passes over activations, gradients and parameters next to what a step runs today, and check their results.

python benchmarks/h200_step/passes.py OUT.json

Shapes are those of 16,384 positions of Qwen3 0.6B and 1.7B (attention: the same in both). Times are medians of CUDA
events, without the host's part. Errors are norms of differences to fp64 over its norm. A section that fails is
reported with its reason, and the others go on.

Predicted for one H200, milliseconds, before the first run:
- norm, rotary embedding and attention, both directions, a block: 0.11 less than today (3.1 in a step of 28 blocks):
  forward 0.05 instead of 0.06, backward 0.11 instead of 0.2, without a pass for the sums over groups.
- backward of attention by group instead of with repeats: 0.02 less a block.
- squared norm of 596M gradients: 0.32 instead of 1.0.
- AdamW of them: 4.1, 3.9 are the bytes.
- embedding's gradient into the head's: 0.15 instead of 0.45.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from labs.fused import rotary, rotary_kernel, squares_kernel
from sftkit.ops import adamw_kernel, attention, flash
from sftkit.ops.tensors import ParameterShard

POSITIONS, HEADS, KEY_HEADS, HEAD_DIM, VOCAB = 16_384, 16, 8, 128, 151_936
SIZES = {"0.6B": (1024, 3072), "1.7B": (2048, 6144)}
"Hidden size and width of the MLP."
BLOCKS = 28
EPS = 1e-6
Row = dict[str, Any]


def milliseconds(work: Callable[[], object], runs: int = 20) -> float:
    """Return the median milliseconds of a call on the GPU; the host runs ahead of it."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    # Private: no public way keeps a GPU busy without moving bytes. Some 60 ms, in which the host gets ahead.
    torch.cuda._sleep(100_000_000)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * runs)]
    for start, end in zip(events[::2], events[1::2], strict=True):
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in zip(events[::2], events[1::2], strict=True))


def row(what: str, ms: float, megabytes: float | None = None, error: float | None = None, **more: Any) -> Row:
    """Return a row of the table, and print it."""
    speed = None if megabytes is None else megabytes / ms / 1e3
    found = {"what": what, "ms": round(ms, 4), "tb_per_sec": speed and round(speed, 2), "error": error, **more}
    shown = [f"{what:62}", f"{ms:9.4f} ms", f"{speed:5.2f} TB/s" if speed else " " * 10]
    shown += [f"error {error:.1e}" if error is not None else "", *(f"{k}={v}" for k, v in more.items())]
    print("  ".join(shown), flush=True)
    return found


def error(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over that of `exact`."""
    return float((found.double() - exact).norm() / exact.norm())


def kernels_of(work: Callable[[], object], calls: int = 5) -> list[tuple[str, float, int]]:
    """Return name, microseconds of a call, and launches of a call of each kernel that a call runs."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
    spans: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            spans[event.name] += event.time_range.end - event.time_range.start
            counts[event.name] += 1
    return [(name, us / calls, round(counts[name] / calls)) for name, us in spans.most_common()]


def shown_kernels(title: str, work: Callable[[], object]) -> Row:
    """Print and return what `kernels_of` found."""
    found = kernels_of(work)
    print(f"  {title}: {sum(us for _, us, _ in found):.1f} us in {sum(n for *_, n in found)} launches")
    for name, us, launches in found[:16]:
        print(f"    {us:8.1f} us {launches:4} x {name[:110]}")
    return {"what": title, "kernels": found}


# ---- rotary embedding and attention ----


def lengths() -> Tensor:
    """Return where documents of a row start, as in plan.yaml: lognormal, median 270, mean 400, at most 2048."""
    random = torch.Generator().manual_seed(0)
    sigma = (2.0 * torch.tensor(400 / 270).log()).sqrt()
    drawn = (torch.randn(400, generator=random) * sigma + torch.tensor(270.0).log()).exp().round().clamp(4, 2048)
    ends = drawn.long().cumsum(0)
    ends = torch.cat([torch.zeros(1, dtype=torch.long), ends[ends < POSITIONS], torch.tensor([POSITIONS])])
    return ends.to(torch.int32).cuda()


class Case:
    """Queries, keys and values as projections return them, with what attention needs."""

    def __init__(self, heads: int) -> None:
        torch.manual_seed(0)
        options: Any = {"device": "cuda", "dtype": torch.bfloat16}
        self.heads = heads
        self.query = torch.randn(POSITIONS, heads, HEAD_DIM, **options)
        self.key = torch.randn(POSITIONS, KEY_HEADS, HEAD_DIM, **options)
        self.value = torch.randn(POSITIONS, KEY_HEADS, HEAD_DIM, **options)
        self.weights = [1 + 0.1 * torch.randn(HEAD_DIM, **options) for _ in range(2)]
        self.starts = lengths()
        places = torch.arange(POSITIONS, device="cuda")
        document = torch.searchsorted(self.starts[1:].long(), places, right=True)
        angles = (places - self.starts[document])[:, None] * (1e6 ** (-torch.arange(64, device="cuda") / 64.0))
        angles = torch.cat([angles, angles], 1)
        self.cos = angles.cos().bfloat16()
        self.sin = angles.sin().bfloat16()
        self.backend = "varlen" if flash.kernel_unsupported_reason("fa4", self.query.device, torch.bfloat16) else "fa4"
        groups = heads // KEY_HEADS
        self.repeats = groups if groups <= flash.MAX_REPEATS[self.backend] else 1
        self.grads = [torch.randn(POSITIONS, heads, HEAD_DIM, **options)]
        self.grads += [torch.randn(POSITIONS, KEY_HEADS * self.repeats, HEAD_DIM, **options) for _ in range(2)]

    def exact(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the rotated queries and keys and all gradients in fp64."""
        given = [x.double().requires_grad_() for x in (self.query, self.key, *self.weights)]
        cos, sin = self.cos.double()[:, None], self.sin.double()[:, None]

        def rotated(x: Tensor, weight: Tensor) -> Tensor:
            x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat([-b, a], -1) * sin

        out = [rotated(given[0], given[2]), rotated(given[1], given[3])]
        of_key = self.grads[1].double().unflatten(1, (KEY_HEADS, -1)).sum(2)
        grads = torch.autograd.grad(out, given, [self.grads[0].double(), of_key])
        return [x.detach() for x in out], list(grads)


def kernels_alone(case: Case, settings: int | None = None) -> Iterator[Row]:
    """Time both kernels with the first so many settings; None: all."""
    out, grads = case.exact()
    given = (case.query, case.key, *case.weights, case.cos, case.sin, EPS)
    size = (case.query.nbytes + case.key.nbytes) / 1e6
    for positions, rows, warps in ((8, 32, 4), (4, 32, 4), (8, 16, 2), (4, 16, 4), (8, 64, 8))[:settings]:
        rotary_kernel.FORWARD_TILE = {"POSITIONS": positions, "ROWS": rows, "num_warps": warps}
        off = max(error(a, b) for a, b in zip(rotary_kernel.rotate_heads(*given), out, strict=True))
        ms = milliseconds(lambda: rotary_kernel.rotate_heads(*given))
        name = f"rotate, {case.heads} heads: {positions} positions, {rows} rows, {warps} warps"
        yield row(name, ms, 2 * size + 2 * case.cos.nbytes / 2e6, off)
    moved = sum(x.nbytes for x in case.grads) / 1e6 + 2 * size + case.value.nbytes / 1e6 + case.cos.nbytes / 1e6
    tried = ((8, 16, 4), (16, 32, 4), (8, 32, 4), (16, 16, 4), (16, 32, 8), (32, 16, 4), (8, 16, 2))
    for positions, rows, warps in tried[:settings]:
        rotary_kernel.BACKWARD_TILE = {"POSITIONS": positions, "ROWS": rows, "num_warps": warps}
        found = rotary_kernel.rotate_heads_back(tuple(case.grads), *given)
        off = max(error(a, b) for a, b in zip((*found[:2], *found[3]), grads, strict=True))
        off_value = error(found[2], case.grads[2].double().unflatten(1, (KEY_HEADS, -1)).sum(2))
        again = rotary_kernel.rotate_heads_back(tuple(case.grads), *given)
        same = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        ms = milliseconds(lambda: rotary_kernel.rotate_heads_back(tuple(case.grads), *given))
        name = f"rotate back, {case.heads} heads: {positions} positions, {rows} rows, {warps} warps"
        yield row(name, ms, moved, max(off, off_value), same_twice=same)


def whole_attention(case: Case) -> Iterator[Row]:
    """Time norms, rotary embedding and attention, as a compiled block runs them today and in one operator."""
    documents = attention.Documents(case.backend, 2048, cu_seqlens=case.starts)
    module = torch.nn.Identity()
    scale = HEAD_DIM**-0.5

    def today(query: Tensor, key: Tensor, value: Tensor, one: Tensor, two: Tensor) -> Tensor:
        def normed(x: Tensor, weight: Tensor) -> Tensor:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
            return (weight * wide.to(x.dtype)).transpose(0, 1)[None]

        q, k = normed(query, one), normed(key, two)
        q, k = apply_rotary_pos_emb(q, k, case.cos[None], case.sin[None])
        out, _ = attention.attend(module, q, k, value.transpose(0, 1)[None], None, scale, documents=documents)
        return out.reshape(POSITIONS, -1)

    def ours(query: Tensor, key: Tensor, value: Tensor, one: Tensor, two: Tensor) -> Tensor:
        given = (query, key, value, one, two, case.cos, case.sin, EPS, case.starts, 2048, scale, 0, case.backend)
        return rotary.rotary_attention(*given)[0].reshape(POSITIONS, -1)

    given = [x.clone().requires_grad_() for x in (case.query, case.key, case.value, *case.weights)]
    grad = case.grads[0].reshape(POSITIONS, -1)
    results = {}
    for name, function in (("today", today), ("one operator", ours)):
        compiled = torch.compile(function, fullgraph=True, dynamic=False)

        def step(compiled: Any = compiled) -> tuple[Tensor, ...]:
            return torch.autograd.grad(compiled(*given), given, grad)

        results[name] = [compiled(*given).detach(), *step()]
        with torch.no_grad():
            forward = milliseconds(lambda compiled=compiled: compiled(*given))
        yield row(f"attention with norm and rotary, {case.heads} heads, forward: {name}", forward)
        off = max(error(a, b.double()) for a, b in zip(results[name], results["today"], strict=True))
        yield row(f"attention with norm and rotary, {case.heads} heads, both: {name}", milliseconds(step), error=off)
        yield shown_kernels(f"{name}, {case.heads} heads, {case.backend}", step)


def by_group(case: Case) -> Iterator[Row]:
    """Time FlashAttention-4's backward pass with repeated keys and values, and with a call a group."""
    interface = flash.fa4()
    groups = case.heads // KEY_HEADS
    rows = flash._fa4_rows(case.starts, case.starts, 2048, 0)
    scale = HEAD_DIM**-0.5
    query, key, value = case.query, case.key, case.value
    out, lse = flash.document_attention(query, key, value, case.starts, case.starts, 2048, scale, 0, "fa4")
    grad, causal = case.grads[0], True

    def repeated(keys: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x.unsqueeze(2).expand(-1, -1, groups, -1).flatten(1, 2) for x in keys)

    def repeats() -> tuple[Tensor, ...]:
        both = repeated((key, value))
        return interface._flash_attn_bwd(query, *both, out, grad, lse, scale, causal, **rows)

    def apart() -> tuple[Tensor, ...]:
        found = torch.empty_like(query)
        keys = query.new_empty(2, POSITIONS, KEY_HEADS, groups, HEAD_DIM)
        for g in range(groups):
            mine = (query[:, g::groups], key, value, out[:, g::groups], grad[:, g::groups], lse[g::groups])
            into = {"dq": found[:, g::groups], "dk": keys[0, :, :, g], "dv": keys[1, :, :, g]}
            interface._flash_attn_bwd(*mine, scale, causal, **rows, **into)
        return found, keys[0].flatten(1, 2), keys[1].flatten(1, 2)

    exact = [x.double() for x in repeats()]
    moved = (2 + 2 * groups) * key.nbytes / 1e6
    yield row(f"repeats alone, {case.heads} heads, torch", milliseconds(lambda: repeated((key, value))), moved)
    same = all(map(torch.equal, rotary_kernel.repeat_heads(key, value, groups), repeated((key, value))))
    ms = milliseconds(lambda: rotary_kernel.repeat_heads(key, value, groups))
    yield row(f"repeats alone, {case.heads} heads, kernel", ms, moved, same_bits=same)
    yield row(f"attention backward, {case.heads} heads, repeats", milliseconds(repeats))
    yield shown_kernels("repeats", repeats)
    off = max(error(a, b) for a, b in zip(apart(), exact, strict=True))
    yield row(f"attention backward, {case.heads} heads, a call a group", milliseconds(apart), error=off)
    yield shown_kernels("a call a group", apart)


def tiles(case: Case) -> Iterator[Row]:
    """Time FlashAttention-4 with other tiles than its own, which were chosen for long documents."""
    interface = flash.fa4()
    rows = flash._fa4_rows(case.starts, case.starts, 2048, 0)
    scale = HEAD_DIM**-0.5
    keys = rotary_kernel.repeat_heads(case.key, case.value, case.heads // KEY_HEADS)
    exact: dict[str, list[Tensor]] = {}
    found: tuple[Tensor, ...] = ()

    def timed(name: str, work: Callable[[], tuple[Tensor, ...]]) -> Row:
        kind = name.partition(" ")[0]
        started = time.perf_counter()
        try:
            results = work()
            torch.cuda.synchronize()
        except Exception as problem:  # a tile that does not fit
            print(f"{name}: {type(problem).__name__}: {problem}"[:300], flush=True)
            return {"what": name, "why": f"{type(problem).__name__}: {problem}"[:300]}
        compiled = time.perf_counter() - started
        exact.setdefault(kind, [x.double() for x in results])
        off = max(error(a, b) for a, b in zip(results, exact[kind], strict=True))
        return row(name, milliseconds(work), error=off, compiled_s=round(compiled, 1))

    for tile in (None, (128, 64), (128, 96), (64, 128), (64, 64), (192, 128)):
        named = {"softmax_scale": scale, "causal": True, "return_lse": True, "tile_mn": tile}

        def forward(named: Any = named) -> tuple[Tensor, ...]:
            return tuple(interface._flash_attn_fwd(case.query, case.key, case.value, **rows, **named)[:2])

        yield timed(f"forward {case.heads} heads, tile {tile or 'its own'}", forward)
        found = found or forward()
    own = interface._tile_size_bwd_sm90
    config = interface.BwdConfig
    numbers = {
        "its own": None,
        "64 x 128, one group for dQ": (64, 128, 2, 2, 2, True, False, False, 1, 2, 1, 2, True),
        "80 x 128": (80, 128, 2, 2, 2, True, False, True, 1, 2, 1),
        "64 x 96": (64, 96, 2, 2, 1, False, True, False, 1, 2, 1),
        "64 x 64": (64, 64, 2, 2, 2, False, False, False, 1, 1, 1),
        "64 x 64, swapped": (64, 64, 2, 2, 2, True, False, False, 1, 1, 1),
    }
    causal = True
    try:
        for name, tile in numbers.items():
            if tile is not None:
                interface._tile_size_bwd_sm90 = lambda *_, tile=tile, **__: config(*tile)

            def backward() -> tuple[Tensor, ...]:
                given = (case.query, *keys, *found[:1], case.grads[0], *found[1:], scale, causal)
                return interface._flash_attn_bwd(*given, **rows)

            yield timed(f"backward {case.heads} heads, tile {name}", backward)
    finally:
        interface._tile_size_bwd_sm90 = own


# ---- gradients and parameters ----


def shapes(size: str) -> list[tuple[int, ...]]:
    """Return the shapes of all parameters."""
    hidden, width = SIZES[size]
    inner, keys = HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM
    block = [(inner, hidden), (keys, hidden), (keys, hidden), (hidden, inner), (width, hidden), (width, hidden)]
    block += [(hidden, width), (hidden,), (hidden,), (HEAD_DIM,), (HEAD_DIM,)]
    return [(VOCAB, hidden), *BLOCKS * block, (hidden,)]


def norm_by_torch(grads: list[Tensor]) -> Tensor:
    """Return the sum of squares as optim.protocol computes it."""
    return torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).square().sum()


def norms(size: str) -> Iterator[Row]:
    """Time the squared norm of all gradients."""
    torch.manual_seed(0)
    grads = [1e-4 * torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes(size)]
    exact = sum(float(grad.double().square().sum()) for grad in grads)
    megabytes = sum(grad.nbytes for grad in grads) / 1e6
    found = norm_by_torch(grads)
    ms = milliseconds(lambda: norm_by_torch(grads))
    yield row(f"squared norm, {size}: today", ms, megabytes, abs(float(found) / exact - 1))
    for block, blocks in ((4096, 16), (4096, 8), (2048, 16), (2048, 32), (1024, 32)):
        squares_kernel.SQUARES_BLOCK = block
        squares_kernel.SQUARES_CHUNK = block * blocks
        found = squares_kernel.sum_of_squares(grads)
        same = torch.equal(found, squares_kernel.sum_of_squares(grads))
        ms = milliseconds(lambda: squares_kernel.sum_of_squares(grads))
        off = abs(float(found) / exact - 1)
        yield row(f"squared norm, {size}: {blocks} blocks of {block}", ms, megabytes, off, same_twice=same)
    yield shown_kernels("squared norm today", lambda: norm_by_torch(grads))


class WithWarps:
    """A Triton kernel that is launched with so many warps."""

    def __init__(self, kernel: Any, warps: int) -> None:
        self.kernel = kernel
        self.warps = warps

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *given, **named: self.kernel[grid](*given, **named, num_warps=self.warps)


def updates(size: str) -> Iterator[Row]:
    """Time AdamW of all parameters with fp32 masters, and compare the results of all settings bit by bit."""
    clip = torch.tensor(0.5, device="cuda")
    numbers = (1e-7, 0.1, 0.001, 1e-8)

    def made(sizes: list[tuple[int, ...]]) -> list[ParameterShard]:
        torch.manual_seed(0)
        rows = []
        for number, shape in enumerate(sizes):
            count = torch.Size(shape).numel()
            weight = torch.randn(count, device="cuda")
            grad = torch.randn(count, device="cuda", dtype=torch.bfloat16)
            moments = (torch.randn(count, device="cuda"), torch.rand(count, device="cuda"))
            rows.append(ParameterShard(weight, weight.bfloat16(), grad, *moments, numbers, 0, 1234567 + number))
        return rows

    whole = made(shapes(size))
    corrected = torch.tensor([[1e-5, 0.9]], device="cuda", dtype=torch.float64).repeat(len(whole), 1)
    megabytes = 28 * sum(one.weight.numel() for one in whole) / 1e6
    kernel = adamw_kernel._adamw
    first: list[Tensor] = []
    for block, blocks, warps in (
        (1024, 16, 4), (1024, 64, 4), (1024, 4, 4), (1024, 16, 8), (512, 32, 4), (2048, 8, 8), (512, 32, 2),
    ):  # fmt: skip
        adamw_kernel.BLOCK = block
        adamw_kernel.CHUNK = block * blocks
        adamw_kernel._adamw = WithWarps(kernel, warps)
        few = made([(1000, 33), (4096, 7), (128,), (1024, 1024)])
        adamw_kernel.update_(few, clip, corrected)
        found = [x for one in few for x in (one.weight, one.rounded, one.exp_avg, one.exp_avg_sq)]
        first = first or found
        same = all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
        ms = milliseconds(lambda: adamw_kernel.update_(whole, clip, corrected), runs=8)
        yield row(f"AdamW, {size}: {blocks} blocks of {block}, {warps} warps", ms, megabytes, same_bits=same)
    started = time.perf_counter()
    adamw_kernel._table(whole, range(len(whole)))
    yield row("AdamW's table, on the host", 1e3 * (time.perf_counter() - started))


def embeddings(size: str) -> Iterator[Row]:
    """Time the gradient of the embedding, added to that of the tied head."""
    hidden, _ = SIZES[size]
    random = torch.Generator("cuda").manual_seed(0)
    weights = torch.arange(1, VOCAB + 1, device="cuda", dtype=torch.float32) ** -1.0
    ids = torch.multinomial(weights, POSITIONS, replacement=True, generator=random)
    ids = torch.randperm(VOCAB, device="cuda", generator=random)[ids]
    grad = torch.randn(POSITIONS, hidden, device="cuda", dtype=torch.bfloat16, generator=random)
    head = torch.randn(VOCAB, hidden, device="cuda", dtype=torch.bfloat16, generator=random)
    exact = head.double()[ids.unique()]
    exact = exact + torch.zeros_like(exact).index_add_(0, ids.unique(return_inverse=True)[1], grad.double())

    def dense() -> Tensor:
        return torch.ops.aten.embedding_dense_backward(grad, ids, VOCAB, -1, scale_grad_by_freq=False)

    ways = {"today": lambda: head + dense(), "the gradient alone": dense}

    def compact() -> Tensor:
        """Make sums of equal ids, as the gradient of an embedding of POSITIONS rows, which then go to their rows."""
        ordered, places = ids.sort(stable=True)
        new = torch.ones_like(ordered)
        new[1:] = ordered[1:] != ordered[:-1]
        number = new.cumsum(0) - 1
        inverse = torch.empty_like(number).scatter_(0, places, number)
        sums = torch.ops.aten.embedding_dense_backward(grad, inverse, POSITIONS, -1, scale_grad_by_freq=False)
        # Rows of no id add zeros, each to a row of its own.
        own = torch.arange(POSITIONS, device="cuda").scatter_(0, number, ordered)
        return head.index_add_(0, own, sums)

    for name, way in ways.items():
        yield row(f"embedding's gradient, {size}: {name}", milliseconds(way), error=None)
        yield shown_kernels(name, way)
    off = error(ways["today"]()[ids.unique()], exact)
    before = head.clone()
    compact()
    off_compact = error(head[ids.unique()], exact)
    head.copy_(before)
    yield row(f"embedding's gradient, {size}: rows added in place", milliseconds(compact), error=off_compact, today=off)
    yield shown_kernels("rows added in place", compact)


def memsets() -> Iterator[Row]:
    """Count the launches, and the memsets among them, of every product of a block and of attention."""
    case = Case(HEADS)
    hidden, width = SIZES["0.6B"]
    inner, keys = HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM
    for name, (rows, columns) in {"q": (inner, hidden), "k": (keys, hidden), "o": (hidden, inner),
                                  "up": (width, hidden), "down": (hidden, width)}.items():  # fmt: skip
        weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(POSITIONS, columns, device="cuda", dtype=torch.bfloat16)
        grad = torch.randn(POSITIONS, rows, device="cuda", dtype=torch.bfloat16)
        for what, work in {
            "forward": lambda x=x, weight=weight: x @ weight.T,
            "input": lambda grad=grad, weight=weight: grad @ weight,
            "weight": lambda grad=grad, x=x: grad.T @ x,
        }.items():
            found = kernels_of(work)
            sets = sum(n for kernel, _, n in found if "emset" in kernel)
            yield row(f"product {name}, {what}", sum(us for _, us, _ in found) / 1e3, memsets=sets, launches=len(found))
    given = (case.query, case.key, case.value, case.starts, case.starts, 2048, HEAD_DIM**-0.5, 0, case.backend)
    yield shown_kernels("attention forward", lambda: flash.document_attention(*given))


def copied() -> Row:
    """Time a copy, whose speed is the limit of all other passes."""
    source = torch.zeros(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return row("copy of 1 GiB", milliseconds(lambda: target.copy_(source)), 2 * source.nbytes / 1e6)


def main() -> None:
    """Run all sections and write what they found."""
    torch.set_float32_matmul_precision("high")
    case = Case(HEADS)
    sections: dict[str, Callable[[], Iterator[Row]]] = {
        "kernels": lambda: kernels_alone(case),
        "attention": lambda: whole_attention(case),
        "groups": lambda: by_group(case),
        "norm": lambda: norms("0.6B"),
        "update": lambda: updates("0.6B"),
        "embedding": lambda: embeddings("0.6B"),
        "memsets": memsets,
        "kernels of 32 heads": lambda: kernels_alone(Case(32), 1),
        "norm at 1.7B": lambda: norms("1.7B"),
        "tiles": lambda: tiles(case),
    }
    chosen = sys.argv[2:] or list(sections)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "sections": {}}
    found["copy"] = copied()
    settings = (rotary_kernel.FORWARD_TILE, rotary_kernel.BACKWARD_TILE)
    for name in chosen:
        started = time.perf_counter()
        print(f"\n== {name}", flush=True)
        rows: list[Row] = []
        try:
            rows.extend(sections[name]())
        except Exception as problem:  # one that fails must not cost the others their results
            traceback.print_exc(limit=6)
            rows.append({"what": "failed", "why": f"{type(problem).__name__}: {problem}"[:2000]})
        rotary_kernel.FORWARD_TILE, rotary_kernel.BACKWARD_TILE = settings
        print(f"-- {time.perf_counter() - started:.1f} s", flush=True)
        found["sections"][name] = rows
        torch.cuda.empty_cache()
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
