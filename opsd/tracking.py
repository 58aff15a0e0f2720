"""Where a run is recorded: one flat MLflow run, and metrics.jsonl beside it, always.

The launcher makes the store, the experiment and the run (many jobs that create a store at once trip over its migrations) and hands
the run's id to the job, which attaches to it; a resumed job goes on with the same run.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsd.files import write_whole

if TYPE_CHECKING:
    from mlflow import MlflowClient

OBJECTIVE, EVALUATION = "train/objective", "time/evaluation_s"  # what every step's, every evaluation's line has
UI_ADDRESS = "http://127.0.0.1:5000"
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}  # the UI's view for training, not for prompts and traces
FLUSH_S = 2.0  # metrics are sent in one call at most this often, and before every checkpoint and exit


@dataclass(kw_only=True, slots=True)
class Store:
    """An MLflow tracking store with its experiment."""

    uri: str
    experiment_id: str


class TrackingError(ValueError):
    """The record could not be kept."""


def store_uri() -> str:
    """MLFLOW_TRACKING_URI, or the sqlite file mlflow.db in the working directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


def client(uri: str) -> MlflowClient:
    """A client that gives up on an unreachable server within seconds instead of minutes."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "CRITICAL")  # pages of traceback of whatever it also raises
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    import mlflow

    mlflow.set_tracking_uri(uri)
    return mlflow.MlflowClient(tracking_uri=uri)


@contextmanager
def explained(what: str, uri: str) -> Iterator[None]:
    """MLflow's failures as one message that names the store and the remedy."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, RequestException, SQLAlchemyError, OSError) as error:
        said = [line for line in str(error).splitlines() if not line.startswith("(raised as a result of")]  # SQLAlchemy's aside
        reason = (said or [type(error).__name__])[0].replace(uri, without_secrets(uri))[:300]
        local = uri.startswith("sqlite:")
        remedy = "make sure that the file is there, writable and not held by another program" if local else "start the server"
        raise TrackingError(
            f"MLFLOW_TRACKING_URI={without_secrets(uri)}: {what} failed ({reason}); {remedy}, correct the address, "
            "or unset the variable to use mlflow.db in the working directory."
        ) from error


def without_secrets(uri: str) -> str:
    """The address without a user name or password."""
    return re.sub(r"://[^/@\s]*@", "://", uri)


def prepare(experiment: str) -> Store:
    """Makes sure that the store and the experiment exist.

    Raises:
        TrackingError: the store cannot be reached or written.
    """
    uri = store_uri()
    if "://" not in uri or uri.startswith("file:"):
        raise TrackingError(
            f"MLFLOW_TRACKING_URI={uri}: MLflow keeps no runs in plain directories any more; set sqlite:///FILE.db or a server's "
            "address."
        )
    with explained("reaching the tracking store", uri):
        if uri.startswith("http"):
            answers(uri)
        if uri.startswith("sqlite:///"):
            opens(Path(uri.removeprefix("sqlite:///")))
        mlflow = client(uri)
        found = mlflow.get_experiment_by_name(experiment)
        if found is None:
            artifacts = Path(uri.removeprefix("sqlite:///")).parent / "mlartifacts" if uri.startswith("sqlite:///") else None
            location = artifacts.absolute().as_uri() if artifacts else None
            made = mlflow.create_experiment(experiment, artifact_location=location, tags=EXPERIMENT_TAGS)
            return Store(uri=uri, experiment_id=made)
        if found.lifecycle_stage == "deleted":
            mlflow.restore_experiment(found.experiment_id)
        return Store(uri=uri, experiment_id=found.experiment_id)


def opens(file: Path) -> None:
    """Asks whether a database can be written, which MLflow tries fifteen times over before it says no."""
    standing = next(path for path in (file, *file.absolute().parents) if path.exists())
    if not os.access(standing, os.W_OK):
        raise OSError(f"{standing} cannot be written")


def answers(uri: str) -> None:
    """Asks a server whether it is there, which MLflow's own first call takes minutes to find out."""
    import requests

    try:
        requests.get(f"{uri.rstrip('/')}/health", timeout=5)
    except requests.exceptions.RequestException as error:
        raise OSError(f"no answer within 5 s, {type(error).__name__}") from error


