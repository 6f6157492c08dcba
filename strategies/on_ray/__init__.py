"""Running a Trainer on Ray: launcher, workers, and what both orchestrations share."""
