"""Conversations at the terminal and of lines from a pipe."""

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
import tinyrow
from kvgate.serving import generate
from test_generate import SLOW, context_of

LINES = ("--chat", "--max-tokens", "3")


def said(bundle, lines, *words):
    ran = tinyrow.generate(bundle, *LINES, *words, input=lines)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, ran.stderr.splitlines()


@pytest.fixture(scope="module")
def alone(bundle):
    """The answer to one turn, by a message before it."""
    return lambda turn, *words: tinyrow.generate(bundle, turn, "--max-tokens", "3", *words).stdout


def test_lines_from_a_pipe_are_turns(bundle, alone):
    out, told = said(bundle, "Hi\n\n  \n/reset\nHi\n/reset\nYo\n/quit\nnever\n")
    assert out == alone("Hi") * 2 + alone("Yo") and told == []


def test_the_history_goes_with_each_turn(rows, bundle, alone):
    """The model gets what was said before: as a chat of all turns is answered."""
    from kvgate.serving.bundled import Bundle
    from kvgate.serving.context import Options
    from test_generate import generated

    out, _ = said(bundle, "a\nb\n", "--bundle", str(bundle))
    text, context = Bundle(bundle).text(), context_of(rows.graph)
    first = out.split("\n")[0]
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "b"},
    ]
    ids = text.chat(turns)
    if len(ids) <= tinyrow.CAPACITY:
        wanted = text.decode(generated(context, ids, Options(max_tokens=3)).tokens)
        assert out == first + "\n" + wanted + "\n"
    else:
        assert out == first + "\n"


def test_a_prompt_on_the_command_line_is_the_first_turn(bundle, alone):
    assert said(bundle, "/reset\nYo\n", "Hi")[0] == alone("Hi") + alone("Yo")


def test_a_system_message(bundle, alone, tmp_path):
    more = ("--max-tokens", "20")  # with the message there is no room for so many
    bare, wanted = alone("Hi", *more), alone("Hi", "--system", "S ü", *more)
    assert wanted != bare
    assert said(bundle, "/system S ü\nHi\n/system\nHi\n", *more)[0] == wanted + bare
    (tmp_path / "system.txt").write_text("S ü\n", encoding="utf-8")
    file = ("--system-file", str(tmp_path / "system.txt"), *more)
    assert said(bundle, "Hi\n/reset\nHi\n", *file)[0] == wanted * 2
    assert alone("Hi", *file) == wanted


def test_a_full_conversation_says_so_in_one_line_and_goes_on_after_reset(bundle, alone):
    out, told = said(bundle, "Hi\n" + "x" * 60 + "\n/reset\nHi\n")
    assert out == alone("Hi") * 2
    (line,) = told
    assert line.startswith("the conversation is full: got ") and line.endswith("allowed: 48; /reset starts over")
    ran = tinyrow.generate(bundle, "--chat", input="Hi\n")
    assert ran.stderr == "the conversation is full: 48 tokens; /reset starts over\n"


def test_help_and_what_is_no_command(bundle):
    out, told = said(bundle, "/help\n/nonsense x\n")
    assert out == "" and "/reset" in told[0] and told[1].startswith("/nonsense: unknown, allowed: /reset")


def test_what_is_no_utf_8_is_one_line(bundle):
    command = [sys.executable, "-I", str(bundle / "generate.py"), "--chat"]
    ran = subprocess.run(command, input=b"\xff\xfe\n", capture_output=True, env=tinyrow.bare())
    assert (ran.returncode, ran.stderr) == (1, b"generate: stdin: got bytes that are no UTF-8\n")


def test_stop_strings_end_an_answer(rows, bundle):
    whole = rows.trace["text"]
    ran = tinyrow.generate(bundle, "Hi", "--max-tokens", "12", "--stop", "never", "--stop", whole[4:6])
    assert ran.stdout == whole[: whole.find(whole[4:6])] + "\n" and "(stop)" in ran.stderr


