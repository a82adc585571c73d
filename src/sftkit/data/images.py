"""Pictures as arrays: read, resized and written once, then memory-mapped like tokens. What normalises them runs on the device."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from sftkit.data.demo.pictures import PREFIX, picture
from sftkit.data.types import EncoderInputs
from sftkit.errors import DataError
from sftkit.runtime.files import own_name
from sftkit.runtime.progress import working

log = logging.getLogger(__name__)
RESAMPLE = Image.Resampling.BILINEAR
Size = tuple[int, int, int]
"Channels, height, width."


def load(names: Sequence[str], argument: str, size: Size, cache_dir: Path) -> EncoderInputs:
    """Each document's picture, from the cache on disk if they are there: uint8 [I, *size], a picture for each different name.

    Args:
        names: of each document the file of its picture, or the name of a generated one.
        argument: what the array is called.

    Raises:
        DataError: a file is no picture.
    """
    different = list(dict.fromkeys(names))
    number = {name: i for i, name in enumerate(different)}
    index = np.fromiter((number[name] for name in names), np.int64, len(names))
    file = cache_dir / f"images-{_key(different, size)}.npy"
    array = _opened(file, (len(different), *size))
    if array is None:
        with working(f"resizing {len(different):,} pictures to {size[2]} x {size[1]}"):
            array = _written(file, different, size)
    return EncoderInputs({argument: array}, index)


def read(name: str, size: Size) -> np.ndarray:
    """One picture, uint8 [channels, height, width]; of a file all of it, its sides stretched.

    Raises:
        DataError: the file is no picture.
    """
    if name.startswith(PREFIX):
        return picture(name, size)
    channels, height, width = size
    try:
        with Image.open(name) as image:
            whole = image.convert("L" if channels == 1 else "RGB").resize((width, height), RESAMPLE)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{name}: cannot be read as a picture: {error}", reason="not a picture") from error
    pixels = np.asarray(whole)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _key(names: Sequence[str], size: Size) -> str:
    """Of all that the array depends on: names, sizes and times of files, the size of pictures, and the code."""
    code = [Path(__file__), Path(__file__).parent / "demo" / "pictures.py"]
    found = hashlib.sha256(b"".join(path.read_bytes() for path in code))
    for name in names:
        stat = None if name.startswith(PREFIX) else os.stat(name)
        found.update(json.dumps([name, size, stat and (stat.st_size, stat.st_mtime_ns)]).encode())
    return found.hexdigest()[:32]


def _opened(file: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        log.warning("%s: damaged cache (%s), reading the pictures again", file, error)
        return None
    return array if array.shape == shape and array.dtype == np.uint8 else None


def _written(file: Path, names: Sequence[str], size: Size) -> np.ndarray:
    """The array, in a file that gets its name when it is whole; in memory where the disk is full."""
    temporary = own_name(file)

    def fill(array: np.ndarray) -> np.ndarray:
        for i, name in enumerate(names):
            array[i] = read(name, size)
        return array

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _filled(temporary, (len(names), *size), fill)
        os.replace(temporary, file)
        found = _opened(file, (len(names), *size))
    except OSError as error:
        log.warning("%s: cannot write the cache (%s), every start will read the pictures", file, error)
        found = None
    finally:
        temporary.unlink(missing_ok=True)
    return fill(np.zeros((len(names), *size), np.uint8)) if found is None else found


def _filled(file: Path, shape: tuple[int, ...], fill: Callable[[np.ndarray], np.ndarray]) -> None:
    """Write a .npy piece by piece; a full disk is an OSError and not a signal, as its space is taken first."""
    needed, free = int(np.prod(shape)), shutil.disk_usage(file.parent).free
    if needed > free:
        raise OSError(f"{needed / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB free")
    array = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape)
    fill(array)
    array.flush()
