"""What the last bits of a run depend on besides its configuration: threads, device, attention path and versions."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from typing import Any

import torch

from vicinal.attention.native import attention_path, prepare_native
from vicinal.training.device import find_device
from vicinal.training.run_folder import Run

__all__ = ["RunEnvironment"]

UNKNOWN = "unknown"


@dataclass(frozen=True)
class RunEnvironment:
    """The part of `environment.json` that has to be the same in all runs of a study."""

    threads: int
    device: str
    """`cpu`, or the name of the GPU."""
    attention: str
    """How attention is computed; `unknown` for a run of a version that did not record it."""
    vicinal: str
    """Version."""
    torch: str
    """Version."""

    @classmethod
    def current(cls, threads: int, device: str) -> "RunEnvironment":
        """Returns the environment of a run that would start now. Prepares the native library, which runs then find.

        Args:
            threads: of each run.
            device: as in `find_device`.
        """
        found = find_device(device)
        name = torch.cuda.get_device_name(found) if found.type == "cuda" else found.type
        if found.type == "cpu":
            prepare_native()
        return cls(threads, name, attention_path(found), version("vicinal"), version("torch"))

    @classmethod
    def of_record(cls, values: Mapping[str, Any]) -> "RunEnvironment":
        """Returns the environment that `environment.json` describes; each entry of its `resumed` has the same keys."""
        device = str(values.get("device", UNKNOWN))
        name = str(values.get("device_name", device)) if device.startswith("cuda") else device
        versions = values.get("versions", {})
        return cls(
            threads=values.get("threads", 0),
            device=name,
            attention=values.get("attention", UNKNOWN),
            vicinal=versions.get("vicinal", UNKNOWN),
            torch=versions.get("torch", UNKNOWN),
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields by name."""
        return asdict(self)

    def difference(self, expected: "RunEnvironment") -> str | None:
        """Returns a phrase such as `threads 2 in place of 1`; None if there is no difference."""
        differing = [field.name for field in fields(self) if getattr(self, field.name) != getattr(expected, field.name)]
        phrases = [f"{name} {getattr(self, name)} in place of {getattr(expected, name)}" for name in differing]
        return ", ".join(phrases) or None

    def differences(self, runs: Mapping[str, Run]) -> dict[str, str]:
        """Returns how runs were started, or resumed, in another environment than this one, by name.

        Args:
            runs: by name.
        """
        found = {}
        for name, run in runs.items():
            record = run.environment
            environments = [self.of_record(values) for values in (record, *record.get("resumed", []))]
            if phrases := dict.fromkeys(filter(None, (each.difference(self) for each in environments))):
                found[name] = "; ".join(phrases)
        return found
