"""A conversation in the terminal: flags of scripts/chat.py, editing and history of lines, commands. No torch.

`Sampling` and `Answer`, the request to a model and its result, are here for callers without torch.
"""

import argparse
import difflib
import json
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import yaml

from sftkit.config.commands import Parser, expanded, path_or_id
from sftkit.config.schema import DataConfig
from sftkit.config.terminal import print_text
from sftkit.data.reading.conversation import Message
from sftkit.errors import ConfigError, DataError
from sftkit.rundir.names import EVALUATIONS
from sftkit.runtime.signals import exit_on_signals


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling the tokens of an answer."""

    temperature: float = 0.0
    "0: the likeliest token (greedy)"
    top_p: float = 1.0
    "sample from the likeliest tokens that have this probability together"
    max_new_tokens: int = 256


@dataclass(frozen=True)
class Answer:
    """The answer of the model to one `Question`."""

    text: str
    stop: str
    "why it ended: end_of_turn | stop_text | length"
    tokens: int
    ids: tuple[int, ...] = ()
    "number of tokens of the answer"


def parse(description: str | None) -> Namespace:
    """Parse the command line and add `sampling` and `template_args` (None if not given). Print problems and exit with
    code 2 if there are any.
    """
    parser = Parser(description)
    parser.takes_second_word = "--prompt"
    parser.add_argument(
        "path", nargs="?", type=path_or_id, help="run, step directory, model folder or hub id; default: the newest run"
    )
    parser.add_argument("--prompt", help="one question; print the answer and exit")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--temperature", type=float, default=0.0, help="for sampling, say 0.7; 0: likeliest token (0)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens that have this probability together (1)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest answer in tokens (256)")
    parser.add_argument(
        "--template-arg",
        metavar="NAME=VALUE",
        type=_argument,
        action="append",
        help="argument of the chat template: enable_thinking=false, reasoning_effort=high; may be given several times",
    )
    args = parser.parse_args()
    if args.prompt is not None and not args.prompt.strip():
        parser.error("--prompt has no question in it: give a text, or leave it out to talk in the terminal")
    if not 0 <= args.temperature < float("inf"):
        parser.error(f"--temperature {args.temperature}: must be 0 or more")
    if not 0 < args.top_p <= 1:
        parser.error(f"--top-p {args.top_p}: must be more than 0 and at most 1")
    if args.top_p < 1 and not args.temperature:
        parser.error("--top-p needs --temperature, such as 0.7: without one the likeliest token is taken")
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens {args.max_new_tokens}: must be 1 or more")
    args.sampling = Sampling(args.temperature, args.top_p, args.max_new_tokens)
    args.template_args = dict(args.template_arg) if args.template_arg else None
    return args


def _argument(word: str) -> tuple[str, bool | int | float | str | None]:
    """Parse NAME=VALUE; the value is YAML."""
    name, sign, text = word.partition("=")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if not (sign and name.isidentifier()) or not isinstance(value, bool | int | float | str | None):
        raise argparse.ArgumentTypeError(f"{word}: expected NAME=VALUE, such as enable_thinking=false")
    return name, value


_SHOWN = 3
"Maximum number of example questions, each of another family of tasks."


def right_answers(folder: Path) -> tuple[int, list[str]]:
    """Return how many held-out questions of one message the evaluation of a checkpoint has asked, and some of those
    that were answered right.

    Args:
        folder: anything; only a step directory of a run has an evaluation.
    """
    asked = 0
    right: dict[str, str] = {}
    # The run's own evaluation at this step; the folder of another step has another name.
    for file in sorted((folder.parent / EVALUATIONS / folder.name).glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            turns = row.get("prompt")
            if isinstance(turns, list) and [turn["role"] for turn in turns] == ["user"]:
                asked += 1
                family = str((row.get("source") or {}).get("family", file.stem))
                if 1 in row["marks"].values():
                    right.setdefault(family, turns[0]["content"])
    return asked, list(right.values())[:_SHOWN]


Stream = Callable[[list[Message]], Iterator[str]]
"Function from messages to the answer, in parts as it is decoded."

HISTORY_FILE = Path(DataConfig.cache_dir) / "chat_history"
MAX_LINES = 1000
"Maximum number of lines in the history."
SAVED = "chat.jsonl"
EXITS = ("exit", "quit", "bye")
HELP = f"""\
/help         this list
/clear        start over, under the same system message; /new is the same
/system TEXT  start over under this system message; without TEXT under none
/save [FILE]  append the conversation to a file of JSON lines that data.train can name ({SAVED})
/exit         end; {", ".join(EXITS)} and Ctrl-D are the same
A line that ends with \\ continues in the next one. Ctrl-C ends an answer. Arrow keys edit the line and bring earlier \
ones back."""


@dataclass
class ChatHistory:
    """The messages so far."""

    system: str | None
    messages: list[Message] = field(default_factory=list)

    def with_question(self, text: str) -> list[Message]:
        """Return all messages with a question appended."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages, {"role": "user", "content": text}]


