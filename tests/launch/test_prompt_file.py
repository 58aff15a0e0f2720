"""`prompt=file`: the texts are read once, at launch, and stand in the frozen config; what is wrong with a file is one message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from opsd import config
from opsd.launch import plan
from opsd.launch.compose import compose
from opsd.prompts.file import TemplateFile

CONF = Path(__file__).parents[2] / "conf"
GOOD = 'student: "{problem}${eval.instruction}"\nteacher: |-\n  {problem}\n  Known: {privileged}\n'


def checked(*overrides: str, path: Path) -> plan.Run:
    points = compose(CONF, "config", ["prompt=file", f"prompt.path={path}", *overrides])
    (run,) = plan.check_points(points)
    config.freeze(points[0].cfg, path.parent / "config.yaml")
    return run


def test_the_texts_become_the_runs_own(tmp_path: Path) -> None:
    path = tmp_path / "worked out.yaml"
    path.write_text(GOOD)
    run = checked("prompt.privileged=answer", "eval.instruction=' Box it.'", path=path)
    prompt: Any = run.prompt
    assert isinstance(prompt, TemplateFile)
    assert (prompt.name, prompt.path) == ("worked out", str(path))
    assert (prompt.student, prompt.teacher) == ("{problem} Box it.", "{problem}\nKnown: {privileged}")
    assert (prompt.analysis, prompt.privileged.name, run.needs) == (None, "answer", {"answer"})
    path.write_text("another: text")  # and gone: the run has its own
    assert config.load(tmp_path).prompt == run.prompt
    path.unlink()
    assert config.load(tmp_path).prompt == run.prompt
    assert config.params(config.frozen(tmp_path))["prompt"] == "worked out"


def test_a_file_whose_teacher_writes_first(tmp_path: Path) -> None:
    path = tmp_path / "first.yaml"
    path.write_text('student: "{problem}"\nanalysis: "{problem} {privileged} Why?"\nteacher: "{problem} {privileged} {analysis}"\n')
    prompt: Any = checked("prompt.analysis_len=7", path=path).prompt
    assert (prompt.analysis_len, prompt.analysis) == (7, "{problem} {privileged} Why?")
    with pytest.raises(ValueError, match="^prompt.analysis_len=null: must be at least 1,"):
        checked(path=path)


def test_a_path_from_where_the_command_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    assert checked(path=Path("mine.yaml")).prompt.name == "mine"
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["prompt"]["path"] == str(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("student: [\n", ": line 2 is not YAML ("),
        ("student: '{problem}'\nstudent: 'again {problem}'\n", ": line 2 is not YAML (found duplicate key student)"),
        ("student: '{problem}'\n", ": has no teacher; it holds student and teacher and, where the teacher writes first, analysis."),
        (GOOD + "privileged: answer\n", ": privileged is no key of a template file, which holds student and teacher and"),
        (GOOD.replace("teacher", "taecher"), ": taecher is no key of a template file,"),
        ("student: {problem}\nteacher: {problem}\n", ": student is no text; put it in quotes, or after `|-`"),
        ("student: 3\nteacher: x\n", ": student is no text;"),
        ("- a\n- b\n", ": holds no keys; give it student and teacher"),
        ("just words", ": just words is no key of a template file,"),
        ("", ": has no student; it holds student and teacher"),
        ("student: '{problem} ${'\nteacher: x\n", ": a `${...}` in it cannot be read (no viable alternative"),
        (b"student: \xff\xfe\n", ": is not YAML in UTF-8 ("),
    ],
)
def test_what_is_no_template_file(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as caught:
        checked(path=path)
    assert str(caught.value).startswith(f"prompt.path={path}")
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file .*give a yaml file with student and teacher"):
        checked(path=tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="is a directory"):
        checked(path=tmp_path)
    with pytest.raises(ValueError, match="^prompt.path is not set: prompt=file needs it; add prompt.path=FILE"):
        plan.check_points(compose(CONF, "config", ["prompt=file"]))
    with pytest.raises(ValueError, match="^prompt.student=x: prompt=file has no key student"):
        compose(CONF, "config", ["prompt=file", "prompt.path=x.yaml", "prompt.student=x"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace("{problem}", "{question}", 1), "prompt.student: {question} is no slot;"),
        (
            GOOD.replace("eval.instruction", "eval.words"),
            "prompt.student: takes its value from eval.words, which eval=arithmetic does",
        ),
        ("student: '{problem} \\${x}'\nteacher: '{problem} {privileged}'\n", "prompt.student: holds `${`, which a config reads"),
    ],
)
def test_texts_are_held_to_what_every_template_is(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        checked(path=path)
    assert str(caught.value).startswith(said)


def test_a_sweep_over_files_lists_the_broken_ones(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.yaml").write_text(GOOD if name != "b" else "student: x\n")
    files = ",".join(str(tmp_path / f"{name}.yaml") for name in ("a", "b", "c"))
    with pytest.raises(ValueError, match="^1 of 3 points cannot run, so none was started:\n.*b.yaml\n.*has no teacher"):
        plan.check_points(compose(CONF, "config", ["-m", "prompt=file", f"prompt.path={files}"]))
    (tmp_path / "b.yaml").write_text(GOOD)
    runs = plan.check_points(compose(CONF, "config", ["-m", "prompt=file", f"prompt.path={files}"]))
    assert [run.prompt.name for run in runs] == ["a", "b", "c"]
