"""Find out whether the Hugging Face hub answers, and whether it or the cache of this machine has what a recipe names,
once and within seconds: the hub's own clients retry for half a minute before they give up. No torch."""

import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

import huggingface_hub as hub
from huggingface_hub import constants

from sftkit.config.commands import program_path, similar_paths
from sftkit.errors import ConfigError, hint
from sftkit.rundir.names import resolve

PROBE_SECONDS = 5.0
MAX_PROBE_SECONDS = PROBE_SECONDS + 1
"Maximum duration of a question to the hub, name resolution included."
HubKind = Literal["model", "dataset"]


@cache
def hub_answers() -> bool:
    """Return whether HF_ENDPOINT answers; False when HF_HUB_OFFLINE is set."""
    import httpx

    if constants.HF_HUB_OFFLINE:
        return False
    return _error_of(lambda: httpx.head(constants.ENDPOINT, timeout=PROBE_SECONDS)) is None


def _error_of(call: Callable[[], object]) -> Exception | None:
    """Return what a call raises, a TimeoutError if it takes too long; None: nothing. It runs in a thread, as name
    resolution knows no timeout."""
    ended: list[Exception | None] = [TimeoutError()]

    def work() -> None:
        try:
            call()
            ended.append(None)
        except Exception as error:
            ended.append(error)

    # A daemon: one that still waits for a name server must not hold the process at its end.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(MAX_PROBE_SECONDS)
    return ended[-1]


def unavailable_reason(name: str, kind: HubKind, revision: str | None = None) -> str | None:
    """Return why a repository can be had neither from the hub nor from this machine's cache; None: it can, or nobody
    knows.

    Raises:
        ConfigError: the hub has it, and does not give it to this account.
    """
    from huggingface_hub import errors
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except errors.HFValidationError:
        return "it is no name that the hub could know"
    if _is_cached(name, kind):
        return None
    if not hub_answers():
        return f"it is not in the cache ({constants.HF_HOME}) and {unreachable()}"

    def ask() -> None:
        known = hub.HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=PROBE_SECONDS)
        if known.gated:  # everybody sees this much of such a repository
            hub.HfApi().auth_check(name, repo_type=kind)

    error = _error_of(ask)
    log_in = f"log in with `{program_path('hf')} auth login`, or set HF_TOKEN"
    # In this order: to the client a gated repository is a kind of one that is not found.
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{'datasets/' * (kind == 'dataset')}{name}"
        if hub.get_token() is None:
            allowed = (
                f"the hub gives this {kind} to those alone who have accepted its licence: accept it at {page}, then"
            )
            raise ConfigError(f"{name}: {allowed} {log_in}") from error
        raise ConfigError(hint("gated repository", name=name, kind=kind, page=page)) from error
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{constants.ENDPOINT} has no revision {revision} of it"
    if isinstance(error, errors.RepositoryNotFoundError):
        # The hub may show an account less than it has.
        account = "to the account whose token is set here"
        if hub.get_token() is None:
            account = f"without a token (for one that is private {log_in})"
        return f"{constants.ENDPOINT} has no {kind} of that name, or none that it shows {account}"
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401:
        raise ConfigError(f"{name}: {constants.ENDPOINT} rejects the token that is set here: {log_in}") from error
    return None  # loading it reports any other error


def commit_of(name: str, kind: HubKind, revision: str | None) -> str | None:
    """Return the commit that a branch, tag or commit of a repository is now; None: the hub does not say, and loading
    reports why."""
    found: list[str | None] = [None]

    def ask() -> None:
        found.append(hub.HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=PROBE_SECONDS).sha)

    _error_of(ask)
    return found[-1]


def unreachable() -> str:
    """Return why the hub is not asked, when it does not answer."""
    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"


def _is_cached(name: str, kind: HubKind) -> bool:
    """Return whether the hub's cache, or that of `datasets`, has anything of a repository but a model's config. That
    one may have been fetched alone, to know the model's size."""
    files = Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}").glob("snapshots/*/*")
    # Links to downloaded files: what was begun and not finished is not there.
    if any(file.name != "config.json" for file in files):
        return True
    made = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets")).expanduser()
    wanted, *found = (
        folder.replace("_", "").lower()  # `datasets` writes capitals in its own way
        for folder in (name.replace("/", "___"), *(os.listdir(made) if made.is_dir() else ()))
    )
    return kind == "dataset" and wanted in found


def cached_file(name: str, kind: HubKind, file: str, revision: str | None = None) -> Path | None:
    """Return a file of a repository in this machine's cache, in a folder named by its commit; None: it is not there."""
    cached = hub.try_to_load_from_cache(name, file, revision=revision, repo_type=kind)
    return Path(cached) if isinstance(cached, str) else None


def not_found(name: str, kind: HubKind, reason: str, download: str) -> str:
    """Return the message for a name that is neither a path nor one of the hub, the more likely of the two first.

    Args:
        reason: what unavailable_reason returns.
        download: what to do if the hub was meant and cannot be reached.
    """
    what = "folder" if kind == "model" else "file or folder"
    missing = f"no such {what} (looked in {Path.cwd()})"
    if meant := similar_paths(name):
        return f"{missing}{meant} As a {kind} of the hub: {reason}"
    return f"{missing}, and as a {kind} of the hub {reason}{f'. {download}' if reason.endswith(unreachable()) else ''}"


def find_model(path: str, revision: str | None = None) -> str:
    """Return the folder that `resolve` finds, or a hub id that can be loaded.

    Raises:
        ConfigError: it is neither of them.
    """
    resolved = resolve(path)
    if Path(resolved).is_file():
        problem = f"{path}: a file, but a model is a folder or a hub id. For a recipe name its run directory (run.dir)"
        raise ConfigError(problem)
    if Path(resolved).is_dir() or (reason := unavailable_reason(resolved, "model", revision)) is None:
        return resolved
    raise ConfigError(f"{path}: {not_found(path, 'model', reason, download_help(path))}")


def download_help(path: str) -> str:
    """Return how to bring a model of the hub to a machine that cannot reach it."""
    return hint("model of the hub elsewhere", path=path)
