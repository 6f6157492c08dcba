"""A script as Lightning's documentation writes it; what runs on Ray is decided by its YAML."""

from lightning.pytorch.cli import LightningCLI

from tests.strategies.ray_models import Data, Regression

if __name__ == "__main__":
    LightningCLI(Regression, Data, seed_everything_default=5)
