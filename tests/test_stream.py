"""The order of the problems: shares, dropped rows, resuming, and pools of which nothing fits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from opsd.seeding import derive
from opsd.stream import ProblemStream, digest
from opsd.types import Pool, Problem, Prompt


def pool(name: str, share: float, count: int) -> Pool:
    problems = [Problem(id=f"{name}/{n}", text="?", solution="!", answer="!") for n in range(count)]
    return Pool(name=name, share=share, problems=problems)


def render(problem: Problem) -> Prompt:
    return Prompt(problem=problem, student_ids=[1], teacher_ids=[1], shortened=False, analysis_ids=None)


def stream(*pools: Pool, fits: Callable[[Problem], bool] = lambda _: True, seed: int = 3) -> ProblemStream:
    return ProblemStream(pools=pools, render=lambda problem: render(problem) if fits(problem) else None, seed=seed)


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.problem.id for prompt in prompts]


def of_pools(prompts: list[Prompt]) -> Counter[str]:
    return Counter(name.partition("/")[0] for name in ids(prompts))


def test_one_pool_is_shuffled_anew_every_epoch() -> None:
    source, expected = pool("a", 1.0, 5), []
    for epoch in range(3):
        order = list(range(5))
        random.Random(derive(3, "order", epoch)).shuffle(order)
        expected += [f"a/{n}" for n in order]
    drawn = stream(source)
    assert ids(drawn.take(7)[0]) + ids(drawn.take(8)[0]) == expected
    assert drawn.position == [[15, 15]]


def test_half_is_half_of_every_batch() -> None:
    drawn = stream(pool("a", 0.5, 7), pool("b", 0.5, 1000))
    for _ in range(50):
        assert of_pools(drawn.take(8)[0]) == {"a": 4, "b": 4}


@pytest.mark.parametrize("shares", [(0.3, 0.7), (0.05, 0.95), (1 / 3, 1 / 3, 1 / 3), (0.5, 0.3, 0.2), (0.6, 0.25, 0.1, 0.05)])
def test_ragged_shares_stay_within_one_prompt_at_every_moment(shares: tuple[float, ...]) -> None:
    drawn = stream(*(pool(str(index), share, 50) for index, share in enumerate(shares)))
    taken = Counter[str]()
    for turn in range(1, 501):
        taken += of_pools(drawn.take(1)[0])
        for index, share in enumerate(shares):
            assert abs(taken[str(index)] - share * turn) < 1
    for index, share in enumerate(shares):
        assert taken[str(index)] == pytest.approx(500 * share, abs=0.7)


def test_each_pool_goes_through_all_its_problems_in_its_own_order() -> None:
    drawn = stream(pool("a", 0.25, 4), pool("b", 0.75, 12))
    prompts = [ids(drawn.take(16)[0]) for _ in range(3)]
    for epoch in prompts:
        assert len(set(epoch)) == 16
    assert len({tuple(epoch) for epoch in prompts}) == 3
    alone = stream(pool("a", 0.25, 4), pool("c", 0.75, 99))
    assert [name for name in ids(alone.take(16)[0]) if name[0] == "a"] == [name for name in prompts[0] if name[0] == "a"]


def test_a_dropped_row_is_replaced_from_its_own_pool() -> None:
    drawn = stream(pool("a", 0.5, 9), pool("b", 0.5, 9), fits=lambda problem: problem.id not in ("a/1", "a/2", "a/5", "b/0"))
    total = 0
    for _ in range(30):
        prompts, dropped = drawn.take(6)
        total += dropped
        assert of_pools(prompts) == {"a": 3, "b": 3}
    (taken_a, drawn_a), (taken_b, drawn_b) = drawn.position
    assert (taken_a, taken_b) == (90, 90) and total == drawn_a + drawn_b - 180
    assert drawn_a - 90 in (44, 45) and drawn_b - 90 in (11, 12)  # a loses 3 of 9, b 1 of 9


def test_a_stream_that_is_set_to_a_position_goes_on_as_if_it_had_never_stopped() -> None:
    pools = (pool("a", 0.3, 5), pool("b", 0.7, 11))

    def fits(problem: Problem) -> bool:
        return problem.id not in ("a/1", "b/3")

    whole, at = stream(*pools, fits=fits), []
    told = []
    for _ in range(12):
        at.append(whole.position)
        told.append(whole.take(7))
    for number, position in enumerate(at):
        resumed = stream(*pools, fits=fits)
        resumed.position = position
        assert [resumed.take(7) for _ in range(number, 12)] == told[number:]
        assert resumed.position == whole.position
        whole_again = [whole.position]
        resumed.take(1)
        assert [whole.position] == whole_again  # nobody shares a list with it
    whole.position = at[4]  # back, too
    assert whole.take(7) == told[4]


@pytest.mark.parametrize("seed", range(20))
def test_one_problem_that_fits_is_found_wherever_it_stands(seed: int) -> None:
    drawn = stream(pool("a", 1.0, 6), fits=lambda problem: problem.id == "a/4", seed=seed)
    prompts, dropped = drawn.take(10)
    assert ids(prompts) == ["a/4"] * 10 and 45 <= dropped <= 50 + 5


def test_a_pool_of_which_nothing_fits_is_named() -> None:
    drawn = stream(pool("a", 0.5, 3), pool("b", 0.5, 4), fits=lambda problem: problem.id[0] == "a")
    assert drawn.first().problem.id == "a/0"
    with pytest.raises(
        ValueError, match=r"^data: all 4 problems of b are too long for the context beside rollout.max_len, or for prompt"
    ):
        drawn.take(2)
    with pytest.raises(ValueError, match=r"^data: all 7 problems of a and b are too long"):
        stream(pool("a", 0.5, 3), pool("b", 0.5, 4), fits=lambda _: False).first()


def test_who_has_which_problem() -> None:
    drawn = stream(pool("a", 0.5, 1), pool("b", 0.5, 2))
    assert drawn.pool_of == {"a/0": "a", "b/0": "b", "b/1": "b"}


def test_the_digest_sees_every_field_and_the_order() -> None:
    one, other = pool("a", 1.0, 2).problems
    marks = {digest([one, other]), digest([other, one]), digest([one])}
    for field in ("id", "text", "solution", "answer"):
        changed = pool("a", 1.0, 2).problems
        setattr(changed[0], field, "else")
        marks.add(digest(changed))
    assert len(marks) == 7
