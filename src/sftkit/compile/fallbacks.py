"""Counts calls of compiled code that run uncompiled because a guard failed, which torch's own stance does not count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo import eval_frame
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

RECOMPILE_REFUSED = "torch.compile stance is 'fail_on_recompile'"
"Part of the text of the RuntimeError that torch raises under this stance (torch/_dynamo/eval_frame.py)."


@contextmanager
def eager_on_recompile(fell_back: Callable[[str, object], None]) -> Iterator[None]:
    """Run a call whose guards fail uncompiled within the context, as under torch's stance `eager_on_recompile`.

    What is compiled stays in use, and functions inside that call use it where their own guards hold.

    That stance runs frames without asking Python, so nothing can be counted under it. Here the stance is
    `fail_on_recompile`: its error gives the reason, and then the frame runs uncompiled instead of raising.

    Args:
        fell_back: called at each such call with torch's message, which names the code and the failed guards, and with
            the `self` of that code, None for a function.
    """
    # Private: the function that torch asks at each frame, of pytorch/pytorch#137504, which brought the stances. There
    # is no public hook, as of torch 2.15, and no upstream issue about one is known.
    ask = eval_frame._callback_from_stance

    def recording(callback: Any) -> Any:
        """Return torch's callback for a frame, which reports a refusal and runs the frame instead."""
        refuse: Any = ask(callback)
        if callback in (False, None) or eval_frame._stance.stance != "fail_on_recompile":
            return refuse  # nothing is compiled here anyway, or another stance holds inside this one: run_eagerly

        def run_and_tell(frame: Any, *args: Any, **kwargs: Any) -> ConvertFrameReturn:
            try:
                return refuse(frame, *args, **kwargs)
            except RuntimeError as error:
                if RECOMPILE_REFUSED not in str(error):
                    raise
                fell_back(str(error), frame.f_locals.get("self"))
            strategy = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.RUN_ONLY)
            return ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)

        # Private, of the same change: by this attribute torch knows whose compiled code the frame may use.
        run_and_tell._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]
        return run_and_tell

    eval_frame._callback_from_stance = recording
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            yield
    finally:
        eval_frame._callback_from_stance = ask
