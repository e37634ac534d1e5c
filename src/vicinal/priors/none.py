"""None: attention as it is, the arm that every comparison needs."""

from vicinal.priors.base import Prior

__all__ = ["NoPrior"]


class NoPrior(Prior):
    """Changes nothing."""


if __name__ == "__main__":
    from vicinal.priors.plot import main

    main("none")
