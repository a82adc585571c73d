"""sftkit export --push: one commit holds everything or nothing is published, and no secret leaves the machine."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import sha
from made_run import make_run

from sftkit.errors import ConfigError, RunError
from sftkit.export.push import check_push, files_to_push, push
from sftkit.reports.card import model_card
from sftkit.reports.collect import gather_report
from sftkit.rundir.names import STATE

# of the hub's client, which sends a file by `data`
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
TOKEN = "hf" + "_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3z"
ACCOUNTS = {
    TOKEN: {"name": "me", "orgs": [{"name": "team"}], "auth": {"accessToken": {"role": "write"}}},
    TOKEN[:-1] + "r": {"name": "me", "orgs": [], "auth": {"accessToken": {"role": "read"}}},
}


class Hub(ThreadingHTTPServer):
    """What the hub answers to its client: repositories are lists of commits, each path -> content."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, dict[str, Any]] = {}
        self.large: dict[str, bytes] = {}
        self.xet = 0
        "bytes of files in Xet's storage"
        self.requests: list[str] = []
        self.failing: str | None = None
        "a request whose address has this text is rejected"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def make(self, name: str, files: dict[str, bytes], *, private: bool = False) -> None:
        self.repositories[name] = {"private": private, "commits": [files]}

    def files(self, name: str) -> dict[str, bytes]:
        return self.repositories[name]["commits"][-1]

    def sent(self) -> list[str]:
        """Return the requests that change something, and forget all of them."""
        found = [one for one in self.requests if not one.startswith("GET")]
        self.requests.clear()
        return found


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", "tokenizer.json"))


class Requests(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def handle_request(self) -> None:
        hub, path = self.server, urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        hub.requests.append(f"{self.command} {path}")
        if hub.failing is not None and hub.failing in path:
            return self.answer({"error": "the disk of the stand-in is full"}, 400)
        if path.startswith("/storage/"):
            hub.large[path.rpartition("/")[2]] = body
            return self.answer({})
        if path.startswith(("/v1/", "/v2/")):  # storage of Xet, in the older of the forms that its client knows
            if self.headers.get("Authorization") != "Bearer for-xet":
                return self.answer({}, 401)
            hub.xet += len(body) if path.startswith("/v1/xorbs/") else 0
            known = {"/v1/xorbs/": {"was_inserted": True}, "/v1/shards": {"result": 1}}
            found = [reply for start, reply in known.items() if path.startswith(start)]
            return self.answer(found[0]) if found else self.answer({}, 404)
        account: Any = ACCOUNTS.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))
        if account is None:
            return self.answer({"error": "Invalid user token"}, 401, X_Error_Message="Invalid user token")
        if path == "/api/whoami-v2":
            return self.answer(account)
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            given = json.loads(body)
            hub.make(f"{given['organization']}/{given['name']}", {}, private=given.get("visibility") == "private")
            return self.answer({"url": f"{hub.url}/{given['organization']}/{given['name']}"})
        name = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2]).removesuffix(".git")
        there = hub.repositories.get(name)
        if there is None:
            return self.answer({"error": "not found"}, 404, X_Error_Code="RepoNotFound")
        return self.of_repository(name, there, path, body)

    do_GET = do_POST = do_PUT = handle_request

    def of_repository(self, name: str, there: dict[str, Any], path: str, body: bytes) -> None:
        hub, files = self.server, there["commits"][-1]
        oids = {
            one: hashlib.sha256(text).hexdigest() if is_large(one) else sha.git_hash(text)
            for one, text in files.items()
        }
        commit = f"{len(there['commits']):040x}"
        if "/tree/" in path:
            rows = []
            for one, text in files.items():
                lfs = {"lfs": {"oid": oids[one], "size": len(text), "pointerSize": 100}} if is_large(one) else {}
                rows.append({"type": "file", "path": one, "size": len(text), "oid": oids[one], **lfs})
            return self.answer(rows)
        if "/preupload/" in path:
            given = [one["path"] for one in json.loads(body)["files"]]
            mode = {one: "lfs" if is_large(one) else "regular" for one in given}
            found = [{"path": o, "uploadMode": mode[o], "shouldIgnore": False, "oid": oids.get(o)} for o in given]
            return self.answer({"files": found})
        if "/xet-write-token/" in path:
            return self.answer({"accessToken": "for-xet", "exp": 2_000_000_000, "casUrl": hub.url})
        if path.endswith("/info/lfs/objects/batch"):
            found = [{"oid": one["oid"], "size": one["size"]} for one in json.loads(body)["objects"]]
            for one in found:
                if one["oid"] not in hub.large:
                    one["actions"] = {"upload": {"href": f"{hub.url}/storage/{one['oid']}?X-Amz-Signature=1234567890"}}
            return self.answer({"objects": found})
        if "/commit/" in path:
            lines = [json.loads(line) for line in body.splitlines()]
            header, *operations = [(line["key"], line["value"]) for line in lines]
            if header[1].get("parentCommit") != commit:
                return self.answer({"error": "The expected head is another"}, 412)
            after = dict(files)
            for kind, value in operations:
                if kind == "file":
                    after[value["path"]] = base64.b64decode(value["content"])
                elif kind == "lfsFile":
                    after[value["path"]] = hub.large.get(value["oid"]) or f"Xet {value['oid']}".encode()
                else:
                    del after[value["path"]]
            there["commits"].append(after)
            return self.answer({"commitUrl": f"{hub.url}/{name}", "commitOid": f"{len(there['commits']):040x}"})
        return self.answer({"id": name, "private": there["private"], "sha": commit, "siblings": []})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "out"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "README.md").write_text("---\nlibrary_name: transformers\n---\n# A model\n")
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 400)
    (path / ".hidden").write_text("mine")
    return path


