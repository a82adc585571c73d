"""Does the Hugging Face hub answer? Asked once, within seconds: its own clients retry for half a minute before a no."""

from __future__ import annotations

import threading
from functools import cache

PROBE_SECONDS = 5.0


@cache
def hub_answers() -> bool:
    """Whether HF_ENDPOINT answers; never when HF_HUB_OFFLINE is set. In a thread: name resolution knows no timeout."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def probe() -> None:
        try:
            httpx.head(constants.ENDPOINT, timeout=PROBE_SECONDS)
        except (httpx.HTTPError, OSError):
            return
        answered.set()

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS + 1)
    return answered.is_set()
