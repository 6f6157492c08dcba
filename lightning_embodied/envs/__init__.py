"""Gymnasium environments for robots, with scripted experts.

Importing this package registers `lightning_embodied/MetaWorld-v0` and `lightning_embodied/Tabletop-v0`; the simulator
itself is imported when an environment is made.
"""

from lightning_embodied.errors import import_extra

gymnasium = import_extra("gymnasium", "sim")

from lightning_embodied.envs.action_chunk import ActionChunkWrapper  # noqa: E402
from lightning_embodied.envs.embodied_env import EmbodiedEnv, Expert  # noqa: E402
from lightning_embodied.envs.metaworld_env import METAWORLD_CAMERAS, MetaWorldEnv, MetaWorldExpert  # noqa: E402
from lightning_embodied.envs.metaworld_tasks import METAWORLD_INSTRUCTIONS  # noqa: E402
from lightning_embodied.envs.opengl import opengl_backend  # noqa: E402
from lightning_embodied.envs.processes import WorkerProcess, default_workers  # noqa: E402
from lightning_embodied.envs.tabletop_env import TABLETOP_INSTRUCTIONS, TabletopEnv, TabletopExpert  # noqa: E402
from lightning_embodied.envs.vector_env import SlotVectorEnv, make_env, make_vector_env  # noqa: E402

__all__ = [
    "METAWORLD_CAMERAS",
    "METAWORLD_INSTRUCTIONS",
    "TABLETOP_INSTRUCTIONS",
    "ActionChunkWrapper",
    "EmbodiedEnv",
    "Expert",
    "MetaWorldEnv",
    "MetaWorldExpert",
    "SlotVectorEnv",
    "TabletopEnv",
    "TabletopExpert",
    "WorkerProcess",
    "default_workers",
    "make_env",
    "make_vector_env",
    "opengl_backend",
]

for _id, _entry in {"MetaWorld-v0": "metaworld_env:MetaWorldEnv", "Tabletop-v0": "tabletop_env:TabletopEnv"}.items():
    gymnasium.register(
        id=f"lightning_embodied/{_id}",
        entry_point=f"lightning_embodied.envs.{_entry}",
        disable_env_checker=True,
        order_enforce=False,
    )
