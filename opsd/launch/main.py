"""`python launch.py`: compose, check, create, dispatch, report. Exit status 0, 1 (a run failed), 2 (refused), 130 (interrupted)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from opsd.endings import INTERRUPTED, REFUSED
from opsd.launch.errors import of_system
from opsd.launch.help import HELP_FLAGS, help_text

if TYPE_CHECKING:
    from opsd.config import Run
    from opsd.launch.compose import Point
    from opsd.launch.local import Outcome
    from opsd.launch.plan import Job

EXAMPLES = """\
  python launch.py                                          the embedded model on arithmetic, about 100 steps
  python launch.py debug=smoke                              the same in seconds
  python launch.py loss=jsd clip=0.05 rollout.max_len=1536
  python launch.py -m loss=forward_kl,jsd seed=0,1,2        six runs, a table at the end
  python launch.py sweep=clipping_grid
  python launch.py experiment=gsm8k_smollm2 data.path=gsm8k.jsonl eval.path=aime24.jsonl
  python launch.py do=check loss=jsd                        compose, validate, print prompts, lengths, memory; start nothing
  python launch.py resume=outputs/RUN train.steps=200"""


def main(conf: Path, argv: list[str]) -> int:
    """The whole command; the exit status.

    Args:
        conf: the directory of config groups, config.yaml in it.
        argv: the command line without the program's name.
    """
    if set(HELP_FLAGS) & set(argv):
        print(help_text(conf, "config", argv, script="launch.py", examples=EXAMPLES))
        return 0
    try:
        jobs, swept = prepare(conf, argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"error: {of_system(error, argv)}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("interrupted: nothing was started", file=sys.stderr)
        return INTERRUPTED
    if not jobs:
        return 0
    from opsd.launch.local import dispatch
    from opsd.launch.table import report

    outcomes = dispatch(jobs)
    report(jobs, outcomes, swept=swept)
    return exit_status(outcomes)


def prepare(conf: Path, argv: list[str]) -> tuple[list[Job], bool]:
    """The jobs to start, their directories made, and whether they are a sweep's. None where nothing is to be started.

    Raises:
        ValueError: the command is refused; nothing is left behind.
    """
    from opsd.launch import resume
    from opsd.launch.compose import compose

    argv, changes = resume.split(argv)
    points = compose(conf, "config", argv)
    if not points:
        return [], False
    from opsd.config import Do
    from opsd.launch import plan

    if any(point.cfg.resume is not None for point in points):
        job, cfg = resume.resumed(points, changes)
        points[0].cfg = cfg
        warn([job.run.warnings])
        if job.run.do is not Do.run:
            show(points, [job.run_dir], [job.run])
            check(points, [job.run])
            return [], False
        resume.apply(job, cfg)
        return [job], False
    runs = plan.check_points(points)
    warn([run.warnings for run in runs])
    if runs[0].do is not Do.run:
        show(points, plan.preview(points, runs), runs)
        check(points, runs)
        return [], False
    jobs = plan.create(points, runs, argv=argv)
    if not points[0].swept:
        show(points, [], runs)
    return jobs, points[0].swept


def show(points: list[Point], run_dirs: list[Path], runs: list[Run]) -> None:
    """What `do=check` and `do=dry_run` print; the config of a single run that is about to start."""
    from rich.console import Console

    from opsd.config import Do
    from opsd.launch import local, plan

    if runs[0].do is Do.dry_run:
        for run_dir, run in zip(run_dirs, runs, strict=True):
            print(f"{run_dir}\n  {' '.join(local.command(run_dir, processes=run.launcher.processes))}")
        return
    if points[0].swept:
        print("\n".join(" ".join(point.overrides) for point in points))
    else:
        Console(highlight=False, soft_wrap=True).print(plan.resolved_tree(points[0].cfg))


def check(points: list[Point], runs: list[Run]) -> None:
    """What `do=check` adds: how the run, of a sweep the first, will go. Raises ValueError where it cannot."""
    from opsd.config import Do

    if runs[0].do is not Do.check:
        return
    from opsd.preflight.report import refuse, report

    if points[0].swept:
        print(f"\nthe first of {len(points)} points: {' '.join(points[0].overrides)}")
    report(runs[0])
    for run in runs[1:]:
        refuse(run)
    print("ok")


def warn(warnings: list[list[str]]) -> None:
    for warning in dict.fromkeys(text for texts in warnings for text in texts):
        print(f"warning: {warning}", file=sys.stderr)


def exit_status(outcomes: list[Outcome]) -> int:
    if any(outcome.status == "interrupted" for outcome in outcomes):
        return INTERRUPTED
    return 0 if all(outcome.status == "finished" for outcome in outcomes) else 1
