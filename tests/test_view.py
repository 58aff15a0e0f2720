"""The token view: its numbers are those the step was trained on, its texts stay texts, and a browser shows both."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from whole_runs import launch, lines, the_run

from opsd.view import main

HOSTILE = "<script>document.title='broken'</script></script><b>bold</b> & 2 < 3 <|im_end|> up 3"
SHORT = [
    "train.batch=6",
    "train.steps=3",
    "train.save_every=1",
    "train.lr=1e-3",
    "rollout.max_len=40",
    "eval=none",
    "train.log_every=9",
]
ANALYSED = [
    "prompt=reason_first",
    'prompt.analysis="{problem} {privileged}"',
    'prompt.teacher="{problem} {privileged} {analysis}"',
    "prompt.analysis_len=8",
]
CASES = {
    "entry": ["clipping=entry", "teacher=ema", "teacher.rate=0.5", "data=jsonl", "data.path=problems.jsonl"],
    "top_k": [
        "loss=reverse_kl",
        "loss.top_k=3",
        "clipping=entry",
        "clip=0.01",
        "train.reduction=sequence",
        "model=tiny_lora",
        *ANALYSED,
    ],
    "sampled_token": [
        "loss=sampled_token",
        "clipping=none",
        "rollout.temperature=1.3",
        "train.micro_tokens=200",
        "train.chunk_tokens=7",
    ],
    "nll": ["loss=nll", "rollout=dataset", "teacher=none", "clipping=none"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, store) -> dict[str, Path]:
    """A run of each case; made when it is first asked for."""

    class Runs(dict[str, Path]):
        def __missing__(self, case: str) -> Path:
            cwd = tmp_path_factory.mktemp(case)
            rows = [{"problem": HOSTILE, "solution": "2+3=5. It shows \\boxed{5}.", "answer": "5"}] + [
                {
                    "problem": f"A dial shows {i}. It is turned up 1.",
                    "solution": f"{i}+1={i + 1}. It shows \\boxed{{{i + 1}}}.",
                    "answer": f"{i + 1}",
                }
                for i in range(5)
            ]
            (cwd / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            done = launch(cwd, store, *SHORT, *CASES[case])
            assert done.returncode == 0, done.stdout + done.stderr
            self[case] = the_run(cwd)
            return self[case]

    return Runs()


def view(run_dir: Path, *options: str) -> tuple[dict, str]:
    """What the page holds, and the page."""
    out = run_dir / "page.html"
    assert main([str(run_dir), "--out", str(out), *options]) == 0
    text = out.read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(data), text


@pytest.mark.parametrize("case", CASES)
def test_the_page_adds_up_to_the_step_it_shows(case, runs):
    """Step 3, scored by checkpoint 2 with its teacher: objective, divergence and what was capped are metrics.jsonl's."""
    data, _ = view(runs[case])
    logged = lines(runs[case])[-1]
    assert logged["step"] == data["step"] == 3
    assert data["note"] == "rollouts of step 3, 6 of 6, scored by step_000002"
    rollouts = data["rollouts"]
    objective = sum(rollout["weight"] * sum(rollout["columns"]["value"]) for rollout in rollouts)
    assert objective == pytest.approx(logged["train/objective"], abs=1e-5, rel=1e-5)
    assert data["logged"]["train/objective"] == logged["train/objective"]

    def mean(name: str) -> float:
        values = [value for rollout in rollouts for value in rollout["columns"][name]]
        return sum(values) / len(values)

    for name in ("divergence", "student_entropy", "clipped_tokens", *(["agreement", "teacher_entropy"] if data["teacher"] else [])):
        assert mean(name) == pytest.approx(logged[f"train/{name}"], abs=1e-5, rel=1e-5), name
    for name in data["measures"]:
        assert mean(name) == pytest.approx(logged[f"train/{name}"], abs=1e-5, rel=1e-5), name
    for rollout in rollouts:
        capped = [float(count != 0) for count in rollout["capped"]]
        assert capped == rollout["columns"]["clipped_tokens"]
    assert ("teacher_logp" in rollouts[0]["columns"]) == (case != "nll")


@pytest.mark.parametrize("case", ["entry", "top_k"])
def test_the_likeliest_entries_are_both_sides_own(case, runs):
    """The response's entry has the probability that its log-prob says, and shown probabilities are those of one distribution."""
    data, _ = view(runs[case])
    for rollout in data["rollouts"]:
        for t, token in enumerate(rollout["ids"]):
            shown = rollout["top"][t]
            assert len(shown) == len(set(shown)) >= 5
            assert rollout["capped"][t] >= len(rollout["top_capped"][t])
            assert set(rollout["top_capped"][t]) <= set(shown)
            for side in ("student", "teacher"):
                probs = rollout[f"top_{side}"][t]
                logp = rollout["columns"][f"{side}_logp"][t]
                assert probs[shown.index(token)] == pytest.approx(math.exp(logp), rel=2e-3, abs=1e-30)
                assert sum(probs) <= 1 + 1e-3
                assert sum(sorted(probs)[-5:]) > 5 / 512, "the most likely of 512"


