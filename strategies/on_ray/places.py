"""Where the actors of warm restarts live: room that Ray's placement groups hold while actors come and go.

A fixed number of workers has one group, placed as a whole or not at all. An elastic number has a group for each worker:
those that find room run, the others stay as requests that Ray, and its autoscaler, fulfil once there are nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lightning_embodied.strategies.on_ray.cluster import no_room

if TYPE_CHECKING:
    from lightning_embodied.strategies.on_ray.options import RayOptions

_SETTLE_SECONDS = 2.0  # in which Ray places what there is room for
_POLL_SECONDS = 0.5


class Place:
    """Room for one worker, and the actor in it.

    Args:
        group: Placement group.
        bundle: Which of its bundles.

    Attributes:
        actor: Handle; None where there is none.
        node: Reference to Ray's id of its node, there once the actor is ready.
    """

    def __init__(self, group: Any, bundle: int) -> None:
        self.group, self.bundle = group, bundle
        self.actor: Any = None
        self.node: Any = None

    def ask(self, start: Callable[[PlacementGroupSchedulingStrategy], Any]) -> None:
        """Starts the actor if there is none, and asks whether it is ready."""
        if self.actor is None:
            self.actor = start(PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle))
        self.node = self.actor.node.remote()

    def empty(self) -> None:
        """Ends the actor; the room stays."""
        if self.actor is not None:
            ray.kill(self.actor)
        self.actor = self.node = None

    def has_room(self) -> bool:
        """Whether Ray has found room, as far as it knows."""
        return bool(placement_group_table(self.group).get("state") == "CREATED")


class Places:
    """Room for all workers that there may be.

    Args:
        options: Of the strategy.
        start: Starts an actor in a place.
    """

    def __init__(self, options: RayOptions, start: Callable[[PlacementGroupSchedulingStrategy], Any]) -> None:
        self._start = start
        self._least, self._most = options.worker_range
        self._bundle = options.resources
        self._strategy = options.placement.upper()
        self._places: list[Place] = []

    def fill(self, options: RayOptions) -> list[tuple[Place, str]]:
        """Waits for the actors of all places that have room, and starts those that are missing.

        Args:
            options: Of the strategy, for how long to wait.

        Returns:
            Each with its node; those of one node are neighbours.

        Raises:
            ConfigError: There is no room for the least number of workers.
        """
        self._reserve()
        deadline, why = time.monotonic() + options.start_timeout, f"after {options.start_timeout:g} s"
        for place in self._places:
            place.ask(self._start)
        while time.monotonic() < deadline:
            expected = [place for place in self._places if self._is_fixed or place.has_room()]
            refs = [place.node for place in expected]
            ready = ray.wait(refs, num_returns=len(refs), timeout=_POLL_SECONDS)[0] if refs else []
            if len(ready) == len(refs) >= self._least:
                lost = self.replace_dead()
                if not lost:
                    return _by_node([(place, ray.get(place.node)) for place in expected])
                why = lost
        raise no_room(ray, options, why)

    def coming(self, there: list[Place]) -> list[Any]:
        """References that are ready when workers are that were not.

        Args:
            there: Those that are.
        """
        return [place.node for place in self._places if place not in there]

    def replace_dead(self) -> str:
        """Starts anew the actors that died before they were ready; tells of one of them."""
        lost = ""
        for place in self._places:
            if ray.wait([place.node], timeout=0)[0]:
                try:
                    ray.get(place.node)
                except RayActorError as error:
                    lost = str(error)
                    place.empty()
                    place.ask(self._start)
        return lost

    def give_back_requests(self, there: list[Place]) -> None:
        """Takes back requests for more workers than there are, which would make an autoscaler start nodes."""
        for place in [place for place in self._places if place not in there] if not self._is_fixed else []:
            place.empty()
            remove_placement_group(place.group)
            self._places.remove(place)

    def close(self) -> None:
        """Ends all actors and gives their room back."""
        for place in self._places:
            place.empty()
        for group in {place.group.id: place.group for place in self._places}.values():
            remove_placement_group(group)
        self._places.clear()

    @property
    def _is_fixed(self) -> bool:
        return self._least == self._most

    def _reserve(self) -> None:
        """Asks Ray for the room that has not been asked for."""
        missing = self._most - len(self._places)
        if self._is_fixed and missing:
            group = placement_group([self._bundle] * self._most, strategy=self._strategy)
            self._places = [Place(group, bundle) for bundle in range(self._most)]
        elif missing:
            new = [Place(placement_group([self._bundle]), 0) for _ in range(missing)]
            self._places += new
            deadline = time.monotonic() + _SETTLE_SECONDS
            for place in new:
                place.group.wait(max(0.0, deadline - time.monotonic()))


def _by_node(workers: list[tuple[Place, str]]) -> list[tuple[Place, str]]:
    """Brings workers of the same node together, nodes in order of appearance."""
    order = list(dict.fromkeys(node for _, node in workers))
    return sorted(workers, key=lambda worker: order.index(worker[1]))
