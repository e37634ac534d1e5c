import json

from vicinal.cli.main import main


def test_cost_prints_a_table(capsys):
    assert main(["cost", "vit-mini", "--prior", "none", "gab", "--img-size", "32", "48"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("| model    | prior |")
    assert "32 x 48" in lines[3]


def test_cost_writes_json(tmp_path, capsys):
    out = tmp_path / "new" / "cost.json"
    assert main(["cost", "vit-micro", "--pool", "avg", "--format", "json", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    plain, masked = json.loads(out.read_text())
    assert masked["parameters"] - plain["parameters"] == masked["prior_parameters"] == 4 * 4 * 5 * 2


def test_bad_input_is_a_short_message(capsys):
    assert main(["cost", "vitt"]) == 2
    assert capsys.readouterr().err.startswith("vicinal: unknown model 'vitt'; did you mean 'vit'")
    assert main(["cost", "vit", "--img-size", "1", "2", "3"]) == 2
    assert "--img-size" in (message := capsys.readouterr().err)
    assert "got (1, 2, 3)" in message
    assert main(["cost", "vit", "--batch-size", "0"]) == 2
    assert "batch_size must be a whole number >= 1, got 0" in capsys.readouterr().err
