"""A refused command: exit status 2, ONE message with key, value and remedy, no traceback, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opsd.launch.main import main

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"


def refused(argv: list[str], capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """The one message of a command that is refused; nothing else may have happened."""
    before = sorted(folder.rglob("*"))
    assert main(CONF, argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "Traceback" not in err
    assert sorted(folder.rglob("*")) == before
    assert "HYDRA_FULL_ERROR" not in os.environ
    return err.removeprefix("error: ").removesuffix("\n")


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "start", "contains"),
    [
        (["los=jsd"], "los=jsd: the config has no key los, did you mean loss?", "clipping"),
        (["loss=jds"], "loss=jds: loss has no option jds, did you mean loss=jsd? Its options: jsd, ", "forward_kl"),
        (["loss=null"], "loss=null: every run needs a loss; set loss to one of: ", "nll, reverse_kl, sampled_token"),
        (["eval="], "eval=: every run needs a eval; set eval to one of: ", "none"),
        (["loss=jsd", "loss.beta=0"], "loss.beta=0.0: ", "loss=forward_kl"),
        (["clip=abc"], "clip=abc: must be a positive number or null.", ""),
        (["clipping=none", "clip=0.3"], "clip=0.3 with clipping=none: nothing would be clipped;", "set clip=null"),
        (["rollout.maxlen=1"], "rollout.maxlen=1: rollout=transformers has no key maxlen, did you mean rollout.max_len?", "top_p"),
        (["rollout.max_len=0"], "rollout.max_len=0: must be at least 1.", ""),
        (["rollout.max_len=100000"], "rollout.max_len=100000: model=tiny attends to ", "set rollout.max_len lower"),
        (["data=jsonl"], "data.path is not set: ", "data.path=VALUE"),
        (["data=jsonl", "data.path=missing.jsonl"], "data.path=", "missing.jsonl"),
        (["model=hf", "model.path=missing"], "model.path=", "missing"),
        (["model=hf"], "model.path is not set: ", "model.path=VALUE"),
        (["model.lora.r=8"], "model.lora.r=8: model.lora is null", "model.lora={KEY: VALUE, ...}"),
        (["loss=jsd,forward_kl"], "loss=jsd,forward_kl: several values; add -m", ""),
        (["seed=range(0,3)"], "seed=range(0,3): a sweep; add -m", ""),
        (["clip=[1"], "clip=[1: cannot be read", "KEY=VALUE"),
        (["clip"], "clip: cannot be read", "KEY=VALUE"),
        (["loss=3"], "loss=3: a group takes the name of one of its options", "--help"),
        (["+data=jsonl"], "+data=...: data has an option already", "data=OPTION"),
        (["experiment=zz"], "experiment=zz: experiment has no option zz.", "released_jsd"),
        (["experiment=trce/baseline"], "experiment=trce/baseline: experiment has no option trce/baseline, did you mean", "trace/"),
        (["--config-dir", "nowhere"], "Additional config directory", "not found"),
        (["resume=nowhere"], "resume=", "is not a run directory"),
        (["train.max_time=6x"], "train.max_time=6x: must be a duration", "6h"),
        (["data.path=x"], "data.path=x: data=arithmetic has no key path, unlike data=hub, data=jsonl: add one", "kinds"),
        (["loss.beta=0.3"], "loss.beta=0.3: loss=forward_kl has no key beta, unlike loss=jsd: add that to use it.", "top_k"),
        (["model.lora.r=8"], "model.lora.r=8: model.lora is null", "or choose an option that has them: model=hf, "),
        (["--loss=jsd"], "--loss=jsd: there is no such switch; keys and groups are written without dashes: loss=jsd.", ""),
        (["-x"], "-x: there is no such switch; ", "x=VALUE"),
        (["--cfg"], "--cfg: write --cfg with one of job, hydra, all.", ""),
        (["-c", "nope"], "-c nope: write --cfg with one of job, hydra, all.", ""),
        (["--info"], "--info: write --info with one of all, config, ", "defaults-tree"),
        (["--info", "nope"], "--info nope: write --info with one of all, config, ", "defaults-tree"),
        (["name=ünï/x"], "name=ünï/x: it becomes part of a directory's name;", "letters"),
        (["data=jsonl", "data.path=~/nothing.jsonl"], "data.path=~/nothing.jsonl: there is no such file", "/nothing.jsonl)"),
        (["hydra.run.dir=x"], "hydra.run.dir=x: Hydra only composes here; ", "output_root=DIR"),
        (["engine.device=gpu"], "engine.device=gpu: must be auto, cpu, cuda or cuda:N.", ""),
        (["train.lr=null"], "train.lr=null: must be a number.", ""),
        (["clip=true"], "clip=true: must be a positive number or null.", ""),
        ([f"output_root=/{'x' * 300}"], "output_root=/xxx", "File name too long; give another path."),
        (["data=jsonl", f"data.path={'x' * 300}"], "data.path=xxx", "File name too long; give another path."),
    ],
)
def test_one_message(argv: list[str], start: str, contains: str, capsys: pytest.CaptureFixture[str], somewhere: Path) -> None:
    message = refused(argv, capsys, somewhere)
    assert message.startswith(start) and contains in message
    assert len(message.splitlines()) == 1


def test_an_output_path_under_a_file(capsys: pytest.CaptureFixture[str], somewhere: Path) -> None:
    (somewhere / "taken").touch()
    message = refused(["output_root=taken/runs"], capsys, somewhere)
    assert (
        message == f"output_root={somewhere}/taken/runs: {somewhere}/taken is a file; give a directory that exists or can be made."
    )


def test_an_unreachable_server(capsys: pytest.CaptureFixture[str], somewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    message = refused([], capsys, somewhere)
    assert message.startswith("MLFLOW_TRACKING_URI=http://127.0.0.1:9: ") and len(message.splitlines()) == 1


def test_a_database_that_is_none(capsys: pytest.CaptureFixture[str], somewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (somewhere / "broken.db").write_bytes(b"x" * 5000)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{somewhere}/broken.db")
    message = refused([], capsys, somewhere)
    assert message.startswith(f"MLFLOW_TRACKING_URI=sqlite:///{somewhere}/broken.db: ") and len(message.splitlines()) == 1
    assert "file is not a database" in message and "make sure that the file is there, writable" in message


@pytest.mark.parametrize("uri", ["foo://bar", "file:///tmp/mlruns", "sqlite:////proc/1/mlflow.db"])
def test_what_is_no_store(uri: str, capsys: pytest.CaptureFixture[str], somewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    message = refused([], capsys, somewhere)
    assert message.startswith(f"MLFLOW_TRACKING_URI={uri}: ") and len(message.splitlines()) == 1


def test_config_files_of_ones_own(capsys: pytest.CaptureFixture[str], somewhere: Path) -> None:
    (somewhere / "mine" / "experiment").mkdir(parents=True)
    (somewhere / "mine" / "experiment" / "torn.yaml").write_text("# @package _global_\ntrain: [\n")
    (somewhere / "mine" / "experiment" / "lost.yaml").write_text("train:\n  lr: 1.0e-4\n")
    message = refused(["--config-dir", "mine", "experiment=torn"], capsys, somewhere)
    assert message.startswith(f"{somewhere}/mine/experiment/torn.yaml: line 3 is not YAML (")
    message = refused(["--config-dir", "mine", "experiment=lost"], capsys, somewhere)
    assert message == "experiment=train: changes nothing where it stands; begin the experiment's file with `# @package _global_`."


def test_one_broken_point_stops_the_sweep_before_anything_is_made(capsys: pytest.CaptureFixture[str], somewhere: Path) -> None:
    message = refused(["-m", "loss=jsd", "clip=0.1,-1,0.2,abc"], capsys, somewhere)
    first, *listed = message.splitlines()
    assert first == "2 of 4 points cannot run, so none was started:"
    assert [line.strip() for line in listed] == [
        "loss=jsd clip=-1",
        "clip=-1: must be a positive number or null.",
        "loss=jsd clip=abc",
        "clip=abc: must be a positive number or null.",
    ]
    assert refused(["-m", "loss=jsd,jds"], capsys, somewhere).startswith("loss=jsd,jds: loss has no option jds, did you mean")


def test_as_a_command(somewhere: Path) -> None:
    done = subprocess.run([sys.executable, ROOT / "launch.py", "los=jsd"], capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: los=jsd: ") and len(done.stderr.splitlines()) == 1
    assert list(somewhere.iterdir()) == []


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("script", ["launch.py", "evaluate.py"])
def test_help_is_quick_and_knows_every_option(script: str, somewhere: Path) -> None:
    (somewhere / "mine" / "loss").mkdir(parents=True)
    (somewhere / "mine" / "model").mkdir()
    (somewhere / "mine" / "loss" / "renyi.yaml").write_text("# A loss of my own. More.\nname: renyi\n")
    (somewhere / "mine" / "model" / "own.yaml").write_text("# A model of my own.\nname: own\n")
    began = time.perf_counter()
    arguments = [sys.executable, ROOT / script, "--help", "--config-dir", "mine"]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment())
    assert time.perf_counter() - began < 1.5
    assert done.returncode == 0 and done.stderr == ""
    shown = [line.split()[:2] for line in done.stdout.splitlines() if line.strip()]
    names = {word for words in shown for word in words}
    root = (CONF / ("config.yaml" if script == "launch.py" else "evaluate.yaml")).read_text()
    for path in CONF.glob("*/*.yaml"):
        assert (f"  - {path.parent.name}: " not in root) or path.stem in names
    assert "own" in names and "A model of my own" in done.stdout
    assert ("renyi" in names) == (script == "launch.py")


def test_hydras_own_switches_work(capsys: pytest.CaptureFixture[str], somewhere: Path) -> None:
    assert main(CONF, ["loss=jsd", "--cfg", "job", "--resolve"]) == 0
    assert "beta: 0.5" in capsys.readouterr().out
    assert main(CONF, ["loss=jsd", "--cfg", "job", "seed=3", "-p", "loss", "clip=0.2"]) == 0
    assert capsys.readouterr().out.startswith("# @package loss\nname: jsd\n")
    arguments = [sys.executable, ROOT / "launch.py", "--info", "defaults-tree"]  # leaves Hydra's logging on, so in its own process
    assert "loss: forward_kl" in subprocess.run(arguments, capture_output=True, text=True, env=environment()).stdout
    assert list(somewhere.iterdir()) == []


def test_shell_completion(somewhere: Path) -> None:
    asked = environment() | {"COMP_LINE": f"{ROOT}/launch.py loss=f", "COMP_POINT": "0"}
    arguments = [sys.executable, ROOT / "launch.py", "-sc", "query=bash"]
    done = subprocess.run(arguments, capture_output=True, text=True, env=asked)
    assert done.stdout.split() == ["loss=forward_kl"]


def test_check_prints_the_config_and_leaves_nothing(capsys: pytest.CaptureFixture[str], somewhere: Path) -> None:
    assert main(CONF, ["do=check", "loss=jsd", "clip=0.9", "experiment=null", "debug=null"]) == 0
    out, err = capsys.readouterr()
    assert "beta: 0.5" in out and out.endswith("ok\n")
    assert err.startswith("warning: clip=0.9 cannot bind")
    assert list(somewhere.iterdir()) == []


def test_dry_run_says_what_would_be_started_and_leaves_nothing(capsys: pytest.CaptureFixture[str], somewhere: Path) -> None:
    assert main(CONF, ["do=dry_run", "sweep=clipping_grid", "seed=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 24
    for number, (where, what) in enumerate(zip(lines[::2], lines[1::2], strict=True)):
        assert where.startswith(f"{somewhere}/multirun/") and where.endswith(f"-clipping_grid/{number:03d}")
        assert what.strip() == f"{sys.executable} -m opsd.run {where}"
    assert main(CONF, ["do=dry_run", "loss=jsd", "output_root=runs"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith(f"{somewhere}/runs/")
    assert list(somewhere.iterdir()) == []
