"""Guard terminals and files: print text of any origin, with the characters escaped that could control a terminal or
hide text, and recognise secrets. No setting may hold a secret, since settings are saved and logged.

Secrets are known by the prefixes that providers document, or by the name before the value. Names, paths and commits in
paths look like none of them.
"""

import errno
import logging
import os
import re
import sys
import termios
from typing import Literal, TextIO

Level = Literal["warning", "error"]
_COLOURS: dict[Level, str] = {"warning": "\x1b[33m", "error": "\x1b[31m"}
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and newline: escape sequences begin with one
    "\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb"  # bidi, zero width, separators
    "\u115f\u1160\u17b4\u17b5\u3164\uffa0\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"  # letters without a shape
    "\ud800-\udfff\U000e0000-\U000e0fff]"  # halves of a character, which cannot be written; tags
    # Characters that scripts and emoji need, where neither can be: joiners after an ASCII character, choices of a shape
    # after a character that begins no keycap, or after another choice
    "|(?<![^\x00-\x7f])[\u034f\u180b-\u180d\u180f\u200c\u200d]|(?<![^\x00-\x22\x24-\x29\x2b-\x2f\x3a-\x7f\ufe00-\ufe0f])[\ufe00-\ufe0f]"
)


def visible(text: str) -> str:
    r"""Return text that cannot steer a terminal or hide on a page: control characters, direction marks, line separators
    and characters without width stand as Python writes them (\x1b, \u202e). Newlines and tabs stay."""
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_text(
    text: str, end: str = "\n", level: Level | None = None, *, error: bool = False, is_styled: bool = False
) -> None:
    """Print text of any origin; a log on a full disk or a terminal that is gone ends no run. What the terminal has no
    character for is written out too.

    Args:
        error: to stderr.
        level: its colour on a terminal; None: plain.
        is_styled: it is made of what `styled` returns, so nothing in it is left to escape.
    """
    stream = sys.stderr if error else sys.stdout
    try:
        text = text if is_styled else writable(text, stream.encoding)
        if level is not None and has_colours(stream):
            # Line by line: a colour that continues over a line break would stay if the output is cut there.
            text = re.sub(".+", lambda line: f"{_COLOURS[level]}{line[0]}\x1b[0m", text)
        print(text, file=stream, flush=True, end=end)
    except (OSError, ValueError):
        leave_lost_terminal()


def has_colours(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that shows colours, and nobody has asked for none (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")


def styled(text: str, style: str) -> str:
    """Return text as it is printed on stdout, in a style of terminals, such as 4;32, green and underlined."""
    return f"\x1b[{style}m{writable(text, sys.stdout.encoding)}\x1b[0m"


def writable(text: str, encoding: str | None) -> str:
    """Return what `visible` does, with characters that the encoding does not have written out too."""
    encoding = encoding or "utf-8"
    return visible(text).encode(encoding, "backslashreplace").decode(encoding)


def leave_lost_terminal() -> None:
    """Point stdout and stderr at /dev/null where their terminal was closed. Every write to such a terminal fails, in
    libraries too, and Python ends with code 120 if text is left that it could not write."""
    # EIO is what a closed terminal answers; a pipe or a file answers ENOTTY and is left alone.
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


class TerminalHandler(logging.Handler):
    """Prints log records with `print_text`. sys.stderr is looked up each time: a progress bar may have replaced it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the formatted record, in the colour of its level."""
        try:
            level: Level = "error" if record.levelno >= logging.ERROR else "warning"
            print_text(self.format(record), error=True, level=level if record.levelno >= logging.WARNING else None)
        # as logging.Handler asks: an error in logging must not end the program
        except Exception:
            self.handleError(record)


SECRET = (
    "looks like {kind}; settings are saved and logged. Put secrets in environment variables (HF_TOKEN, WANDB_API_KEY)"
)
_SECRETS = tuple(
    (kind, re.compile(pattern.replace("START", r"(?<![A-Za-z0-9])")))  # not \b: an underscore joins names to tokens
    for kind, pattern in (
        # Tokens that are longer than any word are found after a letter too.
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
