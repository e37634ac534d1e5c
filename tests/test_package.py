import subprocess
import sys

import pytest

import vicinal


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_does_not_import_torch():
    assert run("import vicinal, sys; print('torch' in sys.modules)") == "False\n"


def test_help_does_not_import_torch_or_tyro():
    code = (
        "import sys; from vicinal.cli.main import main; main(['--help']); print({'torch', 'tyro'} & set(sys.modules))"
    )
    assert run(code).endswith("set()\n")


def test_names_resolve_and_unknown_ones_say_so():
    assert set(vicinal.__all__) <= set(dir(vicinal))
    with pytest.raises(AttributeError, match="'vicinal' has no attribute 'atend'"):
        vicinal.atend  # noqa: B018


def test_version_is_the_same_in_package_and_metadata():
    from importlib.metadata import version

    assert vicinal.__version__ == version("vicinal")


def test_public_things_carry_a_runnable_example():
    for name in set(vicinal.__all__) - {"__version__"}:
        assert ">>>" in getattr(vicinal, name).__doc__, name


def test_other_import_errors_of_torchvision_pass_through(monkeypatch):
    import builtins

    from vicinal._torchvision import ensure_torchvision

    real = builtins.__import__

    def broken(name, *arguments, **keywords):
        if name == "torchvision":
            raise RuntimeError("something else")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(RuntimeError, match="something else"):
        ensure_torchvision()
