"""PyTorch Lightning plugins for training vision-language-action policies.

Every room (`data`, `packing`, `attention`, `models`, `envs`, `evaluation`, `callbacks`, …) is useful alone;
importing this package imports none of them, so it stays cheap.
"""

from pathlib import Path

from lightning_embodied.version import __version__

__all__ = ["__version__"]

# In a checkout `callbacks/`, `strategies/` and `configs/` lie beside this package; a wheel maps them into it.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "strategies").is_dir():
    __path__.append(str(_root))
