"""One assembler for the Triton kernels of a process and of its compile workers."""

from __future__ import annotations

from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path


def use_ptxas_of_workers() -> None:
    """Assemble this process's Triton kernels with the ptxas that torch's compile workers take. Call it before the first
    kernel: Triton asks for the version once.

    That version is in the key of Triton's cache. Workers of torch 2.11 take torch/bin/ptxas (CUDA 13.0 in a wheel for
    CUDA 13), the process takes Triton's own (12.8), so that max-autotune found none of the kernels that workers had
    compiled for it, and compiled them again one by one: 5 to 20 s for a matrix product on an H200, which are 0.6 s now.
    In torch 2.13 both take Triton's, and this does nothing: pytorch/pytorch#163988, which says that only this function
    finds it, put the program into wheels, and #174716 took it out again.
    """
    # Private: what the workers call, and without a public name. It sets TRITON_PTXAS_PATH, for this process and all
    # that it starts.
    _set_triton_ptxas_path()
