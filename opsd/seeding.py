"""One seed, derived streams: every random draw of a run is a pure function of (seed, stream name, position), so that a resumed
run draws what an uninterrupted one would have drawn, and no stream shifts when another draws more."""

from __future__ import annotations

import hashlib


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream that `names` spell, e.g. `derive(seed, "rollout", step, problem_id, sample)`."""
    text = "/".join([str(seed), *(f"{type(name).__name__}:{name}" for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
