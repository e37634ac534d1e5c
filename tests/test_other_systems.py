"""What a CPU can do needs nothing of POSIX: macOS and Windows import every module, and write files."""

import ast
import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import vicinal
from vicinal.attachment import survey
from vicinal.files import write_text

SOURCE = Path(vicinal.__file__).parent
POSIX_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
POSIX_NAMES = {
    "os": "fork forkpty getpgid getuid geteuid killpg mkfifo nice sched_getaffinity setsid sysconf uname wait waitpid",
    "signal": "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGUSR1 SIGUSR2 alarm pause setitimer",
}
IMPORT_ALL = """
import builtins, importlib, pkgutil, sys
hidden, original = set(sys.argv[1:]), builtins.__import__

def hide(name, globals=None, *rest, **keywords):
    if name.partition(".")[0] in hidden and str((globals or {}).get("__name__")).startswith("vicinal"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return original(name, globals, *rest, **keywords)

builtins.__import__ = hide
import vicinal
found = [module.name for module in pkgutil.walk_packages(vicinal.__path__, "vicinal.") if "__main__" not in module.name]
for name in found:
    importlib.import_module(name)
print(len(found))
"""


def test_every_module_imports_without_those_of_posix():
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_ALL, *sorted(POSIX_MODULES)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = [file for file in SOURCE.rglob("*.py") if file.name != "__main__.py"]
    assert int(done.stdout) == len(files) - 1  # of the package itself


@pytest.mark.parametrize("module", POSIX_NAMES)
def test_no_name_of_posix_is_used(module):
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module:
                assert node.attr not in POSIX_NAMES[module].split(), f"{file}:{node.lineno}"


def test_a_survey_goes_without_a_limit_where_there_is_none(monkeypatch):
    monkeypatch.setattr(survey, "resource", None)
    survey._limit_memory(1)


def flush_what_is_open_for_writing(descriptor):
    """Raises as Windows does for a file that is open for reading only; folders are not opened there."""
    import fcntl

    reading = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    if reading and not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(errno.EBADF, "Bad file descriptor")


def test_files_are_flushed_while_open_for_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", flush_what_is_open_for_writing)
    write_text(tmp_path / "text", "content")
    assert (tmp_path / "text").read_text() == "content"
    model = vicinal.create_model("vit-micro", prior="gab", img_size=8)
    vicinal.save(model, tmp_path / "model")
    vicinal.save_prior(model, tmp_path / "prior")
