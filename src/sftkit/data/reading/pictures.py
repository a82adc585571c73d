"""Pictures as arrays: each is read, resized and written once; the device normalises them. No torch."""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from sftkit.data.demo.builtin import PREFIX, picture
from sftkit.data.reading import folders
from sftkit.data.types import EncoderInputs
from sftkit.errors import DataError
from sftkit.runtime.script import working

_ARRAY = "pictures"
"The array in a folder of the cache."
RESAMPLE = Image.Resampling.BILINEAR
ImageSize = tuple[int, int, int]
"Channels, height, width."
DEEP = ("I", "F")
"First letters of Pillow modes with more than 8 bits a channel. Their range is not known: Pillow would make white."


def load_images(names: Sequence[str], argument: str, size: ImageSize, cache_dir: Path) -> EncoderInputs:
    """Return each document's picture, uint8 [I, *size] with one for each different name, from the cache on disk if
    it is there; in memory if the disk is full.

    Args:
        names: for each document the file of its picture, or the name of a generated one.
        argument: the name of the array.

    Raises:
        DataError: a file is not a picture.
    """
    # A picture with several captions is read once, and shared by its documents.
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    different = list(number)
    shape = (len(different), *size)
    folder = cache_dir / f"images-{_key(different, size)}"

    def write(temporary: Path) -> None:
        # Checked first: on a full disk, writing to mapped memory would end the process by a signal.
        needed = int(np.prod(shape))
        free = shutil.disk_usage(temporary).free
        if needed > free:
            raise OSError(f"{needed / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB free")
        file = temporary / f"{_ARRAY}.npy"
        _read(np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape), different, size)

    def stored(instead: str = "") -> np.ndarray | None:
        return folders.load(folder, [_ARRAY], lambda arrays: arrays[_ARRAY], instead=instead)

    array = stored("reading the pictures again")
    if array is None:
        with working(f"resizing {len(different):,} pictures to {size[2]} x {size[1]}"):
            instead = "every start will read the pictures"
            folders.save(folder, write, lambda: stored() is not None, instead=instead)
            array = stored()
            array = _read(np.zeros(shape, np.uint8), different, size) if array is None else array
    return EncoderInputs({argument: array}, np.array([number[name] for name in names]))


def read_image(name: str, size: ImageSize) -> np.ndarray:
    """Read one picture, uint8 [channels, height, width]: the whole file, upright as its EXIF says, stretched
    to the size.

    Raises:
        DataError: the file is not a picture.
    """
    if name.startswith(PREFIX):
        return picture(name, size)
    channels, height, width = size
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # a large one; twice as large is an error
            image = Image.open(name)
        with image:
            if image.mode.startswith(DEEP):
                raise ValueError(f"mode {image.mode} has more than 8 bits a channel: save it with 8")
            upright = ImageOps.exif_transpose(image)
            whole = upright.convert("L" if channels == 1 else "RGB").resize((width, height), RESAMPLE)
    except Exception as error:  # Pillow's readers raise anything on broken files: SyntaxError, struct.error, ...
        reason = str(error).rstrip(".")
        problem = f"{name}: cannot be read as a picture: {reason}. Repair it, or remove its rows"
        raise DataError(problem, reason="not a picture") from error
    pixels = np.asarray(whole)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _key(names: Sequence[str], size: ImageSize) -> str:
    """Return a digest of all that the array depends on: names, sizes and times of files, the size of pictures, and the
    code. A file that is gone is reported when it is read."""
    code = [Path(__file__), Path(__file__).parents[1] / "demo" / "builtin.py"]
    # Sizes and times of files, not their content: to read thousands of pictures would take as long as resizing them.
    # An edit that keeps the time of the content still changes that of the file's entry.
    found = hashlib.sha256(b"".join(path.read_bytes() for path in code))
    for name in names:
        stat = os.stat(name) if os.path.exists(name) else None
        found.update(json.dumps([name, size, stat and (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)]).encode())
    return found.hexdigest()[:32]


def _read(array: np.ndarray, names: Sequence[str], size: ImageSize) -> np.ndarray:
    """Fill the array with all pictures, and return it.

    Raises:
        DataError: a file is not a picture.
    """
    for i, name in enumerate(names):
        array[i] = read_image(name, size)
    return array
