"""Save compiled code in a file, so that the next start, on this machine or one like it, compiles nothing.

The content is torch's own (`torch.compiler.save_cache_artifacts`) and the kernels of FlashAttention-4: pickles and
machine code, which run when a graph asks for them. A person who can write the file could run code in the training
process, so a process loads only files that no other user but root can write, or files signed with its secret
(HMAC-SHA256).
"""

import hashlib
import hmac
import io
import json
import logging
import os
import platform
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import fsspec
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from sftkit.config.schema import Config
from sftkit.data.batches.pack import Layout
from sftkit.models import structure, vocabulary
from sftkit.ops.flash import fa4_folder
from sftkit.rundir.files import replace_shared
from sftkit.runtime import hardware, start

log = logging.getLogger(__name__)

SUFFIX = ".compiled"
TORCH_CODE = "torch"
"Name of torch's code in a file, a ZIP archive; all others are kernels. The archive's comment is the key."
_SIGNATURE = "signature"
_SECRET = "SFTKIT_CACHE_SECRET"
"Environment variable with the secret that signs shared files."
_PACKAGES = ("sftkit", "torch", "triton", "transformers", "flash-attn-4")
NOT_IN_GRAPH = ("enabled", "on_recompile", "on_failure", "cache")
"Settings of compile that change no graph, so they are not in the key."
VOLATILE = ("_name_or_path", "transformers_version", "architectures")
"Fields of a config that say where a model comes from and change no graph."


def code_key(cfg: Config, orig_model: PreTrainedModel, layout: Layout, rt: start.Runtime) -> str:
    """Return the sha256 of what compiled code depends on: model, shapes, settings, versions,
    device. torch checks again."""
    compile = {k: v for k, v in asdict(cfg.compile).items() if k not in NOT_IN_GRAPH}
    config = {k: v for k, v in orig_model.config.to_dict().items() if k not in VOLATILE}
    cuda = rt.device.type == "cuda"
    # Whatever a graph or kernel has as a constant, and whatever decides which one is generated. An entry too many
    # costs a needless cold compile. With one too few a useless file is loaded: torch checks each graph and compiles it.
    parts = {
        "model": [structure.plain_class(orig_model).__name__, config],
        "layout": [layout.kind, layout.max_doc_length, [(*s, layout.max_docs(*s)) for s in layout.shapes]],
        "settings": [compile, asdict(cfg.attention), asdict(cfg.loss), cfg.train.fp8, cfg.train.memory],
        "trained": [cfg.train.freeze, None if cfg.adapter is None else asdict(cfg.adapter)],
        "ranks": [one.rank for one in cfg.adapters or ()],
        "weights": sorted({str(p.dtype) for p in orig_model.parameters()}),
        "padding": vocabulary.padding_rows(orig_model),
        "precision": rt.precision,
        "topology": [rt.topology.sharded, rt.topology.tensor, rt.topology.context],
        "versions": {name: hardware.installed_version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(rt.device) if cuda else torch.backends.cpu.get_cpu_capability(),
        "capability": torch.cuda.get_device_capability(rt.device) if cuda else None,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def load_compiled(where: str, key: str, index: int = 0) -> str:
    """Give torch the compiled code that was saved under this key. Every rank calls it, before attention is chosen:
    timing its backends runs kernels.

    Args:
        index: number of this rank's GPU in its machine.
        where: a file (`*.compiled`, or any existing file), a folder that holds one file per key, or
            an fsspec URL of either.

    Returns:
        a line for the console. A file that is missing, damaged or of another key never stops a run: its graphs are
        compiled then.
    """
    path = _file(where, key, index)
    if path is None:
        return "cold compile"
    try:
        parts = _read(path, key)
        loaded = torch.compiler.load_cache_artifacts(parts.pop(TORCH_CODE))
        write_kernels(parts)
        if loaded is None:
            raise ValueError("torch cannot read it")
        return f"compiled code from {path}"
    except FileNotFoundError:
        return f"no compiled code for this model and machine in {where} yet"
    except Exception as error:  # torch may raise anything for a file that it cannot use
        log.warning("compile.cache: %s: %s; compiling from scratch", path, error)
    return "cold compile"


def save_compiled(where: str, key: str, index: int = 0, *, writes: bool) -> str:
    """Write what was compiled, on a rank that `writes`, unless it all came from the same file; return a line to print.

    torch's code is tied to the number of the GPU in its machine, so each rank of the first machine writes a file, in a
    folder; a single file holds the main rank's.
    """
    path = _file(where, key, index)
    if not writes or path is None:
        return ""
    # Private: torch tells of misses in a log alone (pytorch/pytorch#183005). Without one all graphs came from the
    # cache.
    if not counters["inductor"]["fxgraph_cache_miss"]:
        with suppress(Exception):  # fsspec's file systems have errors of their own
            _read(path, key)
            return f"compiled code in {path} is complete"
    secret = os.environ.get(_SECRET)
    if not secret and not _is_local(path):
        return f"compiled code not saved to {path}: without {_SECRET} in the environment it would not be loaded"
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is None:
        return f"nothing was compiled that {path} could hold"
    content = io.BytesIO()
    parts = {TORCH_CODE: artifacts[0], **read_kernels()}
    parts |= {_SIGNATURE: _signed(parts, key, secret)} if secret else {}
    with ZipFile(content, "w") as file:
        file.comment = key.encode()
        for name, code in parts.items():
            file.writestr(name, code)
    try:
        _write(path, content.getvalue())
    except Exception as error:
        log.warning("compile.cache: %s cannot be written: %s", path, error)
        return f"compiled code not saved to {path}"
    return f"compiled code saved to {path} ({len(content.getvalue()) / 2**20:.1f} MiB)"


def read_kernels() -> dict[str, bytes]:
    """Return FlashAttention-4's compiled kernels on this machine by path within their folder; none if unused."""
    if "flash_attn" not in sys.modules:
        return {}
    folder = fa4_folder()
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("*/*/*.o"))}


