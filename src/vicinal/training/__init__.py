"""From a configuration to a run folder: `vicinal.train(vicinal.TrainConfig(...))`."""
