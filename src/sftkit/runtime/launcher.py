"""What a run needs of torch's elastic launcher, whoever started it. No torch."""

from __future__ import annotations

from collections.abc import Mapping

HANDLED = "PET_SIGNALS_TO_HANDLE"
"torchrun's --signals-to-handle as a variable, which accelerate launch honours too"


def signal_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what torch's elastic launcher, which starts several processes, needs to pass every signal on."""
    return {} if HANDLED in environ else {HANDLED: "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"}


def check_launcher(environ: Mapping[str, str]) -> str | None:
    """Return warnings where the launcher was started by hand and would cut a save short, or would not start a run again
    as it was; None where there is nothing to say."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    lines = []
    if "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in environ:
        lines.append(
            "warning: the launcher kills this run 30 s after a signal, saved or not, and does not pass SIGUSR1 on: start it "
            f"with TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300 {HANDLED}={signal_env({})[HANDLED]} (make and sftkit.launch do)"
        )
    restarts = int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    if restarts and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        lines.append(
            "warning: after a restart by the launcher the ranks may be given addresses of those that are gone, and fail: "
            "start it with --rdzv_backend c10d (torchrun: --standalone) and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    return "\n".join(lines) or None
