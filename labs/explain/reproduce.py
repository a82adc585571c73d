"""Write a fault as a script of its own: the module, its inputs, and what shows the fault. Nothing of a run is needed to
run it, only torch, transformers, and sftkit where the module attends with its attention."""

from __future__ import annotations

import base64
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree  # private (pytorch/pytorch#65761); torch.compile walks arguments so

from labs.bench.processes import run_logged
from labs.explain.bisect import BisectAnswer, ProbedModule
from labs.explain.numerics import ALLOWED
from labs.explain.subject import Subject

SHOWS = 3
"The exit code of a script that shows its fault."
_MAX_CHARACTERS = 4000
"Of a tensor that is written into the script; longer ones are drawn at random there."
_TIMEOUT_SECONDS = 600

NEEDS_SFTKIT = "# Needs sftkit beside torch and transformers: this module attends with sftkit's own function."
SCRIPT_HEAD = '''"""{title}: {name}
{where}

{said}

Written by `sftkit explain --bisect` with torch {version}. Run it with python: exit code {code} shows the fault, 0 \
that it is gone.
"""
{needs}
import base64
import sys
import zlib

import torch
{imports}

def tensor(text, dtype, *shape):
    data = bytearray(zlib.decompress(base64.b64decode(text)))
    return torch.frombuffer(data, dtype=dtype).clone().reshape(shape).to({device!r})


def drawn(dtype, low, high, *shape):
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=generator) * (high - low) + low).to({device!r}, dtype)
    return torch.randint(int(low), int(high) + 1, shape, generator=generator).to({device!r}, dtype)


torch.manual_seed(0)
{source}{attention}{submodule}
args = {args}
kwargs = {kwargs}
'''

# error_on_graph_break is in no public namespace of torch 2.13; pytorch/pytorch#162023 proposed torch.compiler.
BODY = {
    "breaks": """
try:
    with torch._dynamo.error_on_graph_break(True):
        torch.compile(module, backend={backend!r})(*args, **kwargs)
except torch._dynamo.exc.TorchDynamoException as error:
    print(error)
    sys.exit({code})
print("no graph break")
""",
    "values": """again_args = {again_args}
again_kwargs = {again_kwargs}

compiled = torch.compile(module, backend={backend!r}, dynamic={dynamic})
compiled(*args, **kwargs)
try:
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(*again_args, **again_kwargs)
except RuntimeError as error:
    print(error)
    sys.exit({code})
print("nothing is compiled again")
""",
    "differs": '''

def values(function):
    """Outputs and gradients."""
    from torch.utils._pytree import tree_leaves, tree_map_only

    torch.manual_seed(0)
    fresh = lambda t: t.detach().clone().requires_grad_(t.is_floating_point())
    given = tree_map_only(torch.Tensor, fresh, (args, kwargs))
    outputs = [t for t in tree_leaves(function(*given[0], **given[1])) if isinstance(t, torch.Tensor)]
    signed = lambda t: (t.float().flatten() * torch.cos(torch.arange(t.numel(), device=t.device).float())).sum()
    total = sum(signed(t) for t in outputs if t.requires_grad)
    leaves = [p for p in module.parameters() if p.requires_grad]
    leaves += [t for t in tree_leaves(given) if isinstance(t, torch.Tensor) and t.requires_grad]
    gradients = torch.autograd.grad(total, leaves, allow_unused=True) if leaves and torch.is_tensor(total) else ()
    return [torch.zeros(()) if t is None else t.detach().double() for t in [*outputs, *gradients]]


def relative(a, b):
    if bool((a.isfinite() != b.isfinite()).any()):
        return float("inf")
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    return float((a - b).norm() / a.norm().clamp(min=1e-30))


torch._inductor.config.fallback_random = True  # the random numbers of eager
eager, compiled = values(module), values(torch.compile(module, backend={backend!r}, dynamic=False))
worst = max(relative(a, b) for a, b in zip(eager, compiled))
print(f"relative difference {{worst:.2g}}, {allowed:g} is allowed")
sys.exit(0 if worst <= {allowed!r} else {code})
''',
}
# Equal sizes of unrelated dimensions would share a symbol, and so fail a guard (pytorch/pytorch#129456).
BODY["shapes"] = """
import torch.fx.experimental._config

torch.fx.experimental._config.use_duck_shape = False  # else sizes that happen to be equal are one symbol
""" + BODY["values"]


class NotWritable(Exception):
    """An argument of a module that has no text."""


