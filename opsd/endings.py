"""How a job ends: interrupted, failed with one message, or finished; result.json says which."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from opsd.ranks import Ranks

REFUSED, INTERRUPTED = 2, 130  # exit status of a command that starts nothing, and after Ctrl-C or SIGTERM
LOST = 3  # of a rank that ends because another one has
RESULT = "result.json"
PARTED = "parted"  # what a process said that lost its connection to the others
FAILED = "failed"  # there from the moment when a process of the job knows that it has failed


class NonFinite(RuntimeError):
    """A loss or gradient that is not a number: the step was not taken."""


class EngineFailure(RuntimeError):
    """A library that samples or trains is missing, does not start, or died."""


# What a user can mend: told in one message. Anything else is a defect of ours and keeps its traceback.
EXPECTED = (ValueError, OSError, NonFinite, EngineFailure, FloatingPointError, MemoryError)


class Interrupt:
    """Ctrl-C, SIGTERM or a closed terminal: the step at hand is finished and saved first.

    A second one, one with nothing at stake, or one because another rank has failed, ends at once.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, run_dir: Path, ranks: Ranks) -> None:
        self.run_dir, self.ranks = run_dir, ranks
        self.requested = False
        self.at_once = True  # what is going on can be dropped
        for number in self.NUMBERS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.requested or self.at_once or has_failed(self.run_dir):
            raise KeyboardInterrupt
        self.requested = True
        if self.ranks.first and (self.ranks.size == 1 or number != signal.SIGTERM):  # torchrun's, where another rank was killed
            fail("interrupted: finishing this step and saving a checkpoint (once more to stop at once)")

    def ignore(self) -> None:
        """From now on, while the record is closed."""
        for number in self.NUMBERS:
            signal.signal(number, signal.SIG_IGN)


def has_failed(run_dir: Path) -> bool:
    """Whether a rank of this job has the word on why it failed."""
    return (run_dir / FAILED).exists()


def first_to_fail(run_dir: Path) -> bool:
    """Claims the word on why the job failed; the failures of other ranks follow from it."""
    try:
        (run_dir / FAILED).open("x").close()
    except FileExistsError:
        return False
    except OSError:  # the disk is full, or the directory gone: better told twice than not at all
        return True
    return True


@contextmanager
def only_job(run_dir: Path) -> Iterator[None]:
    """Holds the run directory for this process: two jobs in one would spoil it. The system lets go of it however the process ends.

    Raises:
        ValueError: another job holds it.
    """
    with (run_dir / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ValueError(f"{run_dir}: is being run by {file.read().strip()}; wait for it, or stop it first.") from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def fail(message: str) -> None:
    """One message on standard error, if anybody is there to read it."""
    with suppress(OSError):
        print(f"error: {message}", file=sys.stderr, flush=True)


def attempt(act: Callable[[], object]) -> None:
    """Does what a failing run still owes; a second failure is told and does not hide the first."""
    try:
        act()
    except Exception as error:
        fail(f"and while ending: {error}")


def explain(error: Exception) -> str:
    """The message of a failure; the traceback of an unexpected one goes to standard error."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which only a process that has imported torch can raise
        return f"{error}; lower train.micro_tokens, train.chunk_tokens or rollout.cache_tokens (resume= takes them)"
    if "can't allocate memory" in str(error):  # torch's allocator on the CPU
        return f"{str(error).splitlines()[0]}; lower train.micro_tokens, train.chunk_tokens or rollout.cache_tokens"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename or 'the run directory'}: cannot be written ({error.strerror}); free space there"
    if not isinstance(error, EXPECTED):
        traceback.print_exception(error)
    return str(error) or type(error).__name__
