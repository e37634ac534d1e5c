import pytest

from vicinal import list_priors
from vicinal.cli.main import main


def test_lists_every_prior_with_options_and_parameters(capsys):
    assert main(["priors"]) == 0
    out = capsys.readouterr().out
    for name in list_priors():
        assert f"\n{name} " in out
    assert ["gmm", "60", "Multiplies"] in [line.split()[:3] for line in out.splitlines()]  # 2 x 5 kernels x 6 heads
    assert "kernels=5, init=identity, share_heads=false" in out


def test_counts_parameters_for_the_grid_asked_for(capsys):
    assert main(["priors", "--heads", "2", "--grid", "3", "4"]) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["elm", "144"] in lines
    assert ["rpe", str(2 * 5 * 7)] in lines


def test_describes_one_prior_with_formula_and_types(capsys):
    assert main(["priors", "gmm"]) == 0
    out = capsys.readouterr().out
    assert "M(d) = c + sum_k alpha_k" in out
    assert "init=identity: identity|paper|spread" in out


def test_draws(tmp_path, capsys):
    path = tmp_path / "x.png"
    assert main(["priors", "gmm:init=spread+gab", "--draw", str(path), "--heads", "2", "--grid", "3", "5"]) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prior"], "vicinal: unknown command 'prior'; did you mean 'priors'?"),
        (["priors", "gnm"], "vicinal: unknown prior 'gnm'; did you mean 'gmm'?"),
        (["priors", "--grid", "0", "8"], "vicinal: Grid height must be a whole number >= 1, got 0"),
        (["priors", "--heads", "0"], "vicinal: heads must be a whole number >= 1, got 0"),
        (
            ["priors", "gmm", "--draw", "nowhere/x.png"],
            "vicinal: cannot write nowhere/x.png: there is no folder nowhere",
        ),
        (["priors", "gmm", "--draw", "x.nope"], "vicinal: cannot draw into x.nope: Format 'nope' is not supported"),
    ],
)
def test_bad_input_is_a_short_message_and_exit_code_2(words, message, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_unknown_flags_exit_with_2(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["priors", "--drew", "x.png"])
    assert stop.value.code == 2
    assert "--draw" in capsys.readouterr().err


def test_debug_shows_the_error():
    with pytest.raises(ValueError, match="gnm"):
        main(["priors", "gnm", "--debug"])


def test_help_and_version(capsys):
    for words in ([], ["--help"], ["-h"]):
        assert main(words) == 0
        assert "  priors " in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("vicinal 0.")
