"""What an arm is made of, measured on its model and data, and whether arms differ in more than they compare."""

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vicinal.attachment import get_priors
from vicinal.errors import VicinalError
from vicinal.studies.spec import PARAMETERS, Condition, StudySpec
from vicinal.training.accelerator import make_accelerator
from vicinal.training.config import TrainConfig
from vicinal.training.run_folder import with_absolute_paths
from vicinal.training.setup import TrainState, prepare

__all__ = ["ArmFacts", "check_arms", "facts_key", "measure_arms"]

PARAMETER_TOLERANCE = 0.01
LENGTH_FIELDS = {"epochs", "steps", "batch_size", "train_size", "val_size", "dataset"}
"""Settings that the number of steps follows from."""


@dataclass(frozen=True)
class ArmFacts:
    """Facts about the runs of an arm under a condition."""

    pooling: str | None
    steps: int
    train_images: int
    parameters: int
    """Outside of priors."""
    prior_parameters: int

    @classmethod
    def of_state(cls, state: TrainState) -> "ArmFacts":
        """Returns the facts of a run before its first step."""
        priors = {id(each): each for prior in get_priors(state.raw_model).values() for each in prior.parameters()}
        total = sum(each.numel() for each in state.raw_model.parameters())
        of_priors = sum(each.numel() for each in priors.values())
        pooling = getattr(state.raw_model, "global_pool", None)
        return cls(
            pooling=pooling if isinstance(pooling, str) else None,
            steps=state.length.steps,
            train_images=len(state.train.images),
            parameters=total - of_priors,
            prior_parameters=of_priors,
        )


def facts_key(arm: str, condition: Condition) -> str:
    """Returns the key of an arm under a condition among measured facts."""
    return "-".join(filter(None, (condition.name, arm)))


def measure_arms(
    spec: StudySpec, folder: Path, directory: Path, device: str, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the facts of every arm under every condition, and the configuration that they belong to, by `facts_key`.

    Args:
        spec: the study.
        folder: of the study.
        directory: that relative paths of data start at.
        device: of all runs.
        known: facts that were measured before; those of unchanged configurations are not measured again.

    Raises:
        VicinalError: with file, line and field, if a dataset or a model cannot be opened.
    """
    found = {}
    for condition, arm in itertools.product(spec.conditions, spec.arms):
        config = spec.planned_run(arm, condition, spec.seeds[0], folder, directory, device).config
        key, text = facts_key(arm, condition), with_absolute_paths(config).changed(out=None, seed=0).to_yaml()
        if key in known and known[key]["config"] == text:
            found[key] = known[key]
            continue
        try:
            state = prepare(config, make_accelerator(config))
        except VicinalError as error:
            raise spec.located(error, arm, condition) from None
        found[key] = {"config": text, **asdict(ArmFacts.of_state(state))}
    return found


def check_arms(spec: StudySpec, facts: Mapping[str, Mapping[str, Any]], folder: Path, directory: Path) -> None:
    """Raises VicinalError if an arm differs from the baseline in more than one setting that `also_differs` lacks.

    Args:
        spec: the study.
        facts: from `measure_arms`.
        folder: of the study.
        directory: that relative paths of data start at.
    """
    for condition, arm in itertools.product(spec.conditions, spec.arms):
        configs = [
            spec.planned_run(name, condition, spec.seeds[0], folder, directory).config for name in (arm, spec.baseline)
        ]
        own, base = (facts[facts_key(name, condition)] for name in (arm, spec.baseline))
        named = _differing_fields(*configs)
        unnamed = [name for name in named if name not in spec.also_differs]
        if len(unnamed) > 1:
            raise spec.file.error(
                ("arms", arm),
                f"differs from the baseline {spec.baseline} in {' and '.join(unnamed)}; an arm changes one setting, "
                f"unless the others are listed: `also_differs: [{', '.join(unnamed[1:])}]`",
            )
        for name, problem in _measured_differences(own, base, set(named)).items():
            if name not in spec.also_differs:
                raise spec.file.error(
                    ("arms", arm),
                    f"{problem} of the baseline {spec.baseline}; make them equal, or add `also_differs: [{name}]`",
                )


def _differing_fields(one: TrainConfig, other: TrainConfig) -> list[str]:
    names = [name for name in TrainConfig.__dataclass_fields__ if name != "out"]
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def _measured_differences(own: Mapping[str, Any], base: Mapping[str, Any], named: set[str]) -> dict[str, str]:
    """Returns what differs though the arm does not name it: a part of a sentence, by the name for `also_differs`."""
    found = {}
    if own["pooling"] != base["pooling"] and "pool" not in named:
        found["pool"] = f"has the pooling {own['pooling']} in place of {base['pooling']}"
    if own["steps"] != base["steps"] and not named & LENGTH_FIELDS:
        found["steps"] = f"has {own['steps']:,} steps in place of {base['steps']:,}"
    if abs(own["parameters"] - base["parameters"]) > PARAMETER_TOLERANCE * base["parameters"]:
        found[PARAMETERS] = (
            f"has {own['parameters']:,} parameters outside of the prior in place of {base['parameters']:,}"
        )
    return found