def create_run(store: Store, *, name: str, params: dict[str, str], tags: dict[str, str]) -> str:
    """A new run with its parameters; its id."""
    from mlflow.entities import Param

    mlflow = client(store.uri)
    with explained("creating a run", store.uri):
        run_id = mlflow.create_run(store.experiment_id, run_name=name, tags=tags).info.run_id
        entries = [Param(key, value) for key, value in params.items()]
        try:
            for start in range(0, len(entries), 100):  # the server's limit for one call
                mlflow.log_batch(run_id, params=entries[start : start + 100])
        except BaseException:
            mlflow.delete_run(run_id)
            raise
    return run_id


def tag_run(store: Store, run_id: str, tags: dict[str, str]) -> None:
    mlflow = client(store.uri)
    with explained("tagging a run", store.uri):
        for key, value in tags.items():
            mlflow.set_tag(run_id, key, value)


def log_metrics(store: Store, run_id: str, step: int, metrics: dict[str, float]) -> None:
    """Metrics of one step, into a run that need not be running."""
    from mlflow.entities import Metric

    mlflow, now = client(store.uri), int(time.time() * 1000)
    with explained("logging metrics", store.uri):
        mlflow.log_batch(run_id, metrics=[Metric(key, value, now, step) for key, value in metrics.items()])


def has_metric(store: Store, run_id: str, key: str, step: int) -> bool:
    """Whether a run has a value of a metric at a step."""
    mlflow = client(store.uri)
    with explained("reading metrics", store.uri):
        return any(entry.step == step for entry in mlflow.get_metric_history(run_id, key))


def delete_run(store: Store, run_id: str) -> None:
    """Takes back a run whose job was never started."""
    mlflow = client(store.uri)
    with explained("deleting a run", store.uri):
        mlflow.delete_run(run_id)


def end_run(store: Store, run_id: str, status: str) -> None:
    """FINISHED, FAILED or KILLED, for a run whose job did not get to say so itself."""
    mlflow = client(store.uri)
    with explained("ending a run", store.uri):
        mlflow.set_terminated(run_id, status)


def run_url(store: Store, run_id: str) -> str:
    """Where the run is seen: on the server, or on the UI that `ui_command` starts."""
    base = without_secrets(store.uri) if store.uri.startswith("http") else UI_ADDRESS
    return f"{base}/#/experiments/{store.experiment_id}/runs/{run_id}"


def ui_command(store: Store) -> str | None:
    """The command that serves a local store; None where a server is there already."""
    return None if store.uri.startswith("http") else f"mlflow ui --backend-store-uri {without_secrets(store.uri)}"


