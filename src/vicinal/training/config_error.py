"""The error of a setting that cannot be used, by the name of its field."""

from vicinal.errors import VicinalError

__all__ = ["ConfigError"]


class ConfigError(VicinalError):
    """A field of the configuration has an unusable value.

    The message begins with the name of the field. The command line prints `flag_message` instead, which begins with the
    name of the flag.

    Args:
        field: name of the field, such as `batch_size`.
        problem: the rest of the sentence, such as `must be at least 1, got 0`.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.flag_message = f"--{field.replace('_', '-')} {problem}"

    def __str__(self) -> str:
        return " ".join(self.args)
