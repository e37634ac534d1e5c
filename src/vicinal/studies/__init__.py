"""From configurations and seeds to evidence: statistics of runs that are paired by seed."""