def pushed(folder: Path, name: str = "me/model", *, private: bool = False) -> list[str]:
    return push(folder, name, check_push(name, private=private), private=private)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".hidden"}


def test_without_yes_nothing_is_asked_of_the_hub_and_all_is_shown(hub: Hub, folder: Path) -> None:
    lines = push(folder, "me/model", None, private=True)
    text = "\n".join(lines)
    assert hub.requests == []
    assert re.search(r"0\.102 MB  model\.safetensors", text)
    assert f"3 files, 0.1 MB, to {hub.url}/me/model" in text
    assert "a new repository is private" in text
    assert lines[-1].endswith(f"{folder} --push me/model --private --yes")
    assert "a new repository is public: everybody can read it" in "\n".join(
        push(folder, "me/model", None, private=False)
    )


@pytest.mark.parametrize("private", [False, True])
def test_a_new_repository_gets_every_file_in_one_commit_which_is_the_last_request(
    private: bool, hub: Hub, folder: Path
) -> None:
    lines = pushed(folder, "team/model", private=private)
    assert hub.files("team/model") == content(folder)
    assert hub.repositories["team/model"]["private"] is private
    assert len(hub.repositories["team/model"]["commits"]) == 2, "the empty one, and one with all files"
    assert "/commit/" in hub.requests[-1]
    assert f"({'private' if private else 'public'}): 3 of 3 files" in lines[0]


def test_large_files_go_to_the_storage_of_xet_before_the_commit(
    hub: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))
    weights = random.Random(0).randbytes(300_000)
    (folder / "model.safetensors").write_bytes(weights)
    pushed(folder)
    assert hub.xet >= len(weights)
    assert hub.files("me/model")["model.safetensors"] == f"Xet {hashlib.sha256(weights).hexdigest()}".encode()
    assert hub.files("me/model")["config.json"] == (folder / "config.json").read_bytes()
    assert [one for one in hub.sent() if "telemetry" not in one][-1] == "POST /api/models/me/model/commit/main"


def test_a_second_push_sends_what_has_changed_and_nothing_if_nothing_has(hub: Hub, folder: Path) -> None:
    pushed(folder)
    hub.sent()
    assert "has these 3 files already: nothing was sent" in pushed(folder)[0]
    assert hub.sent() == []
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n# A better model\n")
    assert "1 of 3 files" in pushed(folder)[0]
    assert not [one for one in hub.sent() if "storage" in one or "lfs" in one], "the weights have not changed"
    assert hub.files("me/model") == content(folder)


def test_files_that_a_push_replaces_are_deleted_in_its_commit_and_others_stay(hub: Hub, folder: Path) -> None:
    """A model.safetensors that stays would be loaded instead of the shards."""
    pushed(folder)
    hub.files("me/model").update({"chat_template.jinja": b"old", "picture.png": b"mine", "notes/a.json": b"{}"})
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model-00001-of-00001.safetensors").write_bytes(weights)
    lines = pushed(folder)
    assert hub.files("me/model") == content(folder) | {"picture.png": b"mine", "notes/a.json": b"{}"}
    assert lines[-1] == "deleted there: chat_template.jinja, model.safetensors"
    assert len(hub.repositories["me/model"]["commits"]) == 3


@pytest.mark.parametrize("request_", ["/storage/", "/preupload/", "/commit/", "/objects/batch"])
def test_a_failure_in_the_middle_publishes_nothing_and_says_what_to_do(request_: str, hub: Hub, folder: Path) -> None:
    pushed(folder)
    before = hub.files("me/model")
    (folder / "model.safetensors").write_bytes(b"other weights" * 1000)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    hub.failing = request_
    with pytest.raises(RunError) as error:
        pushed(folder)
    text = str(error.value)
    assert "failed while sending 2 files" in text
    assert "400 the disk of the stand-in is full" in text
    assert "The repository is as it was. This sends what is missing: " in text
    assert text.endswith(f"{folder} --push me/model --yes")
    assert "1234567890" not in text, "an address with a signature"
    assert TOKEN not in text
    assert hub.files("me/model") == before
    hub.failing = None
    assert "2 of 3 files" in pushed(folder)[0]
    assert hub.files("me/model") == content(folder)


