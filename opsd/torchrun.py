"""torchrun around a job of several processes, with its failures in plain words: `python -m opsd.torchrun OPTIONS RUN_DIR`.

The options are torchrun's own (`--standalone --nproc-per-node 4`; several nodes: `--nnodes`, `--rdzv-endpoint`, ...). What is new:
Ctrl-C and SIGTERM reach every rank as Ctrl-C and are waited for, so that the step at hand is finished and saved; a second one ends
all within `SHUTDOWN_S`, also those that wait for a rank that is stuck; when a rank fails
the others are ended within `SHUTDOWN_S`; and a rank that could not speak for itself any more is spoken for in result.json.
Plain `torchrun OPTIONS -m opsd.run RUN_DIR` works too, without these.
"""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from opsd.endings import INTERRUPTED, LOST, PARTED, REFUSED, RESULT, fail
from opsd.files import write_json

SEPARATED = "the processes lost their connection to each other"
SHUTDOWN_S = 10  # what the other ranks of one that failed are given to close their records


@dataclass(kw_only=True, slots=True)
class Ending:
    """How the ranks ended together."""

    status: int  # 0, 1 (failed), REFUSED or INTERRUPTED
    message: str | None  # what to say for a rank that could not; None: all has been said


def torchrun(options: list[str], command: list[str]) -> Ending:
    """Runs `command` once a rank, to the end of all of them.

    Args:
        options: torchrun's own.
        command: a script, or `-m` and a module, with its arguments.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it reports each failure in a page of its own
    came = pass_on()
    with tempfile.TemporaryDirectory(prefix="opsd-torchrun-") as logs:  # where it keeps what it would never remove
        own = ["--shutdown-timeout", str(SHUTDOWN_S), "--signals-to-handle", "SIGQUIT", "--log-dir", logs]
        try:
            run.main([*own, *options, *command])
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            return ending(codes, interrupted=bool(came))
    return Ending(status=0, message=None)


def pass_on() -> list[int]:
    """From now on Ctrl-C, SIGTERM and the end of the terminal go to the ranks; gives a list of those that came."""
    import psutil

    came: list[int] = []

    def send(number: int) -> None:
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    def handler(number: int, frame: object) -> None:
        came.append(number)
        send(signal.SIGINT)
        if len(came) == 2:  # a rank in a collective hears nothing while it waits for another
            patience = threading.Timer(SHUTDOWN_S, send, [signal.SIGKILL])
            patience.daemon = True
            patience.start()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)
    return came


def ending(codes: dict[int, int], *, interrupted: bool) -> Ending:
    """What the exit codes of the ranks that failed say.

    Args:
        codes: negative for a rank that a signal killed.
    """
    if REFUSED in codes.values():
        return Ending(status=REFUSED, message=None)
    if interrupted:
        return Ending(status=INTERRUPTED, message=None)
    if 1 in codes.values():  # it has said why; what others say follows from it
        return Ending(status=1, message=None)
    if INTERRUPTED in codes.values():
        return Ending(status=INTERRUPTED, message=None)
    killed = {rank: -code for rank, code in codes.items() if code < 0 and -code != signal.SIGTERM}
    if killed:
        rank, number = min(killed.items())
        name = signal.Signals(number).name
        hint = " (as the system does when memory runs out)" if number == signal.SIGKILL else ""
        return Ending(status=1, message=f"process {rank} was killed by {name}{hint}")
    if set(codes.values()) == {LOST}:
        return Ending(status=1, message=SEPARATED)
    return Ending(status=1, message=None)


def main(argv: list[str]) -> int:
    """The job of a run directory on several ranks; the exit status."""
    from opsd import checkpoints

    *options, run_dir = argv
    end = torchrun(options, ["-m", "opsd.run", run_dir])
    result = Path(run_dir) / RESULT
    if end.message is not None and not result.exists():
        parted = Path(run_dir) / PARTED
        why = f" ({parted.read_text()})" if end.message == SEPARATED and parted.exists() else ""
        message = f"{end.message}{why}; {checkpoints.go_on(Path(run_dir))}"
        fail(message)
        write_json(result, {"status": "failed", "message": message})
    return end.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
