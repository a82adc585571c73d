"""Find the smallest module that breaks the graph, recompiles, or differs from eager: search from the top down,
confirm from the bottom up, and write a script that reproduces it.
"""

from __future__ import annotations

import base64
import inspect
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config  # private: fallback_random has no public name (pytorch/pytorch#141645)
from torch.utils import _pytree as pytree  # private (pytorch/pytorch#65761); torch.compile traverses arguments this way

from labs.explain.breaks import TorchLogHandler, listening
from labs.explain.subject import ModuleCall, Subject
from labs.jobs import run_logged
from sftkit.compile.contract import compiler_switches
from sftkit.config.schema import CompileConfig

ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Dtype -> largest |compiled - eager| / |eager| (norms of whole tensors) that rounding explains: about 1,000 units of
the last place in fp32, 6 in bf16, where a fused kernel rounds once and eager after each operator.
"""


@dataclass(frozen=True)
class LargestDifference:
    """The output or gradient with the largest difference from eager."""

    name: str
    relative: float
    dtype: torch.dtype

    @property
    def allowed(self) -> float:
        """Return the relative difference that rounding explains in this dtype; 0.0 for integers."""
        return ALLOWED.get(self.dtype, 0.0)

    @property
    def beyond(self) -> bool:
        """Return whether the difference exceeds the limit; NaN does."""
        return not self.relative <= self.allowed

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.name}: relative difference {self.relative:.2g}, {self.allowed:g} is allowed in {kind}"


def difference(module: torch.nn.Module, call: ModuleCall, compiled: Callable[..., Any]) -> LargestDifference:
    """Run a module compiled and eagerly on the same inputs and random numbers, forward and backward, and return the
    largest difference. A gradient missing in compiled code counts as the largest possible difference; a module that
    returns no tensor does not differ.
    """
    eager = output_values(module, module, call.args, call.kwargs)
    with torch._inductor.config.patch(fallback_random=True):  # otherwise Inductor draws other random numbers than eager
        other = output_values(module, compiled, call.args, call.kwargs)
    found = [
        LargestDifference(
            name, relative_difference(other[name], tensor) if name in other else float("inf"), tensor.dtype
        )
        for name, tensor in eager.items()
    ]
    # Compared relative to the limit: a bf16 output may be farther off than an fp32 gradient and still be better.
    none = LargestDifference("no output", 0.0, torch.float64)
    return max(found, key=lambda one: one.relative / (one.allowed or 1.0), default=none)


def output_values(module: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
    """Return outputs by name and, if there are any, gradients of their sum with fixed signs."""
    torch.manual_seed(0)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.detach().clone().requires_grad_(tensor.is_floating_point()), (args, kwargs)
    )
    paths = pytree.tree_flatten_with_path(function(*args, **kwargs))[0]
    named = {f"output{pytree.keystr(path)}": leaf for path, leaf in paths if isinstance(leaf, torch.Tensor)}
    found = {name: tensor.detach() for name, tensor in named.items()}
    inputs = (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad)
    leaves: dict[str, torch.Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    leaves |= {f"input {index}": tensor for index, tensor in enumerate(inputs)}
    # In fp32, with signs that do not cancel under a symmetry of the model.
    flat = [tensor.float().flatten() for tensor in named.values() if tensor.requires_grad]
    signs = (torch.cos(torch.arange(len(each), device=each.device, dtype=torch.float32)) for each in flat)
    total = sum(((each * sign).sum() for each, sign in zip(flat, signs, strict=True)), torch.zeros(()))
    if leaves and total.requires_grad:
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        found |= {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True) if g is not None}
    return found


def relative_difference(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return |value - reference| / |reference|, norms of whole tensors; infinite if shapes differ, or if only
    one is finite.
    """
    if value.shape != reference.shape or not torch.equal(value.isfinite(), reference.isfinite()):
        return float("inf")
    a, b = (tensor.double().nan_to_num(posinf=0.0, neginf=0.0) for tensor in (value, reference))
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


DISABLED = "torch.compiler.disable"
"Marks, in the reason of a break, a break caused by leaving a module out of the graph."


