"""The `none` prior: unmodified attention, for baselines."""

from vicinal.priors.base import Prior

__all__ = ["NoPrior"]


class NoPrior(Prior):
    """Leaves attention unmodified."""


if __name__ == "__main__":
    from vicinal.priors.plot import main

    main("none")
