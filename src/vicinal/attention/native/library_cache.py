"""The cache of native libraries: a file for each build, whose name has the build's key and a checksum of the file.

A library is compiled in a temporary folder, under a lock, and moved into the cache when it is finished. Of a build that
was killed only its temporary folder stays, which the next build removes. A file whose checksum is not that of its name
is damaged: it is removed and built again.
"""

import contextlib
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from vicinal.attention.native.build import BuildError, BuildPlan, compile_library
from vicinal.cache_folder import cache_folder
from vicinal.files import replace_file, write_text

__all__ = ["LibraryCache"]

TEMPORARY = ".building-"
LOCK_SECONDS = 1800
"""Limit of the time that a process waits for another one's build."""


class LibraryCache:
    """The library of a plan in the cache.

    Args:
        plan: what the library is built from.
        folder: of all libraries; `native` in the cache folder by default.
    """

    def __init__(self, plan: BuildPlan, folder: Path | None = None) -> None:
        self.plan = plan
        self.folder = cache_folder() / "native" if folder is None else folder
        self.log = self.folder / f"{plan.key[:16]}.log"
        """What the compiler printed where the last build failed; does not exist otherwise."""

    def find(self) -> Path | None:
        """Returns the file of the library; None if it was not built or is damaged."""
        return next(filter(_is_intact, self._files()), None)

    def build(self, started: Callable[[], None], *, replace: bool = False) -> Path:
        """Returns the file of the library, which is built unless another process has done so by now.

        Args:
            started: called before the compiler is.
            replace: build again, because the file that `find` returned cannot be loaded.

        Raises:
            BuildError: the compiler failed, or the folder cannot be written. The output of the compiler is in `log`.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / ".lock", timeout=LOCK_SECONDS):
                if not replace and (file := self.find()) is not None:
                    return file
                self._remove_leftovers()
                started()
                return self._build()
        except Timeout:
            raise BuildError(f"another process has been building in {self.folder} for too long") from None
        except OSError as error:
            reason = f"{self.folder} cannot be written: {error.strerror or error}"
            raise BuildError(f"{reason}; set VICINAL_CACHE to another folder") from None

    def reject(self, file: Path, problem: str) -> None:
        """Removes a new library that cannot be loaded, and notes the problem as that of a build that failed."""
        with contextlib.suppress(OSError):
            self._note_failure(problem)
            file.unlink(missing_ok=True)

    def _build(self) -> Path:
        temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=self.folder))
        try:
            library = compile_library(self.plan, temporary)
            file = self.folder / f"{self.plan.key[:16]}-{_checksum(library)}.so"
            replace_file(library, file)
        except BuildError as error:
            if error.output:
                self._note_failure(error.output)
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        return file

    def _note_failure(self, output: str) -> None:
        """Writes the log, which keeps other processes from the same build."""
        write_text(self.log, output + "\n")

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"{self.plan.key[:16]}-*.so"))

    def _remove_leftovers(self) -> None:
        """Removes damaged files, and folders of builds that were killed; call it under the lock."""
        for file in self._files():
            file.unlink(missing_ok=True)
        for folder in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(folder, ignore_errors=True)


def _is_intact(library: Path) -> bool:
    try:
        return library.stem.endswith(f"-{_checksum(library)}")
    except OSError:
        return False


def _checksum(file: Path) -> str:
    return f"{zlib.crc32(file.read_bytes()):08x}"