def converse(stream: Stream, system: str | None) -> None:
    """Ask and answer until the user ends it.

    Raises:
        SystemExit: a signal other than Ctrl-C arrived.
        KeyboardInterrupt: a Ctrl-C arrived that did not interrupt an answer.
    """
    conversation = ChatHistory(system)
    # Ctrl-C is a KeyboardInterrupt and other signals are a SystemExit, so that line editing, which changes the
    # terminal, restores it. A script's own handlers would end the process at once.
    with _editing(), exit_on_signals():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # restored with the others
        for line in iter(_ask, None):
            text = line.strip()
            if text.removeprefix("/") in EXITS:
                return
            if line.startswith("/"):
                print_text(_command(conversation, text), error=True)
            elif text:
                _answer(stream, conversation, text)


def print_answer(chunks: Iterator[str]) -> str:
    """Print an answer while it is generated, without white space at its end, and return it."""
    said = ""
    shown = 0
    for chunk in chunks:
        said += chunk
        # White space is held back until something follows it.
        if end := len(said.rstrip()):
            print_text(said[shown:end], end="")
            shown = end
    print_text("")
    return said


def _answer(stream: Stream, conversation: ChatHistory, text: str) -> None:
    messages = conversation.with_question(text)
    try:
        # Closed at once when interrupted, otherwise the model would continue to compute.
        with closing(stream(messages)) as chunks:  # type: ignore[type-var]
            reply = print_answer(chunks)
    except KeyboardInterrupt:
        print_text("\n(interrupted: question and answer are left out of the conversation)", error=True)
    except (ConfigError, DataError) as error:
        print_text(str(error), error=True)
    else:
        if reply.strip():
            conversation.messages += [messages[-1], {"role": "assistant", "content": reply}]
            return
        what = "answered with white space only" if reply else "ended its answer at once"
        print_text(f"(the model has {what}: question and answer are left out of the conversation)", error=True)


def _command(conversation: ChatHistory, line: str) -> str:
    """Execute a line that begins with /, and return the text to print."""
    name, _, rest = line[1:].partition(" ")
    if name == "help":
        return HELP
    if name in ("clear", "new"):
        conversation.messages = []
        return "a new conversation"
    if name == "system":
        conversation.system = rest.strip() or None
        conversation.messages = []
        return f"a new conversation, {'under this system message' if conversation.system else 'without system message'}"
    if name == "save":
        return _save(conversation, rest.strip() or SAVED)
    near = difflib.get_close_matches(name, ("help", "clear", "new", "system", "save", *EXITS), n=1)
    hint = f" Did you mean /{near[0]}?" if near else ""
    return f"/{name} is not a command.{hint} /help lists them; a question that begins with / needs a space before it"


def _save(conversation: ChatHistory, path: str) -> str:
    if not conversation.messages:
        return "nothing has been said yet, so nothing is saved"
    messages = conversation.with_question("")[:-1]
    try:
        # Appended: data.train accepts a file of several conversations.
        file = Path(expanded(path))
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    except (OSError, ValueError, ConfigError) as error:
        return f"{path}: not saved: {getattr(error, 'strerror', None) or error}"
    return f"saved: {len(messages)} messages, a line of {file}"


def _ask() -> str | None:
    """Return the next question, with continued lines joined; None at the end of input."""
    lines = []
    prompt = "> "
    if sys.stdin.isatty():
        print_text("")
    try:
        while (line := input(prompt if sys.stdin.isatty() else "")).endswith("\\"):
            lines.append(line[:-1])
            prompt = ". "
    except EOFError:
        # Text typed before Ctrl-D is still asked.
        return "\n".join(lines) or None
    return "\n".join([*lines, line])


@contextmanager
def _editing() -> Iterator[None]:
    """Let `input` edit lines inside the block and recall earlier lines, if Python has readline and the input is
    a terminal.
    """
    if find_spec("readline") is None or not sys.stdin.isatty():
        yield
        return
    import readline

    with suppress(OSError):
        readline.read_history_file(HISTORY_FILE)
    try:
        yield
    finally:
        with suppress(OSError):
            readline.set_history_length(MAX_LINES)
            HISTORY_FILE.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(HISTORY_FILE, os.O_WRONLY | os.O_CREAT, 0o600))  # private to the user
            readline.write_history_file(HISTORY_FILE)
