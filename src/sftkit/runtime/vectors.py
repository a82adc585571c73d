"""One width of vector instructions for the CPU kernels that Inductor writes and for those that it finds
in its cache."""

from __future__ import annotations

import torch
import torch._inductor.config

BITS = {"AVX512": 512, "AVX2": 256}


def name_vector_width() -> None:
    """Tell Inductor the width of the CPU's vectors, which it takes itself where nobody does.

    Inductor writes loops over as many elements as a vector holds, and keeps the text in TORCHINDUCTOR_CACHE_DIR under a
    key without that number (torch 2.11 and 2.13). A CPU of another width that shares the folder compiles this text for
    its own vectors: of 12 elements written for AVX-512, code for AVX2 leaves the last 4 as they were, without a word.
    A width that is named is in the key. No upstream issue is known.
    """
    # For the process, and never put back: kernels are written at any time of it.
    cpp = torch._inductor.config.cpp
    if cpp.simdlen is None:
        cpp.simdlen = BITS.get(torch.backends.cpu.get_cpu_capability())