def write_kernels(kernels: dict[str, bytes]) -> None:
    """Put kernels where FlashAttention-4 looks for them; those that are there already stay.

    Raises:
        ValueError: a name leads out of the folder, or is no object file.
    """
    # Names come out of a file that others may have written, and what they name is run later.
    folder = fa4_folder().resolve()
    for name, code in kernels.items():
        path = (folder / name).resolve()
        if path.suffix != ".o" or not path.is_relative_to(folder):
            raise ValueError(f"{name} is no name of a kernel")
        if not path.exists():
            _write(str(path), code)


def _file(where: str, key: str, index: int) -> str | None:
    """Return the file for this key and GPU; None: there is none for this GPU.

    It is `where` itself if that is or looks like a file, for the first GPU only, else a file in that folder.
    """
    if where.endswith(SUFFIX) or ("://" not in where and Path(where).is_file()):
        return where if index == 0 else None
    return f"{where.rstrip('/')}/{key[:32]}-{index}{SUFFIX}"


def _is_local(path: str) -> bool:
    return "://" not in path or path.startswith("file://")


def _signed(parts: dict[str, bytes], key: str, secret: str) -> bytes:
    """Return the signature of a file's parts."""
    whole = key, sorted((name, hashlib.sha256(code).hexdigest()) for name, code in parts.items())
    return hmac.digest(secret.encode(), repr(whole).encode(), "sha256")


def _read(path: str, key: str) -> dict[str, bytes]:
    """Return the parts of a file by their names, torch's and kernels.

    Raises:
        Exception: it is not there, cannot be read, is damaged, of another key, or not trusted.
    """
    secret = os.environ.get(_SECRET)
    with fsspec.open(path, "rb") as stream:  # of a path on disk, too
        if not secret:
            found = os.fstat(stream.fileno()) if _is_local(path) else None
            if found is None or found.st_uid not in (0, os.getuid()) or found.st_mode & 0o022:
                raise ValueError(f"other users could have written this code: share one {_SECRET}")
        try:
            with ZipFile(stream) as file:
                if file.comment != key.encode():
                    raise ValueError("made for another model, layout, version or device")
                parts = {name: file.read(name) for name in file.namelist()}
        except BadZipFile as error:
            raise ValueError(f"damaged, or not a file of compiled code ({error})") from error
    signature = parts.pop(_SIGNATURE, b"")
    if secret and not hmac.compare_digest(signature, _signed(parts, key, secret)):
        raise ValueError(f"not signed with the {_SECRET} of this process")
    return parts


def _write(path: str, content: bytes) -> None:
    """Write all of it or nothing: a reader never sees half a file."""
    filesystem, inside = fsspec.core.url_to_fs(path)
    if not _is_local(path):
        # Processes that write the same file at once have a temporary name each; what is renamed last stays.
        filesystem.makedirs(inside.rpartition("/")[0], exist_ok=True)
        temporary = f"{inside}.{os.getpid()}.tmp"
        filesystem.pipe_file(temporary, content)
        filesystem.mv(temporary, inside)
    else:
        Path(inside).parent.mkdir(parents=True, exist_ok=True)
        replace_shared(Path(inside), content)
        Path(inside).chmod(Path(inside).stat().st_mode & ~0o022)
