"""Run directories: `default_root_dir` is always the newest run; an earlier one is moved aside whole, never mixed into.

A second `fit` into `runs/quickstart` moves what is there to `runs/quickstart-1` (then `-2`, …) and starts afresh, so
the commands after it keep their paths. A `fit` that resumes (`--ckpt_path last`, or a checkpoint inside the directory)
goes on in place. A lock held for the life of the process keeps two runs from writing into one directory.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from pathlib import Path
from typing import IO

from lightning_embodied.errors import ConfigError

_LOCK = ".running"
_MARKS = ("config.yaml", "metrics.csv", "checkpoints")


class RunDirectory:
    """One run's directory, claimed for writing.

    Args:
        path: The directory (`trainer.default_root_dir`).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.moved_to: Path | None = None
        self._lock: IO[str] | None = None

    def resumes(self, checkpoint: str | Path | None) -> bool:
        """Whether training from a checkpoint goes on in this directory.

        Args:
            checkpoint: `fit`'s `ckpt_path`.
        """
        if checkpoint is None:
            return False
        if str(checkpoint) in ("last", "best", "hpc"):
            return True
        return self.path.resolve() in Path(checkpoint).resolve().parents

    def holds_run(self) -> bool:
        """Whether there is anything of an earlier run in it."""
        return any((self.path / mark).exists() for mark in _MARKS)

    def claim(self, *, resume: bool) -> None:
        """Makes the directory ready for a run, moving an earlier one aside unless it is resumed.

        Args:
            resume: Go on with the run that is there.

        Raises:
            ConfigError: Another process is training in it, or it is the working directory or lies above it.
        """
        self._acquire()
        if resume or not self.holds_run():
            return
        if self.path.resolve() in (Path.cwd(), *Path.cwd().parents):
            raise ConfigError(
                "the run directory holds an earlier run and cannot be moved aside: it is the working directory",
                where="trainer.default_root_dir",
                found=self.path,
                mend="choose a directory of its own, such as runs/my_run",
            )
        self.release()
        self.moved_to = self._next_sibling()
        self.path.rename(self.moved_to)
        self._acquire()

    def give_back(self) -> None:
        """Undoes `claim` when the run ended before it trained: the earlier run gets its name back."""
        trained = any((self.path / mark).exists() for mark in ("metrics.csv", "checkpoints"))
        if self.moved_to is not None and not trained:
            self.release()
            shutil.rmtree(self.path)
            self.moved_to.rename(self.path)
            self.moved_to = None

    def release(self) -> None:
        """Lets other processes write into the directory."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            (self.path / _LOCK).unlink(missing_ok=True)

    def _acquire(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        lock = (self.path / _LOCK).open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip()
            lock.close()
            raise ConfigError(
                "another process is training in this run directory",
                where="trainer.default_root_dir",
                found=f"{self.path}, locked by process {owner or 'unknown'}",
                mend="give this run another --trainer.default_root_dir",
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def _next_sibling(self) -> Path:
        pattern = re.compile(re.escape(self.path.name) + r"-(\d+)")
        matches = (pattern.fullmatch(sibling.name) for sibling in self.path.parent.iterdir())
        return self.path.with_name(f"{self.path.name}-{max((int(m[1]) for m in matches if m), default=0) + 1}")
