"""Batches and soft labels."""

from vicinal.mixing.mixing import MODES as MODES
from vicinal.mixing.mixing import Mixing as Mixing
