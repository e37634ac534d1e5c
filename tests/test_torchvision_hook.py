"""The hook that `import vicinal` installs on torchvision, each case in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOOKS = "[f for f in sys.meta_path if type(f).__module__ == 'vicinal._torchvision']"
HEALTHY = "value = 7\nimport torchvision.part\n"
# What PyPI's build does where its CUDA library is missing.
MISSING_OPERATOR = "import torch\ntorch.library.register_fake('torchvision::qnms')(lambda dets, scores, iou: dets)\n"


def run(code, folder=None):
    """Returns what `code` prints; `folder` stands in front of the packages that are installed."""
    path = os.pathsep.join(filter(None, [folder and str(folder), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", "import sys\n" + code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture
def fake(tmp_path):
    """Returns a function that writes a torchvision of the given source and returns the folder it is in."""

    def write(source):
        package = tmp_path / "torchvision"
        package.mkdir()
        (package / "__init__.py").write_text(source)
        (package / "part.py").write_text("")
        return tmp_path

    return write


def test_timm_imports_after_vicinal_and_the_hook_is_gone():
    assert run(f"import vicinal, timm, torchvision; print(len({HOOKS}))") == ["0"]


def test_the_hook_does_not_load_torch():
    assert run(f"import vicinal; print('torch' in sys.modules, len({HOOKS}))") == ["False", "1"]


def test_a_healthy_torchvision_is_imported_unchanged(fake):
    code = f"""
import importlib.util
import vicinal, torchvision
print(torchvision.value, type(torchvision.__loader__).__name__, torchvision.__spec__.loader is torchvision.__loader__)
print(len({HOOKS}), "torch" in sys.modules)
importlib.reload(torchvision)
print(importlib.util.find_spec("torchvision").origin == torchvision.__file__)
"""
    assert run(code, fake(HEALTHY)) == ["7", "SourceFileLoader", "True", "0", "False", "True"]


def test_missing_operators_are_declared_and_reloading_the_hook_keeps_them(fake):
    code = f"""
import importlib, vicinal, vicinal._torchvision, torchvision, torch
print(torch.ops.torchvision.nms, torch.ops.torchvision.qnms)
importlib.reload(vicinal._torchvision)
vicinal.ensure_torchvision()
print(torch.ops.torchvision.qnms, len({HOOKS}))
"""
    assert run(code, fake(MISSING_OPERATOR)) == ["torchvision.nms", "torchvision.qnms", "torchvision.qnms", "0"]


def test_another_missing_operator_is_reported_as_it_is(fake):
    code = f"""
import vicinal
for _ in range(2):
    try:
        import torchvision
    except RuntimeError as error:
        print("torchvision::other" in str(error), "torchvision" in sys.modules, len({HOOKS}))
"""
    folder = fake(MISSING_OPERATOR.replace("qnms", "other"))
    assert run(code, folder) == ["True", "False", "1"] * 2


def test_other_errors_pass_through_and_a_later_import_can_succeed(fake):
    code = f"""
import vicinal, os
try:
    import torchvision
except ValueError as error:
    print(error, len({HOOKS}))
os.environ["FIXED"] = "1"
import torchvision
print(len({HOOKS}))
"""
    folder = fake("import os\nif 'FIXED' not in os.environ:\n    raise ValueError('broken')\n")
    assert run(code, folder) == ["broken", "1", "0"]


def test_without_torchvision_the_usual_error_is_raised(tmp_path):
    # An isolated interpreter sees the standard library only, and the package through a path of our own.
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent / "src")!r})
import importlib.util, vicinal
print(importlib.util.find_spec("torchvision"))
try:
    import torchvision
except ModuleNotFoundError as error:
    print(error.name, str(error) == "No module named 'torchvision'")
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["None", "torchvision", "True"], done.stderr


def test_asking_whether_torchvision_is_installed_leaves_the_hook_in_place(fake):
    code = f"""
import importlib.util, vicinal
print(importlib.util.find_spec("torchvision") is not None, "torchvision" in sys.modules, len({HOOKS}))
import torchvision
print(len({HOOKS}))
"""
    assert run(code, fake(HEALTHY)) == ["True", "False", "1", "0"]


def test_reloading_installs_one_hook_and_none_after_torchvision(fake):
    code = f"""
import importlib, vicinal
importlib.reload(vicinal)
print(len({HOOKS}))
import torchvision
importlib.reload(vicinal)
print(len({HOOKS}))
"""
    assert run(code, fake(HEALTHY)) == ["1", "0"]


def test_spawned_processes_that_unpickle_from_vicinal_import_torchvision(fake):
    folder = fake(MISSING_OPERATOR)
    (folder / "spawned.py").write_text("import vicinal\n\n\ndef load(_):\n    import torchvision\n    return 'ok'\n")
    code = """
import multiprocessing
from spawned import load
with multiprocessing.get_context("spawn").Pool(1) as pool:
    print(*pool.map(load, [0]))
"""
    assert run(code, folder) == ["ok"]
