"""The duration of a warm-up, kept beside the compiled code, so that the next one here can say what to expect."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir

from sftkit.config.schema import CompileConfig
from sftkit.rundir.files import replace_shared


def under_way(compile: CompileConfig, key: str) -> str:
    """Return a line on what the warm-up does, with the seconds of an earlier one of the same key where they are known.

    Args:
        key: of compile.cache.
    """
    if not compile.enabled:
        return "trying the worst-case batches"
    what = "compiling blocks" if compile.scope == "block" else "compiling the model"
    try:
        earlier = json.loads(_file(key).read_text())
        last = f"{what}: {earlier['seconds']:.0f} s the last time"  # a busy machine takes longer
        return f"{last}, then without compiled code" if earlier["compiled_anew"] else last
    except (OSError, ValueError, KeyError, TypeError):
        return what


def note(key: str, seconds: float) -> None:
    """Keep the seconds of a warm-up that compiled, or found compiled code; a disk that refuses them is no error."""
    # torch._dynamo's own counter, as in cache.save_compiled: without a miss all graphs came from a cache.
    found = {"seconds": round(seconds, 1), "compiled_anew": counters["inductor"]["fxgraph_cache_miss"] > 0}
    with suppress(OSError):
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        replace_shared(_file(key), json.dumps(found))


def _file(key: str) -> Path:
    """Return the file, in the folder of torch's own compiled code, so that both are deleted together."""
    return Path(cache_dir()) / "sftkit" / f"{key[:32]}.json"  # cache_dir is private; torch 2.13 has no public name
