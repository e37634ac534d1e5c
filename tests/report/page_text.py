"""The text of a page, as a reader without a browser gets it."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input"}


class _Reader(HTMLParser):
    """Collects text and ids, and checks that every element is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.ids = [], [], []

    def handle_starttag(self, tag, attributes):
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.ids += [value for name, value in attributes if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.texts.append(data)


def page_text(file):
    """The visible text of an HTML file, in one line, whose elements are all closed and whose ids are all different."""
    reader = _Reader()
    reader.feed(file.read_text(encoding="utf-8"))
    reader.close()
    assert reader.open == []
    assert len(set(reader.ids)) == len(reader.ids)
    return " ".join(" ".join(reader.texts).split())
