"""Policies: the LightningModule to subclass, flow matching, checkpoints that run a robot."""
