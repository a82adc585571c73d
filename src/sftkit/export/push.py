"""Publish a folder that `export` wrote on the Hugging Face hub, in one commit.

The commit is the last request: until then the repository shows what it showed before. `upload_folder` of
huggingface_hub is not used, because with Xet it publishes a large folder in several commits.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import httpx
import huggingface_hub as hub
from huggingface_hub import constants, errors
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import sha, validate_repo_id

from sftkit.config.commands import invocation, program_path
from sftkit.config.terminal import secret_in
from sftkit.errors import ConfigError, RunError, config_error
from sftkit.rundir.files import read_object, sha256_of
from sftkit.rundir.names import ADAPTER_CONFIG, RECIPE, STATE
from sftkit.rundir.status import describe_error
from sftkit.runtime.hub import unreachable
from sftkit.runtime.script import first_of, working

REPLACED = ("*.safetensors", "*.json", "*.jinja")
"""Files of an earlier push that are deleted if the folder lacks them: transformers would load an old model.safetensors
rather than new shards, and the old template or generation config with new weights."""
LARGEST_TEXT = 2**20
"Bytes of a text file, which has no zero byte, that is searched for secrets: at most. A tokenizer is larger."
_REVISION = re.compile(r'"revision": "[0-9a-f]{40}"')


class Repository(NamedTuple):
    """A repository of the hub to push to."""

    name: str
    private: bool
    commit: str | None
    "its newest commit; None: the repository is new"


def files_to_push(folder: Path) -> dict[str, Path]:
    """Return name in the repository -> file of an exported folder, without hidden files.

    Raises:
        ConfigError: it is no exported folder, or a file holds a secret.
    """
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise ConfigError(f"{folder}: no model or adapter to push: name the folder of an export, or add --out DIR")
    if (folder / STATE).is_dir() or (folder / RECIPE).is_file():
        raise ConfigError(f"{folder}: a step directory, with the state of a training: add --out DIR, which is pushed")
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    found = {name: path for name, path in found.items() if not any(part[0] == "." for part in name.split("/"))}
    token = hub.get_token()
    for path in found.values():
        if path.stat().st_size > LARGEST_TEXT or b"\0" in (content := path.read_bytes()):
            continue
        # In a card an underscore is written with a backslash, which nobody sees.
        text = content.decode(errors="replace").replace("\\", "")
        kind = "the token that is set here" if token and token in text else secret_in(_REVISION.sub("", text))
        if kind is not None:
            raise ConfigError(f"{path}: it holds {kind}, which everybody could read: remove it there, then push again")
    settings = folder / ADAPTER_CONFIG
    base = str(read_object(settings).get("base_model_name_or_path")) if settings.is_file() else ""
    if Path(base).is_absolute():
        raise config_error("base of nobody else", settings=settings, base=base)
    return found


def check_push(name: str, *, private: bool) -> Repository:
    """Ask the hub whether this account may push to a repository, before anything is exported.

    Raises:
        ConfigError: no token or a wrong one, the hub cannot be reached, the repository belongs to somebody else, or
            it is public and should be private.
    """
    check_name(name)
    log_in = f"log in with `{program_path('hf')} auth login`, or set HF_TOKEN to a token that may write"
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"--push {name}: {unreachable()}: unset it, or push from another machine")
    if hub.get_token() is None:
        raise ConfigError(f"--push {name}: no token of {constants.ENDPOINT} is set here: {log_in}")
    api = hub.HfApi()
    try:
        account = api.whoami()
        if ((account.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
            raise ConfigError(f"--push {name}: the token of {account['name']} that is set here may only read: {log_in}")
        names = [account["name"], *(one["name"] for one in account.get("orgs") or ())]
        if (owner := name.partition("/")[0]) not in names:
            owners = first_of([f"{one}/…" for one in names], most=5)
            raise config_error(
                "repository of others", name=name, owner=owner, user=names[0], owners=owners, log_in=log_in
            )
        try:
            there = api.model_info(name)
        except errors.RepositoryNotFoundError:
            return Repository(name, private, None)
    except errors.HfHubHTTPError as error:
        cure = log_in if error.response.status_code in (401, 403) else "try again later"
        raise ConfigError(f"--push {name}: {constants.ENDPOINT} rejects it: {_reason(error)}: {cure}") from None
    except httpx.HTTPError as error:
        raise ConfigError(f"--push {name}: {unreachable()} ({type(error).__name__}): try again later") from None
    if private and not there.private:
        raise config_error("public repository", name=name)
    return Repository(name, bool(there.private), there.sha)


def check_name(name: str) -> None:
    """Reject a name that no repository can have."""
    try:
        validate_repo_id(name)
        if "/" not in name:
            raise errors.HFValidationError("it has no owner")
    except errors.HFValidationError as error:
        raise ConfigError(f"--push {name}: {str(error).rstrip('.')}: name ORG/NAME, such as me/my-model") from None


def push(folder: Path, name: str, repository: Repository | None, *, private: bool) -> list[str]:
    """Publish a folder, or show what would be published.

    Args:
        repository: what `check_push` has returned; None: nothing is sent.
        private: whether a new repository is private.

    Returns:
        lines about the files and the commit.

    Raises:
        ConfigError: the folder cannot be published.
        RunError: a request has failed, so nothing is published.
    """
    check_name(name)
    files = files_to_push(folder)
    words = [str(folder), "--push", name, *(["--private"] if private else []), "--yes"]
    command = invocation("scripts/export.py", *words)
    if repository is not None:
        return _commit(files, repository, command)
    sizes = {one: path.stat().st_size for one, path in files.items()}
    visible = "private" if private else "public: everybody can read it (--private makes it private)"
    return [
        *(f"{size / 1e6:>12,.3f} MB  {one}" for one, size in sizes.items()),
        f"{len(files)} files, {sum(sizes.values()) / 1e6:,.1f} MB, to {constants.ENDPOINT}/{name}",
        f"a new repository is {visible}; one that is there keeps its visibility",
        f"{', '.join(REPLACED)} in it that are not in the folder are deleted in the same commit",
        f"nothing was sent. To publish: {command}",
    ]


def _commit(files: Mapping[str, Path], repository: Repository, command: str) -> list[str]:
    """Send files that are new or have changed, in one commit that also deletes those that they replace."""
    api, name = hub.HfApi(), repository.name
    doing = "making the repository"
    try:
        if repository.commit is None:
            api.create_repo(name, private=repository.private)
        doing = "comparing with the repository"
        there = {one.path: one for one in api.list_repo_tree(name, recursive=True) if isinstance(one, RepoFile)}
        parent = repository.commit or api.model_info(name).sha
        with working(f"comparing {len(files)} files with {name}"):
            changed = [one for one, path in files.items() if one not in there or not _same(path, there[one])]
        gone = sorted(one for one in there.keys() - files.keys() if "/" not in one)
        operations: list[hub.CommitOperationAdd | hub.CommitOperationCopy | hub.CommitOperationDelete] = []
        operations += [hub.CommitOperationAdd(one, str(files[one])) for one in changed]
        operations += [hub.CommitOperationDelete(one) for one in gone if any(fnmatchcase(one, p) for p in REPLACED)]
        where = f"{constants.ENDPOINT}/{name} ({'private' if repository.private else 'public'})"
        if not operations:
            return [f"{where} has these {len(files)} files already: nothing was sent"]
        size = sum(files[one].stat().st_size for one in changed) / 1e6
        doing = f"sending {len(changed)} files, {size:,.1f} MB"
        done = api.create_commit(name, operations, commit_message="Model trained with sftkit", parent_commit=parent)
    except Exception as error:  # of httpx, of Xet's library, of the hub's client, of the disk
        state = "The repository is as it was" if repository.commit else "The repository, if it was made, is empty"
        text = f"--push {name}: failed while {doing}: {_reason(error)}. {state}. This sends what is missing: {command}"
        raise RunError(text) from None
    lines = [f"pushed to {where}: {len(changed)} of {len(files)} files, {size:,.1f} MB, commit {done.oid[:12]}"]
    if deleted := len(operations) - len(changed):
        lines.append(f"deleted there: {first_of([one.path_in_repo for one in operations[-deleted:]])}")
    return lines


def _same(path: Path, there: RepoFile) -> bool:
    """Return whether the repository has this content: large files have a sha256, others the hash that git has."""
    if path.stat().st_size != there.size:
        return False
    if there.lfs is not None:
        return sha256_of([path])[0] == there.lfs.sha256
    return sha.git_hash(path.read_bytes()) == there.blob_id


def _reason(error: BaseException) -> str:
    """Return a line about an error without addresses: one that a file is sent to is signed, as good as a token."""
    texts: list[str] = []
    while error.__cause__ is not None and not isinstance(error, errors.HfHubHTTPError):
        texts.append(str(error))
        error = error.__cause__
    if isinstance(error, errors.HfHubHTTPError):
        texts.append(f"{error.response.status_code} {error.server_message or error.response.reason_phrase}")
    else:
        texts.append(describe_error(error))
    text = re.sub(r"\S*://\S+", "…", " ".join(" ".join(texts).split()))
    return text[:300] if secret_in(text) is None else type(error).__name__
