"""Keep arrays of tokens or pictures on disk: a folder of memory-mapped .npy files with a hash of each.

A folder is complete or absent. Several processes may write the same folder: the first to rename wins. Pictures are
read, resized and written once; the device normalises them.
"""

import hashlib
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, ImageOps

from sftkit.data.demo.builtin import PREFIX, picture
from sftkit.data.types import EncoderInputs
from sftkit.errors import DataError
from sftkit.rundir.files import compare_hashes, flush_folder, own_name, write_hashes
from sftkit.runtime.script import working

HASHED = "hashes.json"
"Name -> sha256 of every other file of a folder, and the stamp that the file had when it was last compared."
DEAD_SECONDS = 86_400.0
"Age of its newest file from which a temporary folder counts as left by a process that was killed."

log = logging.getLogger(__name__)
T = TypeVar("T")


def load(folder: Path, names: Iterable[str], build: Callable[[dict[str, Any]], T], *, instead: str) -> T | None:
    """Return what `build` makes of the arrays of a folder; None if there are none, and with a warning if they are
    damaged. Files whose stamp is not known are compared with their hash, once.

    Args:
        names: of the arrays.
        build: raises a ValueError, LookupError, TypeError or AttributeError if they do not fit.
        instead: what happens if they are damaged, for the warning; empty: no warning.
    """
    if not folder.exists():
        return None
    try:
        compare_hashes(folder / HASHED, [folder / name for name in json.loads((folder / HASHED).read_text())])
        # Memory-mapped, so that ranks of a machine share the pages. Nothing pickled: a cache holds no code.
        return build({name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError) as error:
        if instead:
            log.warning("%s: damaged cache (%s), %s", folder, error, instead)
        return None


def save(folder: Path, write: Callable[[Path], object], is_whole: Callable[[], bool], *, instead: str) -> None:
    """Have `write` put the files into a folder of another name, then rename that. A full disk is a warning.

    Args:
        is_whole: returns whether the folder that is already there can be loaded; it is replaced otherwise.
        instead: what happens if nothing can be written, for the warning.
    """
    temporary = own_name(folder)
    try:
        temporary.mkdir(parents=True)
        _sweep(folder.parent)
        write(temporary)
        write_hashes(temporary / HASHED, sorted(temporary.iterdir()))
        # Else a power failure could leave the name, and zeros for tokens in files of the right length.
        flush_folder(temporary)
        _rename(temporary, folder, is_whole)
    except OSError as error:
        log.warning("%s: cannot write the cache (%s), %s", folder, error, instead)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename(temporary: Path, folder: Path, is_whole: Callable[[], bool]) -> None:
    """Rename to the final name, unless another process was faster."""
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.exists():  # no race, but an error of the disk
            raise
        if not is_whole():
            damaged = own_name(folder)
            os.rename(folder, damaged)
            os.rename(temporary, folder)
            shutil.rmtree(damaged, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove the half-written files and folders of killed processes."""
    for path in parent.glob(".*.tmp"):
        with suppress(OSError):  # another process sweeps, too, or it is another user's
            newest = max(each.lstat().st_mtime for each in [path, *path.glob("*")])
            if time.time() - newest > DEAD_SECONDS:
                log.info("%s: left by a process that was killed, removed", path)
                shutil.rmtree(path) if path.is_dir() else path.unlink()


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
        return load(folder, [_ARRAY], lambda arrays: arrays[_ARRAY], instead=instead)

    array = stored("reading the pictures again")
    if array is None:
        with working(f"resizing {len(different):,} pictures to {size[2]} x {size[1]}"):
            instead = "every start will read the pictures"
            save(folder, write, lambda: stored() is not None, instead=instead)
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
