"""The token view: `python -m opsd.view RUN_DIR` writes one HTML page on which saved rollouts are read token by token.

The rollouts of a step are scored anew by the weights and the teacher of a checkpoint, with the run's own loss and clipping. The
checkpoint before the step gives the numbers that the step was trained on (dropout aside): the tokens' values, weighted, add up to
its `train/objective`. Exit status 0, or 2 with one message.

Shapes: T response tokens, V vocabulary entries, K kept entries.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsd import batching, checkpoints, config, records
from opsd.config import Run
from opsd.endings import REFUSED, fail
from opsd.files import write_whole
from opsd.ranks import ALONE
from opsd.scorers import Scorers, load, restore, with_analyses
from opsd.stream import digest
from opsd.tracking import OBJECTIVE
from opsd.types import MicroBatch, Prompt, Rollout

if TYPE_CHECKING:
    from torch import Tensor


PAGE = Path(__file__).parent / "assets" / "view.html"
DATA = "/*DATA*/"  # where the page's script expects its data
TOP = 5  # most likely entries shown, of each side
TEACHERS = ("teacher_entropy", "teacher_logp", "agreement", "clipped_mass")  # columns that mean nothing without a teacher


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m opsd.view", description="Rollouts of a run, token by token, as an HTML page.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory that a launch printed")
    parser.add_argument("--step", type=int, help="whose rollouts; the latest that follows a kept checkpoint, unless given")
    parser.add_argument("--rollouts", type=int, default=8, help="how many of the step's, from the first (8)")
    parser.add_argument("--out", type=Path, help="the page; RUN_DIR/view_step_N.html unless given")
    given = parser.parse_args(argv)
    run_dir = given.run_dir.absolute()
    try:
        run = config.load(run_dir)
        if given.rollouts < 1:
            raise ValueError(f"--rollouts {given.rollouts}: must be at least 1.")
        checkpoint, step = choose(run_dir, given.step)
        out = given.out or run_dir / f"view_{checkpoints.step_name(step)}.html"
        if out.is_dir():
            raise ValueError(f"--out {out}: is a directory; give the page's own name in it.")
        if not out.parent.is_dir():
            raise ValueError(f"--out {out}: there is no directory {out.parent}; make it first.")
        data = describe(run, run_dir, checkpoint, step, count=given.rollouts)
        write_whole(out, page(data))
    except (ValueError, OSError) as error:
        fail(str(error))
        return REFUSED
    print(f"{data['note']}\n{out}")
    return 0


def choose(run_dir: Path, step: int | None) -> tuple[Path, int]:
    """The checkpoint that scores and the step whose rollouts it scores: the two that belong together, where both were kept.

    Raises:
        ValueError: there is no checkpoint, or there are no rollouts (of that step).
    """
    found = checkpoints.complete(run_dir)
    if not found:
        raise ValueError(f"{run_dir}: has no checkpoint; the first is saved once the run has started, wait for it.")
    saved = sorted(
        checkpoints.step_of(path.with_suffix("")) for path in records.file_of(run_dir, 0).parent.glob("step_*.safetensors")
    )
    if not saved:
        raise ValueError(f"{run_dir}: has no saved rollouts (rollouts/step_*.safetensors); they come with the first step.")
    if step is None:
        on_policy = [path for path in found if checkpoints.step_of(path) + 1 in saved]
        if on_policy:
            return on_policy[-1], checkpoints.step_of(on_policy[-1]) + 1
        last = checkpoints.step_of(found[-1])
        return found[-1], min(saved, key=lambda at: abs(at - 1 - last))
    if step not in saved:
        raise ValueError(f"--step {step}: no rollouts of it are saved in {run_dir}; there are those of {saved[0]} to {saved[-1]}.")
    return min(found, key=lambda path: abs(checkpoints.step_of(path) - (step - 1))), step


def build(run: Run, checkpoint: Path) -> Scorers:
    """The run's parts as they were at a checkpoint.

    Raises:
        ValueError: the problems are no longer those that were trained on.
    """
    scorers = load(run, ALONE)
    if digest(scorers.data.problems) != checkpoints.read_progress(checkpoint).problems:
        raise ValueError(
            f"data={run.data.name}: its problems are no longer those that the run was trained on; put back the data that it read."
        )
    restore(scorers, checkpoint)
    scorers.objective.want_cosine = run.clip is not None
    return scorers


def describe(run: Run, run_dir: Path, checkpoint: Path, step: int, *, count: int) -> dict[str, Any]:
    """What the page shows, as plain values. Opens with `note`, which says what was scored by what."""
    from opsd.evaluation.answers import final_box, is_right
    from opsd.scoring import evaluating

    recorded = records.load(run_dir, step)
    parts = build(run, checkpoint)
    prompts = prompts_of(parts, recorded, step)
    tokenizer = parts.loaded.tokenizer
    rollouts = [
        Rollout(prompt=prompt, response=record.response, text=str(tokenizer.decode(record.response.token_ids)))
        for prompt, record in zip(prompts, recorded, strict=True)
    ]
    weights = batching.token_weights(rollouts, run.train.reduction)[:count]
    shown = rollouts[:count]
    with evaluating(parts.loaded.model):
        scored: dict[int, dict[str, Any]] = {}
        for rows in batching.cut(shown, micro_tokens=run.train.micro_tokens):
            batch = batching.collate([shown[row] for row in rows], [weights[row] for row in rows], parts.loaded.device)
            scored |= dict(zip(rows, score(parts, batch, [len(shown[row].response.token_ids) for row in rows]), strict=True))
    cards = []
    for row, (rollout, weight) in enumerate(zip(shown, weights, strict=True)):
        problem, box = rollout.prompt.problem, final_box(rollout.text)
        cards.append(
            {
                "problem_id": problem.id,
                "problem": problem.text,
                "answer": problem.answer,
                "box": box,
                "correct": None if problem.answer is None else is_right(box, problem.answer),
                "finish": rollout.response.finish_reason.value,
                "weight": weight,
                "ids": rollout.response.token_ids,
                "student_prompt": tokenizer.decode(rollout.prompt.student_ids),
                "teacher_prompt": None if rollout.prompt.teacher_ids is None else tokenizer.decode(rollout.prompt.teacher_ids),
                "shortened": rollout.prompt.shortened,
                **scored[row],
            }
        )
    used = {token for card in cards for ids in (card["ids"], *card["top"]) for token in ids}
    at, note = checkpoints.step_of(checkpoint), f"rollouts of step {step}, {len(shown)} of {len(rollouts)}"
    return {
        "note": f"{note}, scored by {checkpoint.name}"
        + ("" if at == step - 1 else f": NOT the weights they were trained under, which were those after step {step - 1}"),
        "run": run_dir.name,
        "step": step,
        "loss": run.loss.name,
        "clipping": run.clipping.name,
        "clip": run.clip,
        "temperature": run.loss_temperature,
        "teacher": run.teacher.name if run.teacher.exists else None,
        "measures": list(run.loss.measures),
        "logged": logged(run_dir, step),
        "vocabulary": {token: tokenizer.decode([token]) for token in sorted(used)},
        "markers": sorted(used & set(tokenizer.added_tokens_decoder)),
        "rollouts": cards,
    }


def prompts_of(parts: Scorers, recorded: list[records.Record], step: int) -> list[Prompt]:
    """The prompts of a step's rollouts, rendered anew: only the student's were saved.

    Raises:
        ValueError: the model's tokenizer or template no longer gives what the student read.
    """
    problems = {problem.id: problem for pool in parts.stream.pools for problem in pool.problems}
    prompts = []
    for record in recorded:
        problem = problems.get(record.problem_id)
        prompt = None if problem is None else parts.stream.render(problem)
        if prompt is None or prompt.student_ids != record.student_ids:
            raise ValueError(
                f"model={parts.run.model.name}: no longer gives the problem {record.problem_id} as the run's student read it; put "
                "back the tokenizer and chat template that the run was trained with."
            )
        prompts.append(prompt)
    return with_analyses(parts, prompts, step)[0]


def score(parts: Scorers, batch: MicroBatch, lengths: list[int]) -> list[dict[str, Any]]:
    """For each row of a micro-batch the columns of its tokens, and the most likely entries of both sides at each."""
    from opsd.scoring import hidden_at, project

    objective, head_VH = parts.objective, parts.loaded.head_VH
    student_TH = hidden_at(parts.loaded.body, batch.student)
    teacher_TH = None if parts.teacher is None or batch.teacher is None else parts.teacher.hidden(batch.teacher)
    columns: dict[str, list[float | None]] = {name: [] for name in objective.columns}
    tokens: dict[str, list[Any]] = {"capped": [], "top": [], "top_student": [], "top_teacher": [], "top_capped": []}
    for start in range(0, len(batch.response_ids_T), parts.run.train.chunk_tokens):
        chunk = slice(start, start + parts.run.train.chunk_tokens)
        logits_TV, ids_T, sampler_T = project(student_TH[chunk], head_VH), batch.response_ids_T[chunk], batch.sampler_logps_T[chunk]
        student_logps_TV = (logits_TV / objective.temperature).log_softmax(-1)
        teacher_logps_TV = None
        if parts.teacher is not None and teacher_TH is not None:
            logits_of_teacher_TV = project(teacher_TH[chunk], parts.teacher.head_VH).to(logits_TV.dtype)
            teacher_logps_TV = (logits_of_teacher_TV / objective.temperature).log_softmax(-1)
        _, diagnostics_TD = objective.score_chunk(logits_TV, teacher_logps_TV, ids_T, sampler_T.to(logits_TV.dtype))
        for name, values_T in zip(objective.columns, diagnostics_TD.unbind(-1), strict=True):
            columns[name] += [short(value) for value in values_T.tolist()]
        capped_T, capped_TV = capped_entries(parts, student_logps_TV, teacher_logps_TV, ids_T, sampler_T)
        tokens["capped"] += capped_T.tolist()
        add_top(tokens, student_logps_TV, teacher_logps_TV, ids_T, capped_TV)
    if parts.teacher is None:
        columns = {name: values for name, values in columns.items() if name not in TEACHERS}
    if parts.run.clip is None:
        del columns["cosine"]
    rows, end = [], 0
    for length in lengths:
        start, end = end, end + length
        rows.append({"columns": {name: values[start:end] for name, values in columns.items()}})
        rows[-1] |= {name: values[start:end] for name, values in tokens.items()}
    return rows


def capped_entries(
    parts: Scorers, student_logps_TV: Tensor, teacher_logps_TV: Tensor | None, response_ids_T: Tensor, sampler_logps_T: Tensor
) -> tuple[Tensor, Tensor]:
    """How many entries of each token were capped, `[T]`, -1 where the token was as a whole; and which, `[T, V]`."""
    import torch

    from opsd.losses.base import Divergence

    loss, taught_TV = parts.run.loss, student_logps_TV if teacher_logps_TV is None else teacher_logps_TV
    contributions_TK = loss(student_logps_TV, taught_TV, response_ids_T=response_ids_T, sampler_logps_T=sampler_logps_T)
    _, capped_TK = parts.run.clipping(contributions_TK)
    capped_TV = torch.zeros_like(student_logps_TV, dtype=torch.bool)
    if capped_TK.shape[1] == 1:
        return -capped_TK[:, 0].long(), capped_TV
    kept_Tk = loss.kept(taught_TV) if isinstance(loss, Divergence) else None
    capped_TV = capped_TK if kept_Tk is None else capped_TV.scatter(-1, kept_Tk, capped_TK[:, :-1])  # the last one is the tail
    return capped_TK.sum(-1), capped_TV


def add_top(
    tokens: dict[str, list[Any]],
    student_logps_TV: Tensor,
    teacher_logps_TV: Tensor | None,
    response_ids_T: Tensor,
    capped_TV: Tensor,
) -> None:
    """For each token the response's own entry and both sides' most likely ones, the likeliest first, with both probabilities."""
    import torch

    sides = [student_logps_TV] if teacher_logps_TV is None else [teacher_logps_TV, student_logps_TV]
    count = min(TOP, student_logps_TV.shape[-1])
    found_TM = torch.cat([*(side_TV.topk(count, dim=-1).indices for side_TV in sides), response_ids_T[:, None]], dim=-1)
    student_TM, capped_TM = student_logps_TV.gather(-1, found_TM).exp().tolist(), capped_TV.gather(-1, found_TM).tolist()
    teacher_TM = student_TM if teacher_logps_TV is None else teacher_logps_TV.gather(-1, found_TM).exp().tolist()
    for ids, student, teacher, capped in zip(found_TM.tolist(), student_TM, teacher_TM, capped_TM, strict=True):
        shown = {
            token: (p_teacher, p_student, cap)
            for token, p_student, p_teacher, cap in zip(ids, student, teacher, capped, strict=True)
        }
        ordered = sorted(shown, key=lambda token: max(shown[token][:2]), reverse=True)
        tokens["top"].append(ordered)
        tokens["top_student"].append([short(shown[token][1], 4) for token in ordered])
        if teacher_logps_TV is not None:
            tokens["top_teacher"].append([short(shown[token][0], 4) for token in ordered])
        tokens["top_capped"].append([token for token in ordered if shown[token][2]])


def short(value: float, digits: int = 7) -> float | None:
    """As many digits as are shown or added up; None for what is no number."""
    return None if value != value else float(f"{value:.{digits}g}")


def logged(run_dir: Path, step: int) -> dict[str, float]:
    """What the run has recorded of a step; nothing where its line is gone."""
    file = run_dir / "metrics.jsonl"
    for text in file.read_text().splitlines() if file.is_file() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:  # the line that a running job is writing
            break
        if line["step"] == step and OBJECTIVE in line:
            return {name: line[name] for name in (OBJECTIVE, "train/divergence") if name in line}
    return {}


def page(data: dict[str, Any]) -> str:
    """The page with its data inside. No `<` of the data is left as one, so that no text in it can end the script or start a tag."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    template = PAGE.read_text(encoding="utf-8")
    assert template.count(DATA) == 1
    return template.replace(DATA, text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
