"""What looks like a secret, by the prefixes that its provider has documented: settings are saved and logged, so none may hold
one. Names, paths and hashes look like none of them."""

from __future__ import annotations

import re

SECRET = (
    "looks like {kind}; settings are saved and logged. Put secrets in environment variables (HF_TOKEN, WANDB_API_KEY)"
)
_SECRETS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("a Hugging Face token", r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}"),
        ("a GitHub token", r"\b(?:gh[opusr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})"),
        ("a GitLab token", r"\bgl(?:pat|dt|rtr?|cbt|ptt|ft|imt|agent|soat|ffct)-[\w.-]{20,}"),
        ("an AWS key", r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b"),
        ("a Google key", r"\bAIza[\w-]{35}|\bGOCSPX-[\w-]{20,}|\bya29\.[\w-]{20,}"),
        ("a Slack token", r"\bxox[a-z](?:\.xox[a-z])?-[\w-]{10,}|\bxapp-\d-[\w-]{10,}|hooks\.slack\.com/services/T\w+"),
        ("an npm token", r"\bnpm_[A-Za-z0-9]{36}"),
        ("a PyPI token", r"\bpypi-[\w-]{50,}"),
        ("a Docker token", r"\bdckr_[a-z]{3}_[\w-]{20,}"),
        ("a Stripe key", r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"),
        ("a Databricks token", r"\bdapi[0-9a-f]{32}"),
        ("a SendGrid key", r"\bSG\.[\w-]{16,}\.[\w-]{16,}"),
        # OpenAI, Anthropic, OpenRouter and others; Groq, xAI, NVIDIA, Replicate
        ("an API key", r"\bsk-(?:(?:proj|svcacct|admin|ant|or)-[\w-]{20,}|[A-Za-z0-9]{20,})"),
        ("an API key", r"\bgsk_[A-Za-z0-9]{40,}|\bxai-[A-Za-z0-9]{40,}|\bnvapi-[\w-]{40,}|\br8_[A-Za-z0-9]{37}\b"),
        ("a wandb key", r"\bwandb_v1_\w{20,}|(?<![0-9A-Za-z])[0-9a-f]{40}(?![0-9A-Za-z])"),
        ("a private key", r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY"),
        ("a JSON web token", r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}"),
        ("an Azure key", r"(?i)\b(?:AccountKey|SharedAccessKey)=[\w+/]{20,}"),
        ("a URL with a password", r"://[^/\s:@]*:[^/\s@]+@"),
        (
            "a signed URL",
            r"(?i)[?&](?:sig|signature|x-amz-(?:signature|credential|security-token)|x-goog-signature|awsaccesskeyid|"
            r"token|access_token|auth|api_?key|key|password|secret)=[^&\s]{8,}",
        ),
    )
)
_SNAPSHOT = re.compile(r"/snapshots/[0-9a-f]{40}(?=/|$)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def secret_in(text: str, key: str = "") -> str | None:
    """Return what kind of secret the text seems to hold; None: none. model.revision may be a commit's 40 hex digits."""
    if key == "model.revision" and _COMMIT.fullmatch(text):
        return None
    text = _SNAPSHOT.sub("/snapshots/", text)  # a folder of the hub's cache, named by a commit
    return next((kind for kind, pattern in _SECRETS if pattern.search(text)), None)
