"""Lightning strategies; they run any LightningModule and use nothing else of this project."""
