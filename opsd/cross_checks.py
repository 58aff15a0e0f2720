"""What only several groups of a config together can get wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opsd.config import Run


def check_together(run: Run) -> None:
    """What only several groups together can get wrong; fills `run.warnings` with what is merely odd."""
    if run.clipping.clip != run.clip:
        raise ValueError(
            f"clipping.clip={run.clipping.clip} beside clip={run.clip}: set the top-level clip={run.clipping.clip} alone."
        )
    if run.clipping.kind == "none" and run.clip is not None:
        instead = "clip=null or clipping=rescale" if run.loss.clippable else f"clip=null: loss={run.loss.name} is not clipped"
        raise ValueError(f"clip={run.clip} with clipping=none: nothing would be clipped; set {instead}.")
    check_loss(run)
    check_processes(run)
    run.warnings += run.prompt.check_teacher(run.teacher.kind)
    if run.train.batch % run.rollout.samples:
        raise ValueError(
            f"train.batch={run.train.batch} with rollout.samples={run.rollout.samples}: a step's rollouts are a whole number of "
            "problems; make train.batch a multiple of rollout.samples."
        )
    if run.clip is not None:
        entry, token = run.loss.largest()
        unit, bound = ("vocabulary entry", entry) if run.clipping.kind == "entry" else ("token", token)
        if run.clip >= bound:
            run.warnings.append(
                f"clip={run.clip} cannot bind: with loss={run.loss.name} a {unit} is at most {bound:.3g}; "
                f"set clip below that, or clip=null to say that nothing is clipped."
            )


def check_loss(run: Run) -> None:
    """Refuses a loss without what it reads, and what it would not read."""
    loss = run.loss.name
    if run.loss.has_teacher != run.teacher.exists:
        raise ValueError(
            f"loss={loss} with teacher=none: it pulls the student to a teacher; set teacher=initial, or loss=nll."
            if run.loss.has_teacher
            else f"teacher={run.teacher.name} with loss={loss}: it would never be read; set teacher=none."
        )
    if not run.loss.clippable and run.clipping.kind != "none":
        raise ValueError(
            f"clipping={run.clipping.name} with loss={loss}: its value is no divergence, so that capping it means nothing; set "
            "clipping=none clip=null."
        )
    if run.loss.needs_sampler and run.rollout.sampling is None:
        raise ValueError(
            f"rollout={run.rollout.name} with loss={loss}: it weighs tokens by the sampler's own probability, and these responses "
            "were not sampled; set a divergence, or a rollout that samples."
        )
    if run.prompt.analysis_len is not None and run.rollout.sampling is None:
        raise ValueError(
            f"prompt={run.prompt.name} with rollout={run.rollout.name}: the teacher's analysis would be sampled, and the rollout "
            "does not say how; set another prompt, or a rollout that samples."
        )
    if not run.loss.has_teacher and run.rollout.samples_anew:
        raise ValueError(
            f"loss={loss} with rollout={run.rollout.name}: the student would be trained on what it says by itself, right or wrong, "
            "which teaches nothing; set rollout=dataset or rollout=replay."
        )


def check_processes(run: Run) -> None:
    """Refuses what cannot be spread over the processes, and a sampler that does not fit the model."""
    together, processes = run.rollout.processes_together, run.launcher.processes
    if processes % together:
        raise ValueError(
            f"launcher.processes={processes} with rollout.tensor_parallel={together}: {together} processes sample as one, so that "
            "their number must be a multiple of it."
        )
    reason = run.rollout.refuses(adapters=run.model.has_adapters)
    if reason is not None:
        raise ValueError(reason)