def test_a_push_between_the_comparison_and_the_commit_is_not_overwritten(hub: Hub, folder: Path) -> None:
    hub.make("me/model", {})
    repository = check_push("me/model", private=False)
    hub.repositories["me/model"]["commits"].append({"config.json": b"of somebody else"})
    with pytest.raises(RunError, match=r"412 The expected head is another\. The repository is as it was"):
        push(folder, "me/model", repository, private=False)
    assert hub.files("me/model") == {"config.json": b"of somebody else"}


@pytest.mark.parametrize(
    ("token", "name", "problem"),
    [
        (None, "me/model", "no token of .* is set here: log in with"),
        ("hf" + "_" + "wrong", "me/model", "rejects it: 401 Unauthorized: log in with"),
        (TOKEN[:-1] + "r", "me/model", "the token of me that is set here may only read"),
        (TOKEN, "you/model", r"you is not this account: the token is of me, which may push to me/…, team/…"),
        (TOKEN, "model", "it has no owner: name ORG/NAME"),
        (TOKEN, "me/a/b", "name ORG/NAME"),
        (TOKEN, "me/public", "that repository is public, and --private makes new ones alone"),
    ],
)
def test_a_push_that_is_not_allowed_is_rejected_before_anything_is_exported(
    token: str | None, name: str, problem: str, hub: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.make("you/model", {"config.json": b"yours"})
    hub.make("me/public", {})
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError, match=problem) as error:
        check_push(name, private=True)
    assert token is None or token not in str(error.value)
    assert hub.sent() == []
    assert hub.files("you/model") == {"config.json": b"yours"}


def test_without_the_hub_a_push_is_rejected_at_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="cannot be reached"):
        check_push("me/model", private=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set: unset it"):
        check_push("me/model", private=False)


def test_secrets_in_the_texts_of_a_folder_are_not_pushed(hub: Hub, folder: Path) -> None:
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(f"{card}export WANDB_API_KEY={'0123456789' * 4}")
    with pytest.raises(ConfigError, match=r"README\.md: it holds a wandb key, which everybody could read") as error:
        push(folder, "me/model", None, private=False)
    assert "0123456789" not in str(error.value)
    (folder / "README.md").write_text(card)
    (folder / "train.log").write_text(f"Authorization: Bearer {TOKEN}")
    with pytest.raises(ConfigError, match=r"train\.log: it holds the token that is set here"):
        files_to_push(folder)
    (folder / "train.log").unlink()
    (folder / "adapter_config.json").write_text(f'{{"revision": "{"0123456789" * 4}"}}')
    assert len(files_to_push(folder)) == 4, "a revision is no secret"
    (folder / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "/x/{TOKEN}"}}')
    with pytest.raises(ConfigError, match="it holds the token that is set here"):
        push(folder, "me/model", None, private=False)


def test_a_token_that_was_written_into_a_recipe_by_hand_does_not_leave_with_the_card(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    """The recipe of a run is checked when it starts; its copy in the run directory can be edited later."""
    run_dir = make_run(tmp_path / "chat" / "sft")
    recipe = run_dir / "config.yaml"
    recipe.write_text(recipe.read_text().replace("HuggingFaceTB/smoltalk2", f"data/{TOKEN}/chats"))
    (folder / "README.md").write_text(model_card(gather_report(run_dir), {}))
    with pytest.raises(ConfigError, match=r"README\.md: it holds the token that is set here") as error:
        pushed(folder)
    assert TOKEN not in str(error.value)
    assert [one for one in hub.sent() if "whoami" not in one] == []


def test_an_adapter_on_a_folder_of_this_machine_is_not_pushed(hub: Hub, folder: Path) -> None:
    settings = folder / "adapter_config.json"
    settings.write_text(f'{{"base_model_name_or_path": "{folder.absolute()}"}}')
    with pytest.raises(ConfigError, match=r"a folder that nobody else has: write the hub id of these weights there"):
        files_to_push(folder)
    settings.write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    assert "adapter_config.json" in files_to_push(folder)


def test_only_the_folder_of_an_export_is_pushed(folder: Path) -> None:
    (folder / STATE).mkdir()
    with pytest.raises(ConfigError, match="a step directory, with the state of a training: add --out DIR"):
        files_to_push(folder)
    with pytest.raises(ConfigError, match="no model or adapter to push: name the folder of an export"):
        files_to_push(folder.parent)
