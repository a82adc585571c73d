"""Is the Hugging Face hub within reach? Asked once, answered in seconds, so that an offline machine fails fast."""

from __future__ import annotations

import os
import socket
from functools import cache
from urllib.parse import urlsplit


@cache
def hub_reachable(timeout_seconds: float = 3.0) -> bool:
    """Whether a TCP connection to HF_ENDPOINT opens. Its own clients would retry for 20 to 50 seconds before they say no."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return False
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    url = urlsplit(proxy or os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        with socket.create_connection((url.hostname or "", port), timeout=timeout_seconds):
            return True
    except OSError:
        return False
