"""Fast offscreen pictures of MuJoCo scenes: no shadows, no reflections, no multisampling, simplified meshes.

Software OpenGL at 64 px spends its time on shadows (93 %) and then on the vertices of the robot's meshes, not on
pixels. Vertices are merged on a 5 mm grid in the copy of the model that goes to the graphics side; physics keeps its
own. One graphics context per scene file is shared by all environments of a process: building one takes half a second.
"""

from __future__ import annotations

import atexit
import copy
import weakref
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_embodied.envs.opengl import import_mujoco, missing_opengl, opengl_context

if TYPE_CHECKING:
    from mujoco import MjData, MjModel, MjvCamera

MAX_PICTURE_SIZE = 512
_GRID = 0.005
_SMALL_MESH = 500

_contexts: weakref.WeakValueDictionary[str, GraphicsContext] = weakref.WeakValueDictionary()


class GraphicsContext:
    """The graphics side of one MuJoCo scene file in this process (its meshes and textures, on the GPU or in Mesa).

    Args:
        model: An `MjModel` of the scene.

    Raises:
        MissingExtraError: This machine cannot render offscreen.
    """

    def __init__(self, model: MjModel) -> None:
        mujoco = import_mujoco()
        self._mujoco = mujoco
        simplified = _simplified(model)
        simplified.vis.quality.offsamples = 0
        simplified.vis.global_.offwidth = simplified.vis.global_.offheight = MAX_PICTURE_SIZE
        self._gl = opengl_context(MAX_PICTURE_SIZE)
        try:
            self._context = mujoco.MjrContext(simplified, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        except mujoco.FatalError as error:
            self._gl.free()
            self._gl = None
            raise missing_opengl(error) from error
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
        self._scene = mujoco.MjvScene(model=simplified, maxgeom=1000)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = False
        self._option = mujoco.MjvOption()
        self._perturb = mujoco.MjvPerturb()
        # EGL is shut down by an exit handler that MuJoCo registered; ours, registered later, runs before it.
        self._at_exit = atexit.register(self.close)

    def render(self, model: MjModel, data: MjData, camera: MjvCamera, size: int) -> NDArray[np.uint8]:
        """Draws a scene.

        Args:
            model: The environment's own `MjModel`.
            data: Its `MjData`, with positions computed.
            camera: An `MjvCamera`.
            size: Width and height in pixels, at most `MAX_PICTURE_SIZE`.

        Returns:
            `[size, size, 3]`, the first row at the top.
        """
        mujoco = self._mujoco
        self._gl.make_current()
        every = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(model, data, self._option, self._perturb, camera, every, self._scene)
        viewport = mujoco.MjrRect(0, 0, size, size)
        mujoco.mjr_render(viewport, self._scene, self._context)
        pixels = np.empty((size, size, 3), dtype=np.uint8)
        mujoco.mjr_readPixels(pixels, None, viewport, self._context)
        return pixels[::-1]

    def close(self) -> None:
        """Frees the context."""
        if self._gl is not None:
            atexit.unregister(self._at_exit)
            self._gl.make_current()
            self._context.free()
            self._gl.free()
            self._gl = None

    def __del__(self) -> None:
        if getattr(self, "_gl", None) is not None:
            self.close()


def graphics_context(scene_file: str, model: MjModel) -> GraphicsContext:
    """The context of a scene file; made at the first request in a process, freed with its last user."""
    context = _contexts.get(scene_file)
    if context is None:
        context = _contexts[scene_file] = GraphicsContext(model)
    return context


def _simplified(model: MjModel) -> MjModel:
    """A copy of a model whose larger meshes have their vertices merged on a grid."""
    simplified = copy.copy(model)
    for mesh in np.flatnonzero(model.mesh_facenum >= _SMALL_MESH):
        vertex, face, faces = model.mesh_vertadr[mesh], model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
        vertices = model.mesh_vert[vertex : vertex + model.mesh_vertnum[mesh]]
        cells = np.floor(vertices / _GRID).astype(np.int64)
        _, first, cell = np.unique(cells, axis=0, return_index=True, return_inverse=True)
        corners = first[cell.reshape(-1)][model.mesh_face[face : face + faces]]
        a, b, c = corners.T
        kept = np.flatnonzero((a != b) & (b != c) & (c != a))
        _, distinct = np.unique(np.sort(corners[kept], axis=1), axis=0, return_index=True)
        kept = kept[np.sort(distinct)]
        target = slice(face, face + len(kept))
        simplified.mesh_face[target] = corners[kept]
        for name in ("mesh_facenormal", "mesh_facetexcoord"):
            getattr(simplified, name)[target] = getattr(model, name)[face : face + faces][kept]
        simplified.mesh_facenum[mesh] = len(kept)
    return simplified
