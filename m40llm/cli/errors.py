"""Every failure as one line on stderr and an exit code: 1 failed, 2 wrong usage or input, 130 interrupted."""

from __future__ import annotations

import os
import sys
import traceback

import click


class CliError(ValueError):
    """Input that a command cannot use; the message is one line that names problem and remedy."""


class InterruptedByUserError(Exception):
    """Ctrl-C ended the command."""


def report(err: Exception, *, debug: bool) -> int:
    """Prints `err` as `error: …` on stderr and returns the exit code. `debug` adds the traceback above it."""
    if isinstance(err, BrokenPipeError):  # the reader has left (… | head): not worth a word
        _discard_stdout()
        return 1
    if debug:
        traceback.print_exception(err)
    if isinstance(err, (InterruptedByUserError, click.Abort)):
        _discard_stdout(flush=True)
        print("interrupted", file=sys.stderr)
        return 130
    if isinstance(err, click.UsageError):
        return _report_usage(err)
    if isinstance(err, OSError):
        _discard_stdout(flush=True)
    print(f"error: {one_line(_message(err))}", file=sys.stderr)
    return 2 if _is_wrong_input(err) else 1


def _is_wrong_input(err: Exception) -> bool:
    """Whether trying again as it was cannot help: the file, the prompt, an option or the chosen device is wrong."""
    from m40llm.device.errors import DeviceUnavailable  # not at the top: no command needs it until something fails

    # throughout the package, exceptions that are about what was given derive from ValueError
    ours = type(err).__module__.partition(".")[0] == "m40llm" and isinstance(err, ValueError)
    return ours or isinstance(err, (DeviceUnavailable, UnicodeDecodeError, FileNotFoundError, IsADirectoryError))


def _report_usage(err: click.UsageError) -> int:
    if isinstance(err, getattr(click.exceptions, "NoArgsIsHelpError", ())) and err.ctx is not None:
        click.echo(err.ctx.get_help(), err=True)  # `m40llm` alone
        return 2
    hint = f" (see {err.ctx.command_path} --help)" if err.ctx is not None else ""
    print(f"error: {one_line(err.format_message())}{hint}", file=sys.stderr)
    return 2


def _message(err: Exception) -> str:
    # every exception class of this package carries a line written for the user
    if type(err).__module__.partition(".")[0] == "m40llm":
        return str(err)
    if isinstance(err, click.ClickException):
        return err.format_message()
    if isinstance(err, MemoryError):
        return f"out of memory: use a smaller model or --ctx ({err})"
    if isinstance(err, UnicodeDecodeError):
        return f"the input is not UTF-8 ({err})"
    if isinstance(err, OSError):
        problem = err.strerror or str(err)
        return f"{os.fsdecode(err.filename)}: {problem}" if isinstance(err.filename, (str, bytes)) else problem
    return f"internal error: {type(err).__name__}: {err}; M40LLM_DEBUG=1 shows where"


def one_line(text: str) -> str:
    """`text` on one line, with control characters escaped: text from a file must not steer the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))


def _discard_stdout(*, flush: bool = False) -> None:
    """Points stdout at /dev/null, so that Python's own flush at exit does not fail a second time."""
    if flush:
        try:
            sys.stdout.flush()
            return
        except OSError:
            pass
    try:
        fd = sys.stdout.fileno()
    except (OSError, ValueError):  # stdout is not a file (a test's capture)
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)
