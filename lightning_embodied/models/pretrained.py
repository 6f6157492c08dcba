"""What policies with published weights share: a network of known sizes that checkpoint directories hold.

The network does not depend on the data, so it can be built, counted, loaded and exported without any; what depends on
it (statistics, token path) is the `PolicyModule`'s.
"""

from __future__ import annotations

from abc import abstractmethod
from os import PathLike
from typing import Any, Self

import torch
from torch import nn

from lightning_embodied.models.directory import CheckpointDirectory
from lightning_embodied.models.flow_module import FlowMatchingModule
from lightning_embodied.models.spec import PolicySpec


class PretrainedPolicy(FlowMatchingModule):
    """Base of flow-matching policies whose weights are published.

    Args:
        pretrained: Directory or hub id of a checkpoint to start from. The checkpoints that training writes hold all
            weights: `load_policy` needs the directory no more, only resuming looks for it again.
        kwargs: Options of `FlowMatchingModule` and `PolicyModule`.

    Attributes:
        model: The network; its parameters have their published names.
    """

    model: nn.Module

    def __init__(self, *, pretrained: str | None = None, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(**kwargs)
        self.pretrained = pretrained

    # What a subclass implements.

    @abstractmethod
    def check_spec(self, spec: PolicySpec) -> None:
        """Raises `ConfigError` if samples are encoded otherwise than the network reads them."""

    @classmethod
    @abstractmethod
    def open_directory(cls, path: str | PathLike[str], revision: str | None = None) -> CheckpointDirectory:
        """The reader of a checkpoint directory."""

    @abstractmethod
    def make_network(self) -> nn.Module:
        """The network with random weights."""

    @abstractmethod
    def prepare_network(self) -> None:
        """Freezes what shall not train, and the like, once `self.model` is there."""

    @abstractmethod
    def freeze_unread(self) -> None:
        """Lets no parameter of `self.model` train that nothing reads, adapters included."""

    @abstractmethod
    def save_pretrained(self, path: str | PathLike[str]) -> None:
        """Writes the weights as a checkpoint directory, adapters merged.

        Args:
            path: The directory; made if it does not exist. Files of an earlier checkpoint in it are replaced.
        """

    # What they share.

    def build(self, spec: PolicySpec) -> None:
        """Creates the network, unless `from_pretrained` has, and reads the pretrained weights if there are any."""
        self.check_spec(spec)
        if not hasattr(self, "model"):
            self.use_network(None if self.pretrained is None else self.open_directory(self.pretrained))

    def use_network(self, directory: CheckpointDirectory | None = None) -> None:
        """Creates `self.model` without any data, as exporting or counting parameters wants it.

        Args:
            directory: Where its weights are. Default: random ones, on the device that torch makes tensors on.
        """
        if directory is None:
            self.model = self.make_network()
        else:
            with torch.device("meta"):  # the tensors that are read become the parameters: nothing is held twice
                self.model = self.make_network()
            directory.load_into(self.model)
        self.prepare_network()

    def configure_model(self) -> None:
        """See `PolicyModule`; adapters that nothing reads do not train."""
        super().configure_model()
        if self._built:
            self.freeze_unread()

    @classmethod
    def from_pretrained(
        cls,
        path: str | PathLike[str],
        *,
        spec: PolicySpec | None = None,
        revision: str | None = None,
        **init_args: Any,  # noqa: ANN401
    ) -> Self:
        """A policy with the sizes and weights of a checkpoint directory.

        Args:
            path: Directory with `config.json` and `model.safetensors` (or its shards and their index), or a hub id.
            spec: What the policy needs to act (see `PolicySpec`). Default: training brings it.
            revision: Revision of a hub repository.
            init_args: Other arguments of the class.

        Raises:
            CheckpointError: There is no such checkpoint, or it is of another policy or damaged, or weights are
                missing, unexpected or of another shape; names them.
        """
        directory = cls.open_directory(path, revision)
        policy = cls(**{**directory.arguments(), **init_args})
        policy.use_network(directory)
        if spec is not None:
            policy.spec = spec
            policy.configure_model()
        return policy

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leaves out where the first weights came from: the checkpoint holds all of them."""
        super().on_save_checkpoint(checkpoint)
        for arguments in (checkpoint["policy_class"]["init_args"], checkpoint.get("hyper_parameters", {})):
            if "pretrained" in arguments:
                arguments["pretrained"] = None
