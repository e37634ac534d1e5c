"""Small pieces of HTML: tables, links to data, copyable text."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

__all__ = ["Cell", "copy_block", "data_link", "html_table", "missing_list"]


@dataclass(frozen=True)
class Cell:
    """A cell of a table whose rows are sorted by its value, not by its text."""

    text: str
    value: float | None = None
    """The number that it shows; None for text."""


def html_table(
    header: Sequence[str], rows: Sequence[Sequence[Cell | str]], *, caption: str, sortable: bool = True
) -> Markup:
    """Returns a table. A column is aligned to the right if any of its cells has a number.

    Args:
        header: names of the columns.
        rows: as many cells in each.
        caption: what the table is of, with split and number of runs.
        sortable: let the script sort it by a click on a name.
    """
    cells = [[each if isinstance(each, Cell) else Cell(each) for each in row] for row in rows]
    numeric = [any(row[index].value is not None for row in cells) for index in range(len(header))]

    def line(tag: Markup, texts: Sequence[Cell]) -> Markup:
        parts = []
        for cell, is_number in zip(texts, numeric, strict=True):
            kind = Markup(' class="number"') if is_number else Markup("")
            value = Markup("") if cell.value is None else Markup(' data-value="{}"').format(repr(float(cell.value)))
            parts.append(Markup("<{}{}{}>{}</{}>").format(tag, kind, value, cell.text, tag.split()[0]))
        return Markup("<tr>{}</tr>").format(Markup("").join(parts))

    head = line(Markup('th scope="col"'), [Cell(name) for name in header])
    body = Markup("").join(line(Markup("td"), row) for row in cells)
    return Markup(
        '<figure class="table"><figcaption>{}</figcaption><div class="scroll" tabindex="0" role="region" '
        'aria-label="{}"><table{} aria-label="{}"><thead>{}</thead><tbody>{}</tbody></table></div></figure>'
    ).format(caption, caption, Markup(' class="sortable"') if sortable else "", caption, head, body)


def data_link(name: str, text: str, label: str) -> Markup:
    """Returns a link that saves data which is in the page itself.

    Args:
        name: file name, such as `results.csv`.
        text: content of the file.
        label: of the link.
    """
    kind = "text/csv" if name.endswith(".csv") else "application/json"
    content = base64.b64encode(text.encode()).decode()
    return Markup('<a download="{}" href="data:{};base64,{}">{}</a>').format(name, kind, content, label)


def copy_block(name: str, forms: dict[str, str]) -> Markup:
    """Returns a text in several forms, each of which can be opened and copied.

    Args:
        name: id of the block in the page.
        forms: name of the form, such as Markdown, and the text.
    """
    buttons, blocks = [], []
    for form, text in forms.items():
        key = f"{name}-{form.lower()}"
        buttons.append(
            Markup('<button type="button" data-copy="{}" data-status="{}-status">Copy as {}</button>').format(
                key, name, form
            )
        )
        label = f"The table as {form}"
        # the line break after <pre> is not part of its text
        blocks.append(
            Markup('<h3>{}</h3><pre id="{}" tabindex="0" role="region" aria-label="{}">\n{}</pre>').format(
                form, key, label, text
            )
        )
    return Markup(
        '<div class="copies"><div class="buttons needs-script">{}<span id="{}-status" role="status" class="note">'
        "</span></div><details><summary>The table as {}</summary>{}</details></div>"
    ).format(Markup("").join(buttons), name, ", ".join(forms), Markup("").join(blocks))


def missing_list(sentences: Sequence[str]) -> Markup:
    """Returns sentences about what cannot be shown, or is left out."""
    return Markup("").join(Markup('<p class="missing">{}</p>').format(sentence) for sentence in sentences)
