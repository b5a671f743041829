"""What a frozen model computes for the training texts, kept on disk, so that later epochs need not run it.

The frozen model is a teacher, or the full model of a network whose small members are trained. SpecForge calls
training EAGLE heads in this way offline training.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference.outputs import write_whole

GIB = 2**30


class KeptStates:
    """A folder with a file for each batch of the first epochs, which holds the arrays of a pytree one after
    another.

    shapes: the pytree's shapes and dtypes for each batch. settings: all that the arrays depend on, as JSON;
    files that were written with other settings are deleted. Raises FieldError if they do not fit on the disk.
    """

    def __init__(self, folder: Path, shapes: Sequence[Any], settings: Any):
        self.folder, self.shapes = folder, shapes
        text, stated = json.dumps(settings, sort_keys=True, default=str), folder / "settings.json"
        if not (stated.is_file() and stated.read_text(encoding="utf-8") == text):
            self.remove()
        self.check_space()
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(stated, text)

    def check_space(self) -> None:
        needed = sum(map(size_of, self.shapes))
        held = sum(file.stat().st_size for file in self.folder.glob("*.bin"))
        free = shutil.disk_usage(self.folder if self.folder.is_dir() else self.folder.parent).free
        if needed - held > free:
            raise FieldError(
                "kept_epochs",
                needed,
                "lower it, or choose an --output-dir on a larger disk.",
                f"kept_epochs needs {needed / GIB:,.1f} GiB, and {self.folder} has room for "
                f"{(free + held) / GIB:,.1f}",
            )

    def of(self, number: int, compute: Callable[[], Any]) -> Any:
        """The pytree of batch `number`, counted from the start of the run: arrays of the host, read from its
        file or, if there is none, computed."""
        place = number % len(self.shapes)
        path, shapes = self.folder / f"{place}.bin", self.shapes[place]
        if path.is_file() and path.stat().st_size == size_of(shapes):
            with path.open("rb") as file:
                return jax.tree.map(lambda x: np.fromfile(file, x.dtype, x.size).reshape(x.shape), shapes)
        arrays = jax.device_get(compute())
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                file.writelines(array.tobytes() for array in jax.tree.leaves(arrays))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return arrays

    def remove(self) -> None:
        """Deletes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def size_of(shapes: Any) -> int:
    """The bytes of a pytree of arrays."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
