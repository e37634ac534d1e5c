"""From a configuration to a run folder: `vicinal.fit(vicinal.TrainConfig(...))`."""
