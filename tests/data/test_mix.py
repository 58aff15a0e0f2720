"""Mixes: how they are composed, what each pool holds, each source's own rule on overlap, and what each mistake says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opsd.config import Run, freeze, load, to_run
from opsd.data.mix import Mix
from opsd.inputs import told, training_problems
from opsd.launch.compose import compose
from opsd.metrics import pool_metrics

CONF = Path(__file__).parents[2] / "conf"
TWO = ("data=mix", "+data@data.sources.main=arithmetic", "+data@data.sources.replay=jsonl")
SHARES = "data.shares={main: 3, replay: 1}"
EMBEDDED = ("data=mix", "+data@data.sources.a=arithmetic", "+data@data.sources.b=arithmetic", "data.sources.a.kinds=[cards]")


def run_of(*overrides: str) -> Run:
    (point,) = compose(CONF, "config", list(overrides))
    return to_run(point.cfg)


def refused(*overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        run = run_of(*overrides)
        run.data.check(needs=run.needs)
        training_problems(run)
    return str(caught.value)


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"solution": "so"} | row) + "\n" for row in rows))
    return path


def test_a_mix_on_the_command_line(tmp_path: Path) -> None:
    file = write(
        tmp_path / "x.jsonl", {"id": "dial-0", "problem": "a", "ok": 1}, {"problem": "b", "ok": 0}, {"problem": "c", "ok": 1}
    )
    own = (f"data.sources.replay.path={file}", "data.sources.replay.keep={ok: 1}", "data.sources.main.max_rows=5")
    run = run_of(*TWO, SHARES, *own)
    run.data.check(needs=frozenset({"solution"}))
    found = training_problems(run)
    main, replay = found.pools
    assert (main.name, main.share, replay.name, replay.share) == ("main", 0.75, "replay", 0.25)
    assert [problem.id for problem in found.problems] == [f"main/dial-{n}" for n in range(5)] + ["replay/dial-0", "replay/line-3"]
    alone = run_of("data.max_rows=5").data.load(seed=run.seed).problems
    assert [(problem.text, problem.solution) for problem in main.problems] == [(p.text, p.solution) for p in alone]
    counts = {"main/read": 5, "replay/read": 3, "replay/keep": 1, "replay/max_chars": 0, "main/overlap": 0, "replay/overlap": 0}
    assert found.counts | {"replay/max_chars": 0} == counts
    assert told("mix", found) == "data=mix: 5 problems of main, 2 problems of replay; left out: replay/keep 1"


def test_a_mix_in_an_experiment(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n# A mix.\n"
        "defaults:\n  - /data@data.sources.main: openthoughts_math\n  - /data@data.sources.replay: jsonl\n  - override /data: mix\n"
        "data:\n  sources:\n    replay:\n      path: ???\n      max_rows: 2\n  shares: {main: 1, replay: 1}\n"
    )
    given = (f"--config-dir={tmp_path}", "experiment=mine")
    assert refused(*given) == (
        "data.sources.replay.path is not set: data=mix needs it; add data.sources.replay.path=VALUE to the command line."
    )
    data: Any = run_of(*given, "data.sources.replay.path=x.jsonl", "data.sources.main.revision=v1").data
    main, replay = data.parts().values()
    assert (main.name, main.kind, main.revision, main.split) == ("openthoughts_math", "hub", "v1", "train")
    assert (replay.name, replay.path, replay.max_rows, replay.overlap_words) == ("jsonl", "x.jsonl", 2, 13)


def test_the_embedded_mix_has_both_kinds() -> None:
    dial, cards = training_problems(run_of("data=arithmetic_mix")).pools
    assert (dial.share, cards.share) == (0.5, 0.5)
    assert all("dial" in p.text or "counter" in p.text for p in dial.problems)
    assert all("card" in p.text for p in cards.problems)


def test_paths_inside_a_mix_are_frozen_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x.jsonl", {"problem": "a"})
    (point,) = compose(CONF, "config", [*TWO, SHARES, "data.sources.replay.path=x.jsonl"])
    freeze(point.cfg, tmp_path / "config.yaml")
    monkeypatch.chdir("/")
    data: Any = load(tmp_path).data
    assert data.sources["replay"]["path"] == str(tmp_path / "x.jsonl")
    assert [len(pool.problems) for pool in data.load(seed=0).pools] == [4096, 1]


def test_each_source_is_held_against_the_evaluation_by_its_own_rule(tmp_path: Path) -> None:
    asked = run_of().eval.problems()
    copies = [{"id": str(n), "problem": problem.text.upper().replace(" ", "  ")} for n, problem in enumerate(asked[:25])]
    file = write(tmp_path / "x.jsonl", {"id": "own", "problem": "Something else."}, *copies)
    own = (*TWO, SHARES, f"data.sources.replay.path={file}")
    said = refused(*own).splitlines()
    assert said[0] == (
        "data.sources.replay=jsonl: eval=arithmetic asks 25 of its problems too, so that the score would count what was trained "
        "on; set data.sources.replay.overlap=drop, or other data. In brackets how much of the evaluation's problem is there:"
    )
    assert said[1].startswith(f"    replay/0 ~ {asked[0].id} (100%): ") and len(said) == 22 and said[-1] == "    and 5 more"
    dropped = training_problems(run_of(*own, "data.sources.replay.overlap=drop"))
    assert [problem.id for problem in dropped.pools[1].problems] == ["replay/own"] and dropped.counts["replay/overlap"] == 25
    assert told("x", dropped) == "data=x: 4,096 problems of main, 1 problems of replay; left out: replay/overlap 25"
    allowed = training_problems(run_of(*own, "data.sources.replay.overlap=allow"))
    assert len(allowed.pools[1].problems) == 26 and "replay/overlap" not in allowed.counts and allowed.counts["main/overlap"] == 0
    write(file, *copies)
    assert refused(*own, "data.sources.replay.overlap=drop") == (
        "data.sources.replay.overlap=drop: eval=arithmetic asks every problem of data.sources.replay=jsonl; give others."
    )
    assert len(training_problems(run_of(*own, "eval=none")).pools[1].problems) == 25


def test_one_source_alone_is_told_by_its_own_key(tmp_path: Path) -> None:
    (asked, *_) = run_of().eval.problems()
    file = write(tmp_path / "x.jsonl", {"problem": asked.text}, {"problem": "Something else."})
    own = ("data=jsonl", f"data.path={file}")
    assert refused(*own).startswith("data=jsonl: eval=arithmetic asks 1 of its problems too")
    found = training_problems(run_of(*own, "data.overlap=drop"))
    assert told("jsonl", found) == "data=jsonl: 1 problems; left out: overlap 1"
    assert told("jsonl", training_problems(run_of(*own, "data.overlap=allow"))) == "data=jsonl: 2 problems"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["data=mix"],
            "data.sources: holds 0 of the two or more sources that a mix has; add one with +data@data.sources.NAME=OPTION.",
        ),
        (EMBEDDED, "data.shares.a: is not set; give every source a share, e.g. 'data.shares={a: 1, b: 1}'."),
        (
            [*EMBEDDED, "data.shares={a: 3}"],
            "data.shares.b: is not set; give every source a share, e.g. 'data.shares={a: 3, b: 1}'.",
        ),
        (
            [*EMBEDDED, "data.shares={a: 1, b: 0}"],
            "data.shares.b=0.0: must be above 0 and at most 1e+09; leave a source out that gives nothing.",
        ),
        ([*EMBEDDED, "data.shares={a: 1, b: -1}"], "data.shares.b=-1.0: must be above 0 and at most 1e+09; leave"),
        ([*EMBEDDED, "data.shares={a: 1, b: inf}"], "data.shares.b=inf: must be above 0 and at most 1e+09; leave"),
        ([*EMBEDDED, "data.shares={a: 1, b: 1, c: 1}"], "data.shares.c=1.0: there is no such source; the sources are a, b."),
        ([*EMBEDDED, "data.shares={a: 1, b: much}"], "data.shares.b=much: must be a mapping, each value a number or null."),
        (
            [*EMBEDDED, "data.shares={a: 1, b: 1}", "data.sources.b.max_rows=0"],
            "data.sources.b.max_rows=0: must be at least 1.",
        ),
        (
            [*EMBEDDED, "data.shares={a: 1, b: 1}", "data.sources.b.overlap=never"],
            "data.sources.b.overlap=never: must be one of refuse, drop, allow.",
        ),
        (
            [*EMBEDDED, "data.shares={a: 1, b: 1}", "+data.sources.b.rows=1"],
            "data.sources.b.rows=1: data.sources.b=arithmetic has no such key, did you mean data.sources.b.max_rows?",
        ),
        (
            [*EMBEDDED, "data.shares={a: 1, b: 1}", "data.sources.b.kind=arithmetik"],
            "data.sources.b.kind=arithmetik: there is no opsd/data/arithmetik.py; did you mean arithmetic?",
        ),
        (
            ["data=mix", "+data@data.sources.a=arithmetic", "+data@data.sources.b=arithmetic_mix", "data.shares={a: 1, b: 1}"],
            "data.sources.b.kind=mix: a mix holds no other mix; list that one's sources themselves.",
        ),
        (
            ["data=mix", "+data@data.sources.a=arithmetic", "+data.sources.b=arithmetic", "data.shares={a: 1, b: 1}"],
            "data.sources.b=arithmetic: must be a data option; add it with +data@data.sources.b=OPTION.",
        ),
        (
            ["data=mix", "data@data.sources.a=arithmetic"],
            "data@data.sources.a=arithmetic: nothing is composed at data.sources.a yet; add it with a plus sign: +data@data",
        ),
        (
            ["data=mix", "+data@data.sources.a=arithmetik"],
            "+data@data.sources.a=arithmetik: data has no option arithmetik, did you mean data=arithmetic? Its options: ",
        ),
        (
            ["data=mix", *EMBEDDED[1:3], "data.shares={a: 1, b: 1}"],
            "data.sources.b: holds the very problems of data.sources.a; give it others, or leave one of the two out.",
        ),
    ],
)
def test_refusals(overrides: list[str], said: str) -> None:
    assert refused(*overrides).startswith(said)


def test_a_name_becomes_part_of_ids_and_metrics() -> None:
    with pytest.raises(ValueError, match=r"^data.sources.a/b: use up to 40 letters, digits, _ and - for a source's name, a"):
        Mix(name="mix", kind="mix", sources={"a/b": {}, "c": {}}, shares=None)


def test_a_source_that_cannot_be_read_is_told_by_its_own_key(tmp_path: Path) -> None:
    file = write(tmp_path / "data.path", {"problem": "a", "ok": 1}, {"problem": "b", "solution": None, "ok": 0})
    own = (*TWO, SHARES, f"data.sources.replay.path={file}")
    assert refused(*own) == (
        f"data.sources.replay.path={file}: line 2 has an empty solution (column 'solution'); fill it in, remove the row, or set "
        "data.sources.replay.columns.solution to another column."
    )
    assert refused(*own, "data.sources.replay.keep={ok: 2}") == (
        "data.sources.replay.keep.ok=2: no row has that; the column holds 1, 0; set one of those."
    )
    assert refused(*TWO, SHARES, "data.sources.replay.path=data.jsonl").startswith(
        "data.sources.replay.path=data.jsonl: there is no such file (looked at /"
    )
    assert refused(*own, "data.sources.replay.columns.solution=null").startswith(
        "data.sources.replay.columns.solution=null: the run"
    )


def test_metrics_of_each_pool() -> None:
    metrics = pool_metrics(["a", "b", "a", "a"], [True, None, False, True], names=["a", "b", "c"])
    assert metrics == {"rollout/share_a": 0.75, "rollout/correct_a": 2 / 3, "rollout/share_b": 0.25, "rollout/share_c": 0.0}