def test_what_was_capped_is_what_is_missing(runs):
    """Forward KL, entries capped at c: divergence - value = sum over capped entries of p_T log(p_T / p_S) - c."""
    data, _ = view(runs["entry"])
    checked = 0
    for rollout in data["rollouts"]:
        for t, capped in enumerate(rollout["capped"]):
            missing = rollout["columns"]["divergence"][t] - rollout["columns"]["value"][t]
            if capped != len(rollout["top_capped"][t]):
                continue  # some of them are none of the likeliest
            places = [rollout["top"][t].index(entry) for entry in rollout["top_capped"][t]]
            taught, known = ([rollout[f"top_{side}"][t][place] for place in places] for side in ("teacher", "student"))
            excess = sum(p * math.log(p / q) - data["clip"] for p, q in zip(taught, known, strict=True))
            assert missing == pytest.approx(excess, rel=5e-3, abs=2e-4)
            checked += capped
    assert checked, "the test says something"


def test_fewer_rollouts_and_other_weights(runs, capsys):
    data, _ = view(runs["entry"], "--step", "1", "--rollouts", "2")
    assert len(data["rollouts"]) == 2
    assert data["note"] == (
        "rollouts of step 1, 2 of 6, scored by step_000002: NOT the weights they were trained under, which were those after step 0"
    )
    assert data["note"] in capsys.readouterr().out
    whole, _ = view(runs["entry"])
    first, _ = view(runs["entry"], "--rollouts", "1")
    for name, values in first["rollouts"][0]["columns"].items():
        assert values == pytest.approx(whole["rollouts"][0]["columns"][name], abs=1e-5, nan_ok=True), name


def test_texts_stay_texts(runs):
    """No tag of the data's reaches the page, and what the page holds is the text itself."""
    data, page = view(runs["entry"])
    assert HOSTILE in {rollout["problem"] for rollout in data["rollouts"]}
    assert "document.title='broken'" in page
    assert "<script>document" not in page
    assert page.count("</script>") == 2
    assert "http:" not in page
    assert "https:" not in page


def test_a_page_of_eight_long_responses_is_a_few_megabytes(runs):
    data, page = view(runs["entry"])
    tokens = sum(len(rollout["ids"]) for rollout in data["rollouts"])
    assert len(page) / tokens * 8 * 1024 < 5e6


def test_a_browser_shows_it(runs):
    """A real one, headless: the texts as texts, a token's panel filled, nothing asked for from outside."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs chromium")
    data, _ = view(runs["entry"])
    r, t = next((r, t) for r, rollout in enumerate(data["rollouts"]) for t, count in enumerate(rollout["capped"]) if count)
    address = f"{(runs['entry'] / 'page.html').as_uri()}#r{r + 1}t{t + 1}"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    dom = subprocess.run([chromium, *flags, address], capture_output=True, text=True, timeout=120).stdout
    assert f"<title>{data['run']}, step 3: token view</title>" in dom, "no script of the data's has run"
    assert "&lt;script&gt;document.title='broken'&lt;/script&gt;&lt;/script&gt;&lt;b&gt;bold&lt;/b&gt; &amp; 2 &lt; 3" in dom
    assert dom.count("<article") == 6
    assert len(re.findall(r'class="t[ "]', dom)) == sum(len(rollout["ids"]) for rollout in data["rollouts"])
    panel = dom[dom.index('id="panel"') :]
    entries = data["rollouts"][r]["capped"][t]
    assert f"token {t + 1} of {len(data['rollouts'][r]['ids'])}, rollout {r + 1}" in panel
    assert f"<td>{entries} {'entry' if entries == 1 else 'entries'}</td>" in panel
    assert panel.count('class="prob"') == 2 * len(data["rollouts"][r]["top"][t])


def test_what_it_refuses(runs, tmp_path, capsys):
    """One message each, exit status 2."""

    def refused(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        (message,) = capsys.readouterr().err.splitlines()
        return message

    run_dir = runs["entry"]
    assert "is not a run directory" in refused(str(tmp_path))
    assert "has no checkpoint" in refused(copied(run_dir, tmp_path / "young"))
    assert "no saved rollouts" in refused(copied(run_dir, tmp_path / "old", "checkpoints"))
    assert "--step 9" in (said := refused(str(run_dir), "--step", "9"))
    assert "1 to 3" in said
    assert "--rollouts 0" in refused(str(run_dir), "--rollouts", "0")
    assert "no directory" in refused(str(run_dir), "--out", str(tmp_path / "nowhere" / "page.html"))
    problems = run_dir.parents[1] / "problems.jsonl"
    before = problems.read_text()
    problems.write_text(before.replace("A dial shows", "The dial shows"))
    assert "data=jsonl: its problems are no longer those" in refused(str(run_dir))
    problems.write_text(before)


def copied(run_dir: Path, to: Path, *folders: str) -> str:
    to.mkdir()
    shutil.copy(run_dir / "config.yaml", to)
    for folder in folders:
        shutil.copytree(run_dir / folder, to / folder)
    return str(to)
