"""Recognise secrets, by the prefixes that providers document or by the name before the value: settings are saved
and logged, so none may hold one. Names, paths and commits in paths look like none of them."""

from __future__ import annotations

import re

SECRET = (
    "looks like {kind}; settings are saved and logged. Put secrets in environment variables (HF_TOKEN, WANDB_API_KEY)"
)
_SECRETS = tuple(
    (kind, re.compile(pattern.replace("START", r"(?<![A-Za-z0-9])")))  # not \b: an underscore joins names to tokens
    for kind, pattern in (
        # Those whose length no word has are found behind a letter too.
        ("a Hugging Face token", r"START(?:hf|api_org)_[A-Za-z0-9]{20,}|(?:hf|api_org)_[A-Za-z0-9]{30,}"),
        ("a Hugging Face token", r"STARThf_(?:oauth|jwt)_(?=[\w.-]*[A-Z0-9])[\w.-]{20,}"),
        ("a GitHub token", r"STARTgh[opusr]_[A-Za-z0-9]{20,}|gh[opusr]_[A-Za-z0-9]{30,}|STARTgithub_pat_\w{20,}"),
        ("a GitLab token", r"STARTgl(?:pat|dt|rtr?|cbt|ptt|ft|imt|agent|soat|ffct)-[\w.-]{20,}"),
        ("an AWS key", r"(?<![A-Z0-9])(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Z0-9])"),
        ("a Google key", r"STARTAIza[\w-]{35}|STARTGOCSPX-[\w-]{20,}|STARTya29\.[\w-]{20,}"),
        ("a Slack token", r"START(?:xox[a-z](?:\.xox[a-z])?|xapp-\d)-[\w-]{10,}|hooks\.slack\.com/services/T\w+"),
        ("an npm token", r"STARTnpm_[A-Za-z0-9]{36}"),
        ("a PyPI token", r"STARTpypi-[\w-]{50,}"),
        ("a Docker token", r"STARTdckr_[a-z]{3}_[\w-]{20,}"),
        ("a Stripe key", r"START[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"),
        ("a Databricks token", r"STARTdapi[0-9a-f]{32}"),
        ("a SendGrid key", r"STARTSG\.[\w-]{16,}\.[\w-]{16,}"),
        # OpenAI, Anthropic, OpenRouter and others; Groq, xAI, NVIDIA, Replicate
        ("an API key", r"STARTsk-(?:(?:proj|svcacct|admin|ant|or)-[\w-]{20,}|[A-Za-z0-9]{20,})"),
        (
            "an API key",
            r"START(?:gsk_|xai-)[A-Za-z0-9]{40,}|STARTnvapi-[\w-]{40,}|STARTr8_[A-Za-z0-9]{37}(?![A-Za-z0-9])",
        ),
        # 40 hexadecimal digits are a commit's too: in paths and behind an @ they are taken for one
        ("a wandb key", r"STARTwandb_v1_\w{20,}|(?:^|(?<=[\s\"']))[0-9a-f]{40}(?=$|[\s\"'])"),
        ("a wandb key", r"(?i)(?:wandb|key|token|login|secret|password)[\W_]{0,3}[0-9a-f]{40}(?![0-9a-z])"),
        ("a private key", r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY"),
        ("a JSON web token", r"STARTeyJ[\w-]{10,}\.eyJ[\w-]{10,}"),
        ("an Azure key", r"(?i)START(?:AccountKey|SharedAccessKey)=[\w+/]{20,}"),
        ("a URL with a password", r"://[^/\s:@]*:[^/\s@]+@"),
        ("a URL with a token", r"(?i)https?://[^/\s:@]{16,}@"),
        (
            "a signed URL",
            r"(?i)[?&](?:sig|signature|x-amz-(?:signature|credential|security-token)|x-goog-signature|awsaccesskeyid|"
            r"token|access_token|auth|api_?key|key|password|secret)=[^&\s]{8,}",
        ),
        ("an authorization header", r"(?i)(?:STARTbearer|STARTauthorization\s{0,3}:\s{0,3}\w+)\s+[\w.~+/-]{20,}"),
        (
            "a secret by its name",
            r"(?i)(?:secret_?(?:access_?)?key|access_?token|auth_?token|refresh_?token|client_?secret"
            r"|api_?key|password)"
            r"[\"']?\s{0,3}[=:]\s{0,3}[\"']?[\w.~+/-]{16,}",
        ),
    )
)
_SNAPSHOT = re.compile(r"/snapshots/[0-9a-f]{40}(?=/|$)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def secret_in(text: str, key: str = "") -> str | None:
    """Return the kind of secret that the text seems to hold; None if it holds none. model.revision may be
    a commit's 40 hex digits."""
    if key == "model.revision" and _COMMIT.fullmatch(text):
        return None
    text = _SNAPSHOT.sub("/snapshots/", text)  # a folder of the hub's cache, named by a commit
    return next((kind for kind, pattern in _SECRETS if pattern.search(text)), None)
