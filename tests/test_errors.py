import pytest

from vicinal.errors import VicinalError, unknown_name


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"given": "vitt"}, "unknown model 'vitt'; did you mean 'vit'? Known: pit, vit"),
        ({"given": "xyz"}, "unknown model 'xyz'. Known: pit, vit"),
        (
            {"given": "it", "max_suggestions": 2},
            "unknown model 'it'; did you mean 'vit' or 'pit'? Known: pit, vit",
        ),
        (
            {"given": "xyz", "suggestions": ["hub:xyz"]},
            "unknown model 'xyz'; did you mean 'hub:xyz'? Known: pit, vit",
        ),
        ({"given": "xyz", "listing": "See the list."}, "unknown model 'xyz'. See the list."),
        ({"given": "xyz", "known": []}, "unknown model 'xyz'. Known: none"),
    ],
)
def test_an_unknown_name_suggests_the_nearest_and_lists_all(options, expected):
    error = unknown_name("model", **{"known": ["vit", "pit"], **options})
    assert isinstance(error, VicinalError)
    assert str(error) == expected
