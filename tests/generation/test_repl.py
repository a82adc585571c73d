"""A conversation in the terminal: commands, editing, history, Ctrl-C, and what is sent to the model."""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from launched import own_terminal

from sftkit.data.reading import readers, rows
from sftkit.errors import DataError
from sftkit.generation import repl
from sftkit.generation.repl import parse

ROOT = Path(__file__).parents[2]
HI, YES = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    """Lines -> (messages of each question, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def talk(*lines: str, system: str | None = None, said: str = "Yes."):
        given, asked = iter(lines), []

        def typed(_prompt: str) -> str:
            try:
                return next(given)
            except StopIteration:
                raise EOFError from None

        def stream(messages) -> Iterator[str]:
            if messages[-1]["content"] == "bad":
                raise DataError("prompt: refused")
            asked.append(messages)
            yield from said

        monkeypatch.setattr("builtins.input", typed)
        repl.converse(stream, system)
        return asked, *capsys.readouterr()

    return talk


def test_questions_and_answers_go_into_the_next_question(talk) -> None:
    asked, out, _ = talk("Hi?", "", "   ", " /not a command ", "bad", "more", system="Be brief.")
    first = [{"role": "system", "content": "Be brief."}, HI]
    second = [*first, YES, {"role": "user", "content": "/not a command"}]
    assert asked == [first, second, [*second, YES, {"role": "user", "content": "more"}]]
    assert out == "Yes.\n" * 3


@pytest.mark.parametrize("word", ["exit", "quit", "bye", "/exit", "/quit", "/bye", " exit "])
def test_an_exit_word_ends(talk, word: str) -> None:
    assert talk("Hi?", word, "never")[0] == [[HI]]


def test_what_a_model_says_cannot_steer_the_terminal(talk) -> None:
    assert talk("Hi?", said="\x1b[31m\u202e")[1] == "\\x1b[31m\\u202e\n"


@pytest.mark.parametrize(
    ("said", "told"), [("", "ended its answer at once"), ("\n" * 256, "answered with white space only")]
)
def test_an_empty_answer_is_told_as_one_and_is_not_kept(talk, tmp_path: Path, said: str, told: str) -> None:
    asked, out, err = talk("Hi?", "Yes?", "/save", said=said)
    left_out = f"(the model has {told}: question and answer are left out of the conversation)\n"
    assert (out, err) == ("\n" * 2, left_out * 2 + "nothing has been said yet, so nothing is saved\n")
    assert asked == [[HI], [{"role": "user", "content": "Yes?"}]]
    assert not (tmp_path / repl.SAVED).exists()


def test_white_space_is_shown_where_something_comes_after_it(talk) -> None:
    asked, out, _ = talk("Hi?", "Yes?", said=" a\n\nb \n\n")
    assert out == " a\n\nb\n" * 2
    assert asked[1][1]["content"] == " a\n\nb \n\n"


def test_clear_and_system_start_over(talk) -> None:
    asked, _, told = talk(
        "Hi?", "/clear", "Hi?", "/system Be brief.", "Hi?", "/clear", "Hi?", "/system", "Hi?", "/new", "Hi?"
    )
    brief = [{"role": "system", "content": "Be brief."}, HI]
    assert asked == [[HI], [HI], brief, brief, [HI], [HI]]
    assert "under this system message" in told
    assert "without system message" in told


def test_help_lists_every_command_and_a_wrong_one_names_its_neighbour(talk) -> None:
    _, _, told = talk("/help", "/hlep", "/etc/passwd")
    assert told.startswith(repl.HELP)
    for command in ("/help", "/clear", "/new", "/system", "/save", "/exit", "quit", "bye", "Ctrl-D", "Ctrl-C"):
        assert command in repl.HELP
    assert "/hlep is not a command. Did you mean /help? /help lists them" in told
    assert "needs a space before it" in told


def test_a_line_that_ends_with_a_backslash_goes_on(talk) -> None:
    assert talk("Sort:\\", "3,1\\", " 2", "Hi?\\")[0][0] == [{"role": "user", "content": "Sort:\n3,1\n 2"}]


def test_a_saved_conversation_is_a_record_to_learn_from(talk, tmp_path: Path) -> None:
    _, _, told = talk(
        "/save", "Hi?", "/save", "/clear", "Hi?", "/save mine.jsonl", "/save no/folder.jsonl", system="Brief."
    )
    assert "nothing has been said yet" in told
    assert "saved: 3 messages, a line of chat.jsonl" in told
    assert "no/folder.jsonl: not saved: No such file or directory" in told
    record = {"messages": [{"role": "system", "content": "Brief."}, HI, YES]}
    assert json.loads((tmp_path / "chat.jsonl").read_text()) == record
    (raw,) = readers.rows_of(tmp_path / "mine.jsonl")
    assert rows.parse(raw).messages == record["messages"]
    talk("Hi?", "/save")
    assert len((tmp_path / "chat.jsonl").read_text().splitlines()) == 2


# ---- on a terminal ---------------------------------------------------------------------------------------------------

SCRIPT = """
import time
from sftkit.runtime.script import script