@dataclass(frozen=True)
class ProbedModule:
    """A module of the subject, and its arguments in an eager pass of each of the subject's calls."""

    path: str
    "path as in get_submodule; empty: the whole model"
    module: torch.nn.Module
    call: ModuleCall
    again: ModuleCall
    other: ModuleCall | None

    @property
    def name(self) -> str:
        """Return its path and class: `layers.0.mlp (GatedMLP)`."""
        return f"{self.path or 'the whole'} ({type(self.module).__name__})"

    @property
    def where(self) -> str:
        """Return the location of its forward: FILE:LINE."""
        code = inspect.unwrap(type(self.module).forward).__code__
        return f"{code.co_filename}:{code.co_firstlineno}"


@dataclass(frozen=True)
class BisectQuestion:
    """A question asked about each module."""

    name: str
    title: str
    ask: Callable[[ProbedModule, str], str | None]
    """(module, backend) -> the finding for the module compiled alone and called; None: no finding"""


@dataclass(frozen=True)
class BisectAnswer:
    """The answer to a question."""

    question: str
    guilty: tuple[ProbedModule, ...]
    "the smallest modules, the one with the fewest parts first; (): no finding"
    message: str
    "finding for the first of them"
    steps: tuple[tuple[str, str | None], ...]
    "(module, its own finding), in order"
    confirmed: bool | None
    """whether the whole has no fault when only these modules are left out of the graph; None: nothing remains
    without them
    """


def _breaks(probed: ProbedModule, backend: str) -> str | None:
    """Return the first graph break of one call; None: there is none."""
    heard = _compiled(probed, probed.call, None, backend, dynamic=False)
    found = [one for one in heard.breaks() if DISABLED not in one.kind]
    return f"{found[0].kind} at {found[0].file}:{found[0].line}: {found[0].code}" if found else None


def recompiles_on_values(probed: ProbedModule, backend: str) -> str | None:
    """Return the guard that fails for the same shapes with other values; None if none does."""
    return next(iter(_compiled(probed, probed.call, probed.again, backend, dynamic=False).recompiles()), None)


def recompiles_on_shapes(probed: ProbedModule, backend: str) -> str | None:
    """Return the guard that fails for another shape although sizes are symbolic from the start; None if none does."""
    if probed.other is None:
        return None
    return next(iter(_compiled(probed, probed.call, probed.other, backend, dynamic=True).recompiles()), None)


def differs(probed: ProbedModule, backend: str) -> str | None:
    """Return the output or gradient whose difference from eager exceeds rounding in its dtype; None if none does."""
    with listening():
        found = difference(probed.module, probed.call, torch.compile(probed.module, backend=backend, dynamic=False))
    return str(found) if found.beyond else None


QUESTIONS = (
    BisectQuestion("breaks", "breaks the graph", _breaks),
    BisectQuestion("values", "is compiled again for other values", recompiles_on_values),
    BisectQuestion("shapes", "is compiled again for another shape, with dynamic=True", recompiles_on_shapes),
    BisectQuestion("differs", "differs from eager", differs),
)


def bisect(subject: Subject, question: BisectQuestion, backend: str) -> BisectAnswer:
    """Test the whole; then its parts, each compiled alone, down to modules whose own parts have no fault; then the
    whole again with those left out of the graph.

    Args:
        backend: backend of torch.compile.
    """
    with subject.around():
        modules_by_path = called_modules(subject)
        # Answers are cached by path, and by the properties that similar modules share.
        steps: list[tuple[str, str | None]] = []
        answers: dict[Any, str | None] = {}

        def ask(probed: ProbedModule, *, known: bool = True) -> str | None:
            if probed.path not in answers and not (known and _alike(probed) in answers):
                answers[probed.path] = answers[_alike(probed)] = question.ask(probed, backend)
                steps.append((probed.name, answers[probed.path]))
            return answers.get(probed.path, answers[_alike(probed)])

        def smallest(probed: ProbedModule) -> list[tuple[ProbedModule, str]]:
            """Return the smallest modules inside one that have the fault, each with its finding."""
            children = children_of(probed.path, modules_by_path)
            # Similar blocks are tested once, and one by one only if the representative has no fault.
            for known in (True, False):
                found = [one for child in children if ask(child, known=known) for one in smallest(child)]
                if found:
                    return found
            return [(probed, ask(probed) or "")]

        whole = modules_by_path[""]
        if ask(whole) is None:
            return BisectAnswer(question.name, (), "", tuple(steps), None)
        guilty = sorted(smallest(whole), key=lambda found: len(list(found[0].module.modules())))
        # The other direction: without them the whole must have no fault.
        modules = tuple(probed for probed, _ in guilty)
        confirmed = None
        if whole not in modules:
            with excluded(modules):
                confirmed = question.ask(whole, backend) is None
        return BisectAnswer(question.name, modules, guilty[0][1], tuple(steps), confirmed)


