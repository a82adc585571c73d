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
    """Return a line on what the warm-up does, with the seconds of earlier ones of the same key where they are known:
    when the graphs were compiled, and when all of them came from a cache. Which it will be is known only afterwards.

    Args:
        key: of compile.cache.
    """
    if not compile.enabled:
        return "trying the worst-case batches"
    what = "compiling blocks" if compile.scope == "block" else "compiling the model"
    known = _read(key)
    said = [words.format(known[kind]) for kind, words in _WORDS.items() if kind in known]
    return f"{what}: {', '.join(said)}" if said else what  # a busy machine takes longer


def note(key: str, seconds: float) -> None:
    """Keep the seconds of a warm-up that compiled, or found compiled code; a disk that refuses them is no error.

    A start that found most of its graphs and compiled the others is neither, and is not kept.
    """
    # torch._dynamo's own counters, as in cache.save_compiled. Where no cache is in use neither counts anything.
    misses, hits = (counters["inductor"][f"fxgraph_cache_{found}"] for found in ("miss", "hit"))
    if 0 < misses <= hits:
        return
    found = _read(key) | {"cached" if hits and not misses else "anew": round(seconds, 1)}
    with suppress(OSError):
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        replace_shared(_file(key), json.dumps(found))


_WORDS = {"anew": "{:.0f} s when last compiled anew", "cached": "{:.0f} s with saved compiled code"}


def _read(key: str) -> dict[str, float]:
    """Return the seconds that are known, by kind; empty for a file that is missing or cannot be read."""
    try:
        found = json.loads(_file(key).read_text())
        return {kind: float(found[kind]) for kind in _WORDS if kind in found}
    except (OSError, ValueError, TypeError):
        return {}


def _file(key: str) -> Path:
    """Return the file, in the folder of torch's own compiled code, so that both are deleted together."""
    # Private: of that folder only the variable is documented, TORCHINDUCTOR_CACHE_DIR
    # (https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_configuration_tutorial.html).
    return Path(cache_dir()) / "sftkit" / f"{key[:32]}.json"