def test_options_that_do_not_go_together(bundle, tmp_path, capsys):
    for words, wanted in (
        (["--ids", "1", "--chat"], "--chat and --stop are for text"),
        (["--ids", "1", "--stop", "x"], "--chat and --stop are for text"),
        (["--system", "a", "--system-file", "b"], "got --system and --system-file"),
        (["Hi", "--stop", ""], "--stop: got an empty text"),
        (["Hi", "--threads", "0"], "--threads: got '0', allowed: 1 or more"),
    ):
        with pytest.raises(SystemExit) as caught:
            generate.main(words, bundle)
        assert caught.value.code == 2 and wanted in capsys.readouterr().err.splitlines()[-1]
    ran = tinyrow.generate(bundle, "Hi", "--system-file", str(tmp_path / "none"))
    assert (ran.returncode, ran.stderr) == (1, f"generate: --system-file: {tmp_path}/none: No such file or directory\n")


class Terminal:
    """The program at a terminal, its steps slowed."""

    def __init__(self, bundle, seconds=0.03):
        self.main, side = pty.openpty()
        code = SLOW.format(more="pass", seconds=seconds).replace('"Hi"', '"--chat"')
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=bundle, stdin=side, stdout=side, stderr=side,
            env=tinyrow.bare() | {"PYTHONPATH": str(bundle), "PYTHONDONTWRITEBYTECODE": "1", "TERM": "dumb"},
            preexec_fn=tinyrow.interruptible,
        )  # fmt: skip
        os.close(side)
        self.seen = ""

    def until(self, what, count=1):
        """Everything up to where `what` was seen `count` times."""
        end = time.monotonic() + 30
        while self.seen.count(what) < count:
            assert time.monotonic() < end and self.process.poll() is None, self.seen
            if select.select([self.main], [], [], 0.2)[0]:
                self.seen += os.read(self.main, 4096).decode(errors="replace")
        found, self.seen = self.seen, ""
        return found

    def type(self, text):
        os.write(self.main, text.encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.main)


@pytest.fixture
def terminal(bundle):
    made = Terminal(bundle)
    yield made
    made.close()


def test_at_a_terminal_ctrl_c_ends_the_answer_and_ctrl_d_the_program(terminal):
    assert "/reset" in terminal.until("> ")
    terminal.type("Hi\n")
    terminal.until("Hi\r\n")
    time.sleep(1.0)  # past the prompt's 21 steps, before the answer's 28
    terminal.process.send_signal(signal.SIGINT)
    found = terminal.until("> ")
    assert "Traceback" not in found and "full" not in found  # cut before its end
    time.sleep(0.5)  # the line editor looks at signals once it waits
    terminal.process.send_signal(signal.SIGINT)  # at the prompt: another prompt
    terminal.until("> ")
    terminal.type("/reset\n")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(20) == 0


def test_a_line_can_be_edited(terminal):
    """The prompt is the line editor's, on the user's terminal."""
    terminal.until("> ")
    terminal.type("/bogus\x7f\x7f\x7f\x7f\x7fquit\n")
    assert terminal.process.wait(20) == 0


def test_ctrl_c_in_lines_of_a_pipe_ends_the_answer_then_the_program(bundle):
    code = SLOW.format(more="pass", seconds=0.05).replace('"Hi"', '"--chat"')
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=bundle, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, preexec_fn=tinyrow.interruptible,
        env=tinyrow.bare() | {"PYTHONPATH": str(bundle), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    process.stdin.write(b"Hi\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    while process.stdout.read(1) != b"\n":
        pass
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.wait(20)  # before its input ends, too
    out, err = process.communicate()
    assert (process.returncode, out) == (130, b"") and b"Traceback" not in err, err


@pytest.mark.parametrize("when", ["import numpy", "import onnxruntime", "from tokenizers import"])
def test_ctrl_c_while_it_loads_is_clean(bundle, when):
    """Sent from inside the import, at a place where packages are known to turn exceptions into others."""
    code = f"""
import builtins, os, signal, sys
real = builtins.__import__
def spied(name, *rest, **more):
    if name == {when.split()[1]!r}:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            for _ in range(1000): pass
        except KeyboardInterrupt:
            raise ImportError("numpy failed to import")
    return real(name, *rest, **more)
builtins.__import__ = spied
sys.argv = ["generate.py", "Hi"]
exec(open("generate.py").read().replace("__file__", "'generate.py'"))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=bundle, capture_output=True, text=True, timeout=60,
        env=tinyrow.bare() | {"PYTHONDONTWRITEBYTECODE": "1"}, preexec_fn=tinyrow.interruptible,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (130, "") and ran.stderr.strip() == "", ran