def stream(messages):
    yield f"<{messages[-1]['content']}, {len(messages)}>"
    while messages[-1]["content"] == "slow":
        time.sleep(0.02)

def main():
    from sftkit.generation.repl import converse
    converse(stream, None)

script(main)
"""


class Typist:
    """Somebody at a terminal on which SCRIPT runs."""

    def __init__(self, folder: Path) -> None:
        self.reads, device = os.openpty()
        self.device = device
        self.before = termios.tcgetattr(device)
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm"}
        streams = {"stdin": device, "stdout": device, "stderr": device}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            cwd=folder,
            env=env,
            start_new_session=True,
            preexec_fn=own_terminal,
            **streams,
        )
        self.text = ""
        self.until("> ")

    def until(self, text: str) -> None:
        """Read until this is on the screen, behind what was waited for before."""
        deadline = time.monotonic() + 60
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            if select.select([self.reads], [], [], 0.1)[0]:
                self.text += os.read(self.reads, 1 << 16).decode()
        self.text = self.text.partition(text)[2]

    def type(self, keys: str) -> None:
        os.write(self.reads, keys.encode())

    def end(self, again: Callable[[], object] = lambda: None) -> int:
        """Wait. `again` every second: of a signal between the prompt and readline's own waiting Python hears with the next one."""
        deadline = time.monotonic() + 60
        while (code := self.process.poll()) is None:
            assert time.monotonic() < deadline, self.text
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=1)
                continue
            again()
        assert termios.tcgetattr(self.device) == self.before
        for descriptor in (self.reads, self.device):
            os.close(descriptor)
        return code


def test_lines_are_edited_and_brought_back_also_those_of_earlier_times(tmp_path: Path) -> None:
    typist = Typist(tmp_path)
    typist.type("ac\x1b[Db\r")
    typist.until("<abc, 1>")
    typist.until("> ")
    typist.type("\x1b[A\r")
    typist.until("<abc, 3>")
    typist.until("> ")
    typist.type("\x04")
    assert typist.end() == 0
    history = tmp_path / repl.HISTORY_FILE
    assert "abc" in history.read_text().splitlines()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    typist = Typist(tmp_path)
    typist.type("\x1b[A\r")
    typist.until("<abc, 1>")
    typist.until("> ")
    typist.type("exit\r")
    assert typist.end() == 0


def test_ctrl_c_ends_an_answer_and_at_the_prompt_the_conversation(tmp_path: Path) -> None:
    typist = Typist(tmp_path)
    typist.type("slow\r")
    typist.until("<slow, 1>")
    typist.type("\x03")
    typist.until("left out of the conversation")
    typist.until("> ")
    typist.type("Hi?\r")
    typist.until("<Hi?, 1>")
    typist.until("> ")
    typist.type("\x03")
    assert typist.end(partial(typist.type, "\x03")) == 130


def test_a_signal_at_the_prompt_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    typist = Typist(tmp_path)
    typist.process.send_signal(signal.SIGTERM)
    assert typist.end(partial(typist.process.send_signal, signal.SIGTERM)) == 128 + signal.SIGTERM


# ---- flags -----------------------------------------------------------------------------------------------------------


def test_flags_are_checked_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for words, text in (
        (("--temperature", "-1"), "must be 0 or more"),
        (("--temperature", "nan"), "must be 0 or more"),
        (("--temperature", "1", "--top-p", "0"), "more than 0 and at most 1"),
        (("--top-p", "0.9"), "--top-p needs --temperature"),
        (("--max-new-tokens", "0"), "must be 1 or more"),
        (("--prompt", " "), "--prompt has no question in it"),
        (("--template-arg", "enable_thinking"), "expected NAME=VALUE, such as enable_thinking=false"),
        (("--template-arg", "a=[1]"), "expected NAME=VALUE"),
    ):
        monkeypatch.setattr(sys, "argv", ["chat.py", *words])
        with pytest.raises(SystemExit) as ended:
            parse("")
        assert ended.value.code == 2
        assert text in capsys.readouterr().err
    words = [
        "--temperature",
        "0.7",
        "--top-p",
        "0.8",
        "--template-arg",
        "enable_thinking=false",
        "--template-arg",
        "e=high",
    ]
    monkeypatch.setattr(sys, "argv", ["chat.py", *words])
    args = parse("")
    assert (args.sampling.temperature, args.sampling.top_p) == (0.7, 0.8)
    assert args.template_args == {"enable_thinking": False, "e": "high"}
    monkeypatch.setattr(sys, "argv", ["chat.py"])
    assert parse("").template_args is None
