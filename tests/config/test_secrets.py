"""Secrets of the providers that people use are refused in recipes and on command lines; names, paths and hashes are not."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT

from sftkit.config.load import read_config
from sftkit.config.terminal import secret_in
from sftkit.errors import ConfigError

MIXED = "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3zA5bC7dE9fG1hJ3kL5m"
SHA = "0123456789abcdef0123456789abcdef01234567"
# In two pieces, so that this file holds none.
SECRETS = {
    "a Hugging Face token": [
        *("hf" + "_" + MIXED[:34], "api_" + "org_" + MIXED[:34], "hf" + "_oauth_eyJhbGciOiJ.eyJzdWIiOiIx.abc-_0"),
        "hf" + "_oauth_" + MIXED[:34],
    ],
    "a GitHub token": [*(f"gh{kind}" + "_" + MIXED[:36] for kind in "opusr"), "github" + "_pat_" + MIXED],
    "a GitLab token": ["gl" + "pat-" + MIXED[:20], "gl" + "rt-" + MIXED[:20]],
    "an AWS key": ["AK" + "IAIOSFODNN7EXAMPLE", "AS" + "IA2222333344445555"],
    "a Google key": ["AI" + "za" + MIXED[:35], "GO" + "CSPX-" + MIXED[:28]],
    "a Slack token": ["xo" + "xb-123456789012-" + MIXED[:24], "xa" + "pp-1-A0123-" + MIXED[:20]],
    "an npm token": ["np" + "m_" + MIXED[:36]],
    "a PyPI token": ["py" + "pi-AgEIcHlwaS5vcmc" + MIXED],
    "a Docker token": ["dc" + "kr_pat_" + MIXED[:27]],
    "a Stripe key": ["sk" + "_live_" + MIXED[:24]],
    "a Databricks token": ["da" + "pi" + SHA[:32]],
    "a SendGrid key": ["SG" + "." + MIXED[:22] + "." + MIXED[:43]],
    "an API key": [
        *("sk" + f"-{kind}-" + MIXED[:40] for kind in ("proj", "ant-api03", "or-v1")),
        *("sk" + "-" + MIXED[:48], "gs" + "k_" + MIXED[:48], "nv" + "api-" + MIXED + MIXED, "r8" + "_" + MIXED[:37]),
    ],
    "a wandb key": ["wandb" + "_v1_" + MIXED, "WANDB_API_KEY=" + SHA, "wandb login " + SHA],
    "a private key": ["-----BEGIN " + "RSA PRIVATE KEY-----", "-----BEGIN " + "PRIVATE KEY-----"],
    "a JSON web token": ["ey" + "JhbGciOiJIUzI1NiJ9.ey" + "JzdWIiOiIxMjM0NTY3ODkwIn0.abc"],
    "an Azure key": ["DefaultEndpointsProtocol=https;AccountName=x;Account" + "Key=" + MIXED],
    "a URL with a password": [
        "https://user:hunter22@host/x",
        "s3://key:se" + "cret@bucket",
        "redis://:pass" + "word@h",
    ],
    "a URL with a token": ["https://" + MIXED[:36] + "@huggingface.co/a", "git+https://" + SHA + "@host/a.git"],
    "an authorization header": ["Authorization: Bearer " + MIXED[:30], "bearer " + MIXED[:30]],
    "a secret by its name": [
        "aws_secret_access_key=" + MIXED[:40],
        "api_key: " + MIXED[:24],
        'client_secret="' + MIXED[:20],
    ],
    "a signed URL": ["https://h/a.jsonl?sig=" + MIXED[:20], "https://h/a?x=1&X-Amz-Signature=" + SHA + SHA],
}
HARMLESS = [
    *("Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct", "meta-llama/Llama-3.1-8B", "xai-org/grok-1", "hf-internal-testing/x"),
    *("runs/r8_lr2e-5_bs32_steps1000_cosine_seed0", "data/sk-slovak-wiki-20230101-cleaned-deduplicated", "runs/glue-mnli-2024-01-01-x1"),
    *("s3://bucket/a/b.jsonl", "https://host/a.jsonl?revision=main", "hf://datasets/a/b@main/c.parquet", "hdfs://user@host:9000/a"),
    *("/cache/models--a--b/snapshots/" + SHA, "sha256:" + SHA + SHA[:24], "builtin:tasks", "0123456789" * 4 + "0", "../key=value"),
    *("runs/" + SHA, SHA + "/data.jsonl", "runs/x-" + SHA + "/step-000010", "runs/x_" + SHA, "hf://datasets/a/b@" + SHA, "sha1:" + SHA),
    *("https://host/resolve/" + SHA + "/a.parquet", "https://host/a.jsonl?revision=" + SHA, "git+https://host/a@" + SHA, "https://me@host/a"),
    *("half_of_the_data_of_september_and_october", "hf_dataset_with_a_long_name_2024", "risk-assessments0of1all2the3banks", "password"),
    *("hf_oauth_documentation_in_plain_words", "basic understanding-of-mathematics", "data/token=en/key=3"),
    *("runs/github_patches_of_2024", "data/pypi-downloads-2024", "npm_packages.jsonl", "What is an API key? sk-learn?", "AKIA"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "secret"), [(kind, one) for kind, several in SECRETS.items() for one in several])
def test_secrets_are_known_wherever_they_stand(kind: str, secret: str) -> None:
    for text in (secret, f"data/{secret}/x", f"a {secret} b", f"/r/my_{secret}", f"x={secret}", f"key_{secret}"):
        assert secret_in(text) == kind, text


@pytest.mark.parametrize("kind", ["a Hugging Face token", "a GitHub token", "an AWS key"])
def test_what_is_as_long_as_no_word_is_a_secret_behind_a_letter_too(kind: str) -> None:
    assert secret_in(f"my{SECRETS[kind][0]}") == kind


@pytest.mark.parametrize("text", HARMLESS)
def test_names_paths_and_hashes_are_no_secrets(text: str) -> None:
    assert secret_in(text) is None


def test_a_commit_is_a_revision_and_nothing_else() -> None:
    assert secret_in(SHA, "model.revision") is None
    for text in (SHA, f"a {SHA}", f'"{SHA}"'):
        assert secret_in(text, "model.path") == "a wandb key"


@pytest.mark.parametrize("secret", [several[0] for several in SECRETS.values()], ids=SECRETS)
def test_a_recipe_with_a_secret_is_refused_and_never_shows_it(secret: str, tmp_path: Path) -> None:
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(f"extends: {ROOT}/recipes/smoke/sft.yaml\n")
    with pytest.raises(ConfigError, match="looks like") as refused:
        read_config(recipe, [f"model.tokenizer='{secret}'"])
    assert secret not in str(refused.value)


@pytest.mark.parametrize(
    "start",
    [
        "eyJ-",
        "sk-",
        "glpat-",
        "://a:",
        "xoxb-",
        "-----BEGIN A ",
        "?key=",
        "hf_oauth_",
        "http://a",
        "bearer  ",
        "api_key= ",
    ],
)
def test_text_made_to_be_searched_for_long_is_not(start: str) -> None:
    began = time.process_time()
    secret_in(start * (10_000 // len(start)))
    assert time.process_time() - began < 2


def test_evaluate_refuses_a_secret_among_its_words_without_showing_it() -> None:
    secret = SECRETS["a GitHub token"][0]
    words = [sys.executable, "scripts/evaluate.py", f"https://{secret}@host/model"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, secret in done.stdout + done.stderr) == (2, False)
    assert "looks like a GitHub token" in done.stderr