class Tracker:
    """A run's record while its job runs. Metrics go to metrics.jsonl at once and to MLflow in batches.

    Args:
        run_dir: where metrics.jsonl stands.
        store, run_id: the MLflow run to attach to.
        step: the checkpoint that the job starts from; lines of metrics.jsonl beyond it are cut back, since those steps will be
            taken again, and are not sent to MLflow twice.
    """

    def __init__(self, run_dir: Path, store: Store, run_id: str, *, step: int, system_metrics: bool) -> None:
        self.store, self.run_id, self.file = store, run_id, run_dir / "metrics.jsonl"
        self.pending: list[tuple[int, dict[str, float]]] = []
        self.flushed_at = time.monotonic()
        self.mlflow = client(store.uri)
        self.lines = cut_back(self.file, step)
        with explained("attaching to the run", store.uri):
            import mlflow

            mlflow.start_run(run_id=run_id, log_system_metrics=system_metrics)
            self.sent = {key: self._steps(key) for key in (OBJECTIVE, EVALUATION)}
        self.ended = False
        atexit.register(self._abandon)  # runs before MLflow's own handler, which would call the run FINISHED
        for line in self.lines:
            self._send(line)
        self.flush()

    def _steps(self, metric: str) -> set[int]:
        """The steps that MLflow has a metric for."""
        return {entry.step for entry in self.mlflow.get_metric_history(self.run_id, metric)}

    def _send(self, line: dict[str, Any]) -> None:
        """Queues a line for MLflow, unless an earlier job that took the same step has sent it."""
        mark = EVALUATION if EVALUATION in line["timings"] else OBJECTIVE
        if line["step"] not in self.sent[mark]:
            values = {key: value for key, value in line.items() if key not in ("step", "timings")}
            self.pending.append((line["step"], values | line["timings"]))

    def _abandon(self) -> None:
        """The process ends and nobody has said how the run did."""
        if not self.ended:
            import mlflow

            mlflow.end_run("FAILED")

    def log(self, step: int, metrics: dict[str, float], *, timings: dict[str, float]) -> None:
        """One line of metrics.jsonl. `timings` differ between two runs of one command; everything else must not."""
        line = {"step": step, **metrics, "timings": timings}
        with self.file.open("a") as out:
            out.write(json.dumps(line) + "\n")
        self.lines.append(line)
        self._send(line)
        if time.monotonic() - self.flushed_at > FLUSH_S:
            self.flush()

    def has(self, step: int, timing: str) -> bool:
        """Whether what takes this time has been logged for a step, in this job or before it."""
        return any(line["step"] == step and timing in line["timings"] for line in self.lines)

    def flush(self) -> None:
        """Sends what is pending.

        Raises:
            TrackingError: the store is gone; the run must stop, since it would go on unrecorded.
        """
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entries = [Metric(key, value, now, step) for step, metrics in self.pending for key, value in metrics.items()]
        with explained("logging metrics", self.store.uri):
            for start in range(0, len(entries), 1000):
                self.mlflow.log_batch(self.run_id, metrics=entries[start : start + 1000])
        self.pending.clear()
        self.flushed_at = time.monotonic()

    def artifact(self, path: Path, folder: str | None = None) -> None:
        with explained("storing an artifact", self.store.uri):
            self.mlflow.log_artifact(self.run_id, str(path), folder)

    def tag(self, tags: dict[str, str]) -> None:
        tag_run(self.store, self.run_id, tags)

    def close(self, status: str) -> None:
        """Flushes and ends the run as FINISHED, FAILED or KILLED."""
        import mlflow

        try:
            self.flush()
        finally:
            self.ended = True  # also where the store is gone: there is nobody left to tell
            with explained("ending the run", self.store.uri):
                mlflow.end_run(status)


class Unrecorded(Tracker):
    """The tracker of a rank that is not the first: it knows what has been logged, and neither writes nor sends."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.lines = lines

    def log(self, step: int, metrics: dict[str, float], *, timings: dict[str, float]) -> None:
        self.lines.append({"step": step, **metrics, "timings": timings})

    def flush(self) -> None:
        pass

    def artifact(self, path: Path, folder: str | None = None) -> None:
        pass

    def tag(self, tags: dict[str, str]) -> None:
        pass

    def close(self, status: str) -> None:
        pass


def cut_back(file: Path, step: int) -> list[dict[str, Any]]:
    """Keeps the lines of metrics.jsonl up to `step`, drops later ones and a torn last one; gives what was kept."""
    if not file.exists():
        return []
    kept = []
    for text in file.read_text().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:  # the line that was being written when the job was killed
            break
        if line["step"] <= step:
            kept.append(line)
    write_whole(file, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def recorded_in(run_dir: Path) -> tuple[Store, str]:
    """The store and the run id of a run directory."""
    return store_from(json.loads((run_dir / "launch.json").read_text()))


def store_from(launch: dict[str, Any]) -> tuple[Store, str]:
    """The store and run id that launch.json names."""
    entry = launch["mlflow"]
    uri = entry["uri"]
    if uri == without_secrets(store_uri()):  # the environment may hold the password, launch.json does not
        uri = store_uri()
    return Store(uri=uri, experiment_id=entry["experiment_id"]), entry["run_id"]


def store_entry(store: Store, run_id: str) -> dict[str, str]:
    """What launch.json says of the store; never a password."""
    return {"uri": without_secrets(store.uri), "experiment_id": store.experiment_id, "run_id": run_id}
