"""Gymnasium environments for robots, with scripted experts.

Importing this package registers `lightning_embodied/MetaWorld-v0`; the simulator itself is imported
when an environment is made.
"""

from lightning_embodied.errors import import_extra

gymnasium = import_extra("gymnasium", "sim")

from lightning_embodied.envs.embodied_env import EmbodiedEnv, Expert  # noqa: E402
from lightning_embodied.envs.metaworld_env import METAWORLD_CAMERAS, MetaWorldEnv, MetaWorldExpert  # noqa: E402
from lightning_embodied.envs.metaworld_tasks import METAWORLD_INSTRUCTIONS  # noqa: E402
from lightning_embodied.envs.opengl import opengl_backend  # noqa: E402

__all__ = [
    "METAWORLD_CAMERAS",
    "METAWORLD_INSTRUCTIONS",
    "EmbodiedEnv",
    "Expert",
    "MetaWorldEnv",
    "MetaWorldExpert",
    "opengl_backend",
]

gymnasium.register(
    id="lightning_embodied/MetaWorld-v0",
    entry_point="lightning_embodied.envs.metaworld_env:MetaWorldEnv",
    disable_env_checker=True,
    order_enforce=False,
)