def reproduce(subject: Subject, finding: BisectAnswer, title: str, backend: str, path: Path) -> dict[str, Any]:
    """Write the script of the smallest guilty module and run it.

    Returns:
        script: its path; None: an argument of the module cannot be written down; text: what it says; shows: whether it
        showed the fault when it was run; printed: the first line that it printed, or why there is none.
    """
    try:
        text = script_of(subject, finding.guilty[0], finding, title, backend)
    except NotWritable as error:
        said = f"no script: it takes a {error}, which cannot be written down"
        return {"script": None, "text": None, "shows": False, "printed": said}
    path.write_text(text)
    log = path.with_suffix(".log")
    ended = run_logged([sys.executable, str(path.absolute())], log, {}, _TIMEOUT_SECONDS)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    shows = (ended or "").startswith(f"ended with code {SHOWS}")
    return {"script": str(path), "text": text, "shows": shows, "printed": lines[0] if lines else ended or ""}


def script_of(subject: Subject, probed: ProbedModule, finding: BisectAnswer, title: str, backend: str) -> str:
    """Return the script of one module.

    Raises:
        NotWritable: an argument has no text.
    """
    # Only questions about a second call have one; the others show their fault in the first.
    second = {"values": probed.again, "shapes": probed.other}.get(finding.question)
    values = [(call.args, call.kwargs) for call in (probed.call, second) if call]
    # Classes of named tuples among the arguments, and our attention, if the model's calls are made for it.
    imports = sorted({f"from {kind.__module__} import {kind.__name__}" for kind in _kinds(values)})
    attention = needs = ""
    if any(line.startswith("from sftkit.ops.attention ") for line in imports):
        imports.append("from sftkit.ops.attention import use_document_attention")
        attention = "use_document_attention(model)\n"
        needs = f"\n{NEEDS_SFTKIT}\n"
    head = SCRIPT_HEAD.format(
        title=f"A module that {title}",
        name=probed.name,
        where=probed.where,
        said="\n".join(line.replace("\\", "\\\\").replace('"""', "'''") for line in finding.message.splitlines()),
        version=torch.__version__,
        needs=needs,
        imports="\n".join(imports) + "\n" if imports else "",
        device=str(_device(probed)),
        source=subject.source,
        attention=attention,
        submodule=f"module = module.get_submodule({probed.path!r})\n" if probed.path else "",
        args=written(probed.call.args),
        kwargs=written(probed.call.kwargs),
        code=SHOWS,
    )
    more: dict[str, Any] = (
        {"again_args": written(second.args), "again_kwargs": written(second.kwargs)} if second else {}
    )
    dtypes = [tensor.dtype for tensor in probed.module.parameters()] or [torch.float32]
    more |= {"allowed": max(ALLOWED.get(dtype, 0.0) for dtype in dtypes), "dynamic": finding.question == "shapes"}
    return head + BODY[finding.question].format(backend=backend, code=SHOWS, **more)


def written(value: Any) -> str:
    """Return a value as Python that makes it again.

    Raises:
        NotWritable: an object of a kind that no constructor here makes.
    """
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value) if value == value else "float('nan')"
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    if type(value) is dict:
        return "{" + ", ".join(f"{written(key)}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        kind = type(value).__name__ if hasattr(value, "_fields") else ""
        return f"{kind}({''.join(f'{written(item)}, ' for item in value)})"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    raise NotWritable(type(value).__name__)


def _tensor(value: torch.Tensor) -> str:
    """Return a tensor by value if that is short, else drawn between its smallest and largest value; booleans always by
    value."""
    plain = value.detach().cpu().contiguous()
    kind = str(plain.dtype)
    shape = "".join(f", {size}" for size in plain.shape)
    if plain.numel():
        data = base64.b64encode(zlib.compress(plain.flatten().view(torch.uint8).numpy().tobytes(), 9)).decode()
        # A mask decides what is computed, so it is kept whatever its length; random booleans would be another fault.
        if len(data) <= _MAX_CHARACTERS or plain.dtype == torch.bool:
            return f"tensor({data!r}, {kind}{shape})"
    finite = plain.double()[plain.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)
    return f"drawn({kind}, {low!r}, {high!r}{shape})"


def _kinds(values: Any) -> set[type]:
    """Return the named tuples in arguments: their classes are imported."""
    if isinstance(values, dict):
        return _kinds(list(values.values()))
    if isinstance(values, tuple | list):
        own = {type(values)} if hasattr(values, "_fields") else set()
        return own.union(*map(_kinds, values))
    return set()


def _device(probed: ProbedModule) -> torch.device:
    tensors = [*probed.module.parameters(), *pytree.tree_leaves((probed.call.args, probed.call.kwargs))]
    return next((tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)), torch.device("cpu"))
