"""The plan of a study: its runs, how long they take, from a few timed steps, and the disk space that they need."""

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vicinal.errors import VicinalError
from vicinal.studies.arm_facts import ArmFacts, check_arms, facts_key
from vicinal.studies.spec import Condition
from vicinal.studies.study_folder import RunState
from vicinal.studies.study_path import OpenedStudy, open_study
from vicinal.text_table import text_table
from vicinal.training.accelerator import make_accelerator
from vicinal.training.config import TrainConfig
from vicinal.training.setup import TrainState, prepare
from vicinal.training.train_step import train_step

__all__ = ["ArmPlan", "StudyPlan", "plan_study"]

TIMED_STEPS = 4
"""The first is not counted."""
START_SECONDS = 6.0
"""Time until a run's process has imported torch and timm."""
BYTES_PER_IMAGE = 60
"""Of predictions.csv and data.csv.gz."""
BYTES_PER_EPOCH = 120
"""Of metrics.csv."""


@dataclass(frozen=True)
class ArmPlan:
    """The runs of an arm under a condition."""

    condition: str
    arm: str
    facts: ArmFacts
    runs: int
    """Number of seeds."""
    left: int
    """Runs that are not finished."""
    step_seconds: float
    run_seconds: float
    """Estimated time of one run."""
    run_bytes: int
    """Disk space of one finished run."""
    checkpoint_bytes: int
    """Disk space of its checkpoints while it runs."""


@dataclass(frozen=True)
class StudyPlan:
    """The runs of a study with their cost. `print` shows the table."""

    name: str
    question: str
    folder: Path
    arms: tuple[ArmPlan, ...]
    jobs: int
    threads: int

    @property
    def seconds(self) -> float:
        """Estimated time of what is left."""
        return sum(arm.left * arm.run_seconds for arm in self.arms) / self.jobs

    @property
    def disk_bytes(self) -> int:
        """Disk space of all runs, and of the checkpoints of those that run at a time."""
        checkpoints = max((arm.checkpoint_bytes for arm in self.arms if arm.left), default=0)
        return sum(arm.runs * arm.run_bytes for arm in self.arms) + self.jobs * checkpoints

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Returns a line for each arm under each condition, and one with the sums."""
        has_conditions = any(arm.condition for arm in self.arms)
        header = ["arm", "runs", "left", "images", "steps", "pooling", "parameters", "of the prior", "one run"]
        rows = [["condition"] * has_conditions + header]
        for arm in self.arms:
            facts = arm.facts
            rows.append(
                [arm.condition] * has_conditions
                + [arm.arm, str(arm.runs), str(arm.left), f"{facts.train_images:,}", f"{facts.steps:,}"]
                + [facts.pooling or "-", f"{facts.parameters:,}", f"{facts.prior_parameters:,}"]
                + [tqdm.format_interval(round(arm.run_seconds))]
            )
        left, runs = sum(arm.left for arm in self.arms), sum(arm.runs for arm in self.arms)
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        total = (
            f"{left} of {runs} runs left: about {tqdm.format_interval(round(self.seconds))} with --jobs {self.jobs} "
            f"and {threads} each, from "
            f"{TIMED_STEPS - 1} timed steps of each arm; {self.disk_bytes / 1e6:,.0f} MB in {self.folder}"
        )
        right = {index for index, name in enumerate(rows[0]) if name not in ("condition", "arm", "pooling")}
        return "\n\n".join(filter(None, (self.question, text_table(rows, right=right), total)))


def plan_study(
    source: str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    jobs: int = 1,
    device: str | None = None,
) -> StudyPlan:
    """Returns the plan of a study, which it does not start.

    Args:
        source: the name of a ready study, a YAML file, the folder of a study, or the content of a file as a mapping.
        out: folder of the study; `runs/NAME` by default.
        jobs: number of runs at a time.
        device: of all runs, as in `TrainConfig`.

    Raises:
        VicinalError: if the definition cannot be used, or arms differ in more than they compare.
    """
    if jobs < 1:
        raise VicinalError(f"jobs must be at least 1, got {jobs}")
    opened = open_study(source, out)
    record = opened.folder.record() if opened.folder.exists else None
    device = device or (record.device if record else "auto")
    with _threads(opened.spec.threads):
        arms = {
            facts_key(arm, condition): _plan_arm(opened, arm, condition, device)
            for condition, arm in itertools.product(opened.spec.conditions, opened.spec.arms)
        }
    facts = {key: asdict(each.facts) for key, each in arms.items()}
    check_arms(opened.spec, facts, opened.folder.folder, opened.directory)
    return StudyPlan(
        opened.name, opened.spec.question, opened.folder.folder, tuple(arms.values()), jobs, opened.spec.threads
    )


def _plan_arm(opened: OpenedStudy, arm: str, condition: Condition, device: str) -> ArmPlan:
    spec, folder = opened.spec, opened.folder
    runs = [
        spec.planned_run(arm, condition, seed, folder.folder, opened.directory, device=device) for seed in spec.seeds
    ]
    config = runs[0].config
    started = time.monotonic()
    try:
        state = prepare(config, make_accelerator(config))
    except VicinalError as error:
        raise spec.located(error, arm, condition) from None
    preparation = time.monotonic() - started
    step_seconds, image_seconds = _time_steps(state, config)
    evaluated = state.length.epochs * len(state.val.images) + len(state.val.images) + len(state.test.images)
    weights = 4 * sum(each.numel() for each in state.raw_model.state_dict().values())
    images = len(state.train.images) + len(state.val.images) + len(state.test.images)
    return ArmPlan(
        condition=condition.name,
        arm=arm,
        facts=ArmFacts.of_state(state),
        runs=len(runs),
        left=sum(folder.status(run.name).state is not RunState.FINISHED for run in runs),
        step_seconds=step_seconds,
        run_seconds=START_SECONDS + preparation + state.length.steps * step_seconds + evaluated * image_seconds,
        run_bytes=weights + BYTES_PER_IMAGE * images + BYTES_PER_EPOCH * state.length.epochs,
        checkpoint_bytes=2 * weights * (3 if config.ema is None else 4),
    )


def _time_steps(state: TrainState, config: TrainConfig) -> tuple[float, float]:
    """Returns the median time of a training step, and that of evaluating one image; the state is changed."""
    times, images = [], torch.empty(0)
    batches = itertools.islice(itertools.chain.from_iterable(map(state.train.batches, itertools.count())), TIMED_STEPS)
    for step, (images, labels) in enumerate(batches):
        started = time.monotonic()
        train_step(state, config, step, images, labels).item()  # waits for a GPU
        times.append(time.monotonic() - started)
    model, first = state.eval_model.eval(), next(state.raw_model.parameters())
    with torch.inference_mode():
        started = time.monotonic()
        model(images.to(first.device, first.dtype)).sum().item()
        evaluation = time.monotonic() - started
    return statistics.median(times[1:] or times), evaluation / len(images)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Sets the number of threads of torch inside of `with`."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
