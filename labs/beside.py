"""Time parts of the step and alternative implementations.

python -m labs.beside libraries OUT.json [--source FOLDER]      our loss and our Muon next to torch's
python -m labs.beside kernels OUT.json                          the loss's own kernels at the shapes of a 0.6B step
python -m labs.beside trees OUT.json                            attention and mask of rows of prefix trees

libraries: shapes are those of Qwen3 0.6B on CUDA, small ones on a CPU. Each row is the median of ten calls after
three, with the peak of the calls' allocations (CUDA only). torch 2.11 lacks linear_cross_entropy: --source takes the
folder torch/nn/modules of a release that has it, whose two Python files then run on the installed torch.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from labs.bench.machine import copy_tb_per_sec, median_seconds
from labs.bench.plan import read_plan
from labs.bench.worker import synthetic_documents
from sftkit.config.commands import Parser
from sftkit.config.schema import LossConfig, OptimConfig
from sftkit.config.terminal import print_text
from sftkit.data.batches.collate import Batch, collate
from sftkit.data.batches.pack import BatchShape
from sftkit.data.types import Examples
from sftkit.errors import ConfigError
from sftkit.ops import flex
from sftkit.ops.attention import attend, document_boundaries
from sftkit.ops.linear_cross_entropy import Head, linear_nll
from sftkit.optim.muon import Muon
from sftkit.runtime.script import script

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
ROWS, HIDDEN, VOCAB, CHUNK = (16_384, 1_024, 151_936, 4_096) if ON_GPU else (2_048, 256, 16_384, 512)
MATRICES = [(2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (3072, 1024), (1024, 3072)]
BLOCKS = 28 if ON_GPU else 1

# ---- libraries ----


def measured(call: Callable[[], Any]) -> dict[str, float]:
    """Return median seconds of ten calls and, on CUDA, their peak allocation in GiB."""
    seconds = []
    for number in range(13):
        if ON_GPU:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begun = time.perf_counter()
        call()
        if ON_GPU:
            torch.cuda.synchronize()
        if number >= 3:
            seconds.append(time.perf_counter() - begun)
    row = {"seconds": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
    return row | ({"peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30} if ON_GPU else {})


def library_loss(source: Path | None) -> Callable[..., torch.Tensor] | None:
    """Return torch's linear_cross_entropy as (hidden, weight, targets, chunk or None) -> mean loss; None if it does
    not exist.
    """
    if source is None and not hasattr(F, "linear_cross_entropy"):
        return None
    for name in ("linear_cross_entropy_options", "linear_cross_entropy") if source else ():
        spec = importlib.util.spec_from_file_location(f"torch.nn.modules.{name}", Path(source or "") / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    make = importlib.import_module("torch.nn.modules.linear_cross_entropy_options").LinearCrossEntropyOptions
    operator = importlib.import_module("torch.nn.modules.linear_cross_entropy")._linear_cross_entropy_batch_chunked

    def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int | None) -> torch.Tensor:
        asked = make(batch_chunk_size=chunk, chunking_method=None) if chunk else make()
        rows, features = hidden.shape
        options = asked._adjust(
            num_batches=rows, in_features=features, num_classes=len(weight), dtype=hidden.dtype, device=hidden.device
        )
        accumulate = (options.batch_chunk_size, options.acc_policy, options.acc_dtype, options.allow_retain_graph)
        with_gradients = (True, True, False)  # for hidden states, weight, bias
        found = operator(hidden, weight, targets, None, None, "mean", -100, 0.0, *accumulate, *with_gradients)
        mean: torch.Tensor = found[0]
        return mean

    return loss


def loss_rows(dtype: torch.dtype, source: Path | None) -> list[dict[str, Any]]:
    """Return a row for ours, torch's with our chunks, torch's with its own, and all logits at once."""
    random = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, device=DEVICE, generator=random).to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, HIDDEN, device=DEVICE, generator=random) / HIDDEN**0.5).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (ROWS,), device=DEVICE, generator=random)
    options = LossConfig(chunk_tokens=CHUNK)
    with torch.no_grad():
        parts = zip(hidden.double().split(512), targets.split(512), strict=True)
        exact = sum(F.cross_entropy(h @ weight.double().T, t, reduction="sum").item() for h, t in parts) / ROWS
    library = library_loss(source)
    ways = {"ours": lambda: linear_nll(hidden, Head(weight), targets, options).loss / ROWS}
    if library:
        ways["torch, our chunks"] = lambda: library(hidden, weight, targets, CHUNK)
        ways["torch, its chunks"] = lambda: library(hidden, weight, targets, None)
    ways["all logits"] = lambda: F.cross_entropy(F.linear(hidden, weight), targets)
    rows = []
    for name, way in ways.items():
        found: list[float] = []

        def call(way: Callable[[], torch.Tensor] = way, found: list[float] = found) -> None:
            loss = way()
            torch.autograd.grad(loss, (hidden, weight))
            found[:] = [loss.item()]

        row = measured(call)
        rows.append({"what": "loss", "dtype": str(dtype), "way": name, **row, "error": abs(found[0] / exact - 1)})
    return rows


def muon_rows() -> list[dict[str, Any]]:
    """Return a row for ours and torch's, on the matrices of the blocks in fp32."""
    rows, weights = [], {}
    for name in ("ours", "torch"):
        random = torch.Generator(DEVICE).manual_seed(0)
        shapes = MATRICES * BLOCKS
        params = [torch.nn.Parameter(torch.randn(shape, device=DEVICE, generator=random)) for shape in shapes]
        for param in params:
            param.grad = torch.randn(param.shape, device=DEVICE, generator=random)
        groups = [{"params": params, "weight_decay": 0.1, "block_matrices": True}]
        theirs = torch.optim.Muon(params, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        optimizer = Muon(groups, OptimConfig(lr=1e-2)) if name == "ours" else theirs
        rows.append({"what": "muon", "way": name, **measured(optimizer.step)})
        weights[name] = params
    same = all(torch.equal(a, b) for a, b in zip(weights["ours"], weights["torch"], strict=True))
    return [{**row, "same_bits_after_13_steps": same} for row in rows]


def libraries(source: Path | None) -> dict[str, Any]:
    """Measure loss and Muon next to torch's, print each row, and return them."""
    rows = loss_rows(torch.bfloat16, source) + loss_rows(torch.float32, source) + muon_rows()
    for row in rows:
        print_text(str({key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()}))
    device = torch.cuda.get_device_name() if ON_GPU else "cpu"
    shapes = {"rows": ROWS, "hidden": HIDDEN, "vocabulary": VOCAB, "chunk": CHUNK, "matrices": len(MATRICES) * BLOCKS}
    return {"torch": torch.__version__, "device": device, **shapes, "source": bool(source), "measured": rows}


# ---- kernels ----

LOSSES = {
    "plain": LossConfig(),
    "token metrics": LossConfig(token_metrics=True),
    "all": LossConfig(token_metrics=True, label_smoothing=0.1, z_loss=1e-4),
}


def kernels() -> dict[str, Any]:
    """Return milliseconds of the cross entropy of four chunks of logits for each launch setting, and of the fp32 head
    gradient times a factor, as bf16.

    Raises:
        ConfigError: there is no GPU.
    """
    if not ON_GPU:
        raise ConfigError("kernels: Triton kernels need a GPU, and this machine has none: use libraries")
    from sftkit.ops import cross_entropy_kernel as kernel  # Triton is not installed on CPU machines

    torch.manual_seed(0)
    rows, vocab, hidden, chunks = 4096, 151_936, 1024, 4
    logits = torch.randn(rows, vocab, device="cuda").bfloat16()
    targets = torch.randint(0, vocab, (rows,), device="cuda")
    sums = torch.zeros(4, rows, device="cuda")
    found = {}
    for name, options in LOSSES.items():
        for block, warps in ((4096, 16), (8192, 32)):
            kernel.BLOCK = kernel.PLAIN_BLOCK = block
            kernel.WARPS = kernel.PLAIN_WARPS = warps

            def entropy(options: LossConfig = options) -> None:
                kernel.cross_entropy_(logits, targets, sums, options, None, gradients=True)

            found[f"cross entropy, {name}, blocks of {block}, {warps} warps"] = chunks * milliseconds(entropy)
    gradient, factor = torch.randn(vocab, hidden, device="cuda"), torch.tensor(0.37, device="cuda")
    out = gradient.bfloat16()
    found["scaling, torch.mul"] = milliseconds(lambda: torch.mul(gradient, factor.view(1, 1), out=out))
    found["scaling, kernel"] = milliseconds(lambda: kernel.scaled(gradient, factor, torch.bfloat16))
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    return {**machine, "copy_tb_per_sec": copy_tb_per_sec(torch.device("cuda")), "milliseconds": found}


# ---- trees ----

PLAN = Path("benchmarks/tree_rows/plan.yaml")
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
"Attention of Qwen3 0.6B."


def trees() -> dict[str, Any]:
    """Return for each shape of conversations in benchmarks/tree_rows/plan.yaml, of a row full of trees: milliseconds of
    attention in one layer, forward and backward, by FlexAttention in the row and by varlen over the same documents one
    after the other; of what makes the mask, once for all layers; and the blocks of 128 x 128 that the mask has.

    Raises:
        ConfigError: there is no GPU.
    """
    if not ON_GPU:
        raise ConfigError("trees: FlexAttention's kernels need a GPU, and this machine has none")
    data = read_plan(PLAN).data
    found: dict[str, Any] = {}
    for name, sizes in (data.conversations or {}).items():
        examples = synthetic_documents(replace(data, conversations={name: sizes}), VOCAB)

        def row(
            count: int, length: int, *, tree: bool, examples: Examples = examples, turns: int = sizes.turns
        ) -> Batch:
            shape = BatchShape(length, max_docs=count * turns + 8, max_doc_length=length, tree=tree)
            documents = tuple(range(count * turns))
            return collate(examples, (documents,), shape, trees=[turns] * count if tree else None).to(DEVICE)

        count = data.row_length // row(1, data.row_length, tree=True).num_tokens
        expanded = int(examples.lengths[: count * sizes.turns].sum())
        in_trees = row(count, data.row_length, tree=True)
        apart = row(count, -(-expanded // 128) * 128, tree=False)
        blocks, _ = flex.blocks_of(flex.pad_to_blocks(in_trees.tree_ends))  # type: ignore[arg-type]
        found[name] = {
            "factor": expanded / in_trees.num_tokens,
            "flex_trees": milliseconds(_attention(in_trees, "flex")),
            "varlen_apart": milliseconds(_attention(apart, "varlen")),
            "mask": milliseconds(lambda batch=in_trees: document_boundaries(batch, "flex")),  # type: ignore[misc]
            "partial_blocks": int(blocks.partial.sum()),
            "whole_blocks": int(blocks.whole.sum()),
        }
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "milliseconds": found}


def _attention(batch: Batch, backend: str) -> Callable[[], object]:
    """Return a forward and backward pass of attention in one layer."""
    shape = (1, batch.shape[1], HEADS, HEAD_DIM)
    query, out = (torch.randn(shape, device=DEVICE).bfloat16().transpose(1, 2) for _ in range(2))
    key, value = (torch.randn_like(query[:, :KV_HEADS]) for _ in range(2))
    inputs = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_())
    documents = document_boundaries(batch, backend)
    call = torch.compile(attend, fullgraph=True, dynamic=False) if backend == "flex" else attend

    def work() -> object:
        found, _ = call(torch.nn.Module(), query, key, value, None, documents=documents)
        return torch.autograd.grad(found, inputs, out.transpose(1, 2))

    return work


def milliseconds(work: Callable[[], object]) -> float:
    """Return the median milliseconds of a call."""
    return 1e3 * median_seconds(work, runs=30)


def main() -> None:
    """Measure and write."""
    words = Parser(__doc__, prog="python -m labs.beside")
    words.add_argument("what", choices=("libraries", "kernels", "trees"))
    words.add_argument("out", type=Path)
    words.add_argument("--source", type=Path)
    args = words.parse_args()
    found = {"libraries": lambda: libraries(args.source), "kernels": kernels, "trees": trees}[args.what]()
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    script(main)