def called_modules(subject: Subject) -> dict[str, ProbedModule]:
    """Return the modules that an eager pass calls, by path, with the arguments of their first call."""
    first, again = (_inputs(subject.module, call) for call in (subject.call, subject.again))
    other = _inputs(subject.module, subject.other) if subject.other else {}
    return {
        path: ProbedModule(path, subject.module.get_submodule(path), call, again.get(path, call), other.get(path))
        for path, call in first.items()
    }


def _inputs(module: torch.nn.Module, call: ModuleCall) -> dict[str, ModuleCall]:
    """Return path -> arguments of the first call of each module, copied because some are changed in place later."""
    found: dict[str, ModuleCall] = {}

    def keep(path: str, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if path not in found:
            # Detached: a leaf of a discarded graph could not get a gradient again.
            copied = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
            found[path] = ModuleCall(copied[0], copied[1], call.shape)

    with ExitStack() as stack:
        for path, one in module.named_modules():
            stack.callback(one.register_forward_pre_hook(partial(keep, path), with_kwargs=True).remove)
        with torch.no_grad():
            module(*call.args, **call.kwargs)
    return found


def children_of(path: str, modules_by_path: dict[str, ProbedModule]) -> list[ProbedModule]:
    """Return the nearest called modules inside one; a list of modules is not called."""
    inside = [name for name in modules_by_path if name != path and (not path or name.startswith(f"{path}."))]
    nearest = [name for name in inside if not any(name.startswith(f"{other}.") for other in inside)]
    return [modules_by_path[name] for name in nearest]


@contextmanager
def excluded(modules: tuple[ProbedModule, ...]) -> Iterator[None]:
    """Run these modules as plain Python within the context, in a graph around them."""
    with ExitStack() as stack:
        for probed in modules:
            probed.module.forward = torch.compiler.disable(probed.module.forward)
            stack.callback(probed.module.__dict__.pop, "forward")
        yield


def _compiled(
    probed: ProbedModule, first: ModuleCall, second: ModuleCall | None, backend: str, *, dynamic: bool
) -> TorchLogHandler:
    """Return the logs of calling a module compiled alone; recompiles are those of the second call. In the first call,
    code that several modules share is compiled once for each of them.

    Args:
        second: arguments of the second call; None: one call only.
        dynamic: whether sizes are symbolic from the start.
    """
    with compiler_switches(CompileConfig(), dynamic_layout=dynamic), listening() as heard:
        compiled = torch.compile(probed.module, backend=backend, dynamic=dynamic)
        compiled(*first.args, **first.kwargs)
        # Recompiles in the first call are normal: modules that share code are compiled once each.
        heard.messages["recompiles"].clear()
        if second is not None:
            compiled(*second.args, **second.kwargs)
    return heard


def _alike(probed: ProbedModule) -> tuple[Any, ...]:
    """Return the properties shared by modules that run the same code on the same shapes."""
    tensors = pytree.tree_leaves((probed.call.args, probed.call.kwargs))
    shapes = tuple(tuple(tensor.shape) for tensor in tensors if isinstance(tensor, torch.Tensor))
    return type(probed.module), repr(probed.module), shapes


SHOWS = 3
"Exit code of a script that shows its fault."
_MAX_CHARACTERS = 4000
"Maximum size of a tensor written into the script; the script draws longer ones at random."
_TIMEOUT_SECONDS = 600

NEEDS_SFTKIT = "# Needs sftkit next to torch and transformers: this module attends with sftkit's own function."
SCRIPT_HEAD = '''"""{title}: {name}
{where}

{said}

Written by `sftkit explain --bisect` with torch {version}. Run it with python: exit code {code} shows the fault, 0 \
that it is gone.
"""
{needs}
from __future__ import annotations

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
    "differs": """
from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree


{functions}

torch._inductor.config.fallback_random = True  # the random numbers of eager
compiled = torch.compile(module, backend={backend!r}, dynamic=False)
eager, other = (output_values(module, function, args, kwargs) for function in (module, compiled))
found = [relative_difference(other[name], eager[name]) if name in other else float("inf") for name in eager]
worst = max(found, default=0.0)
print(f"relative difference {{worst:.2g}}, {allowed:g} is allowed")
sys.exit(0 if worst <= {allowed!r} else {code})
""",
}
# Equal sizes of unrelated dimensions would share a symbol and so fail a guard (pytorch/pytorch#129456).
BODY["shapes"] = """
import torch.fx.experimental._config

torch.fx.experimental._config.use_duck_shape = False  # else sizes that happen to be equal are one symbol
""" + BODY["values"]


class NotWritable(Exception):
    """An argument of a module that cannot be written as text."""


def reproduce(subject: Subject, finding: BisectAnswer, title: str, backend: str, path: Path) -> dict[str, Any]:
    """Write the script for the smallest guilty module and run it.

    Returns:
        script: its path, or None if an argument of the module cannot be written; text: its content; shows: whether it
        showed the fault when run; printed: its first line of output, or the reason why there is none.
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
        NotWritable: an argument cannot be written as text.
    """
    # Only questions about a second call need one; the others show their fault in the first.
    second = {"values": probed.again, "shapes": probed.other}.get(finding.question)
    values = [(call.args, call.kwargs) for call in (probed.call, second) if call]
    # Classes of named tuples among the arguments, and our attention if the model's calls need it.
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
    functions = "\n\n".join(inspect.getsource(each) for each in (output_values, relative_difference))
    dtypes = [tensor.dtype for tensor in probed.module.parameters()] or [torch.float32]
    more |= {
        "allowed": max(ALLOWED.get(dtype, 0.0) for dtype in dtypes),
        "dynamic": finding.question == "shapes",
        "functions": functions,
    }
    return head + BODY[finding.question].format(backend=backend, code=SHOWS, **more)


def written(value: Any) -> str:
    """Return a value as Python code that creates it again.

    Raises:
        NotWritable: no constructor here makes this kind of object.
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
    """Return a short tensor by value, a longer one as random values between its extremes; booleans always by value."""
    plain = value.detach().cpu().contiguous()
    kind = str(plain.dtype)
    shape = "".join(f", {size}" for size in plain.shape)
    if plain.numel():
        data = base64.b64encode(zlib.compress(plain.flatten().view(torch.uint8).numpy().tobytes(), 9)).decode()
        # A mask selects the computation, so it is kept at any length; random booleans would be another fault.
        if len(data) <= _MAX_CHARACTERS or plain.dtype == torch.bool:
            return f"tensor({data!r}, {kind}{shape})"
    finite = plain.double()[plain.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)
    return f"drawn({kind}, {low!r}, {high!r}{shape})"


def _kinds(values: Any) -> set[type]:
    """Return the classes of named tuples in arguments, for the imports."""
    if isinstance(values, dict):
        return _kinds(list(values.values()))
    if isinstance(values, tuple | list):
        own = {type(values)} if hasattr(values, "_fields") else set()
        return own.union(*map(_kinds, values))
    return set()


def _device(probed: ProbedModule) -> torch.device:
    tensors = [*probed.module.parameters(), *pytree.tree_leaves((probed.call.args, probed.call.kwargs))]
    return next((tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)), torch.device("cpu"))
