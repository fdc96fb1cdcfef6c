"""The text of HTML is that which Python's own parser finds."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from attnzoo.data.markup import BLOCKS, plain


class Parser(HTMLParser):
    """Python's own, which is quadratic in some texts."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.found = []

    def handle_data(self, data):
        self.found.append(data)

    def handle_starttag(self, tag, attrs):
        if tag in BLOCKS:
            self.found.append("\n")

    def handle_endtag(self, tag):
        self.handle_starttag(tag, None)


def parsed(text):
    parser = Parser()
    parser.feed(text)
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.found).split("\n"))
    return "\n".join(line for line in lines if line)


names = st.sampled_from(["p", "b", "BR", "li", "h1", "a", "custom-tag", "td"])
values = st.sampled_from(["x", "'x y'", '"x > y"', "'<b>'", '"it\'s"', '""'])
attributes = st.lists(st.tuples(st.sampled_from(["href", "data-x", "CLASS"]), values), max_size=2)
tags = st.builds(
    lambda name, given, slash: f"<{name}{''.join(f' {key}={value}' for key, value in given)}{slash}>",
    names, attributes, st.sampled_from(["", " ", " /"]),
)  # fmt: skip
pieces = st.one_of(
    tags,
    names.map(lambda name: f"</{name}>"),
    st.sampled_from(
        ["one", " two ", "\n", "&amp;", "&lt;b&gt;", "&eacute;", "&#65;", "&nope;", "1 < 2", "a &", "<!-- no > <b> -->",
         "<!DOCTYPE html>", "<?xml?>", "<script>if (a < b) '<p>'</script>", "<style>p > b {}</style >", "naïve", ">"]
    ),
)  # fmt: skip


@given(st.lists(pieces, max_size=12).map("".join))
def test_the_text_is_that_of_pythons_parser(text):
    assert plain(text) == parsed(text)


@given(st.text(alphabet="<>/!-?a= '\"&;#1", max_size=30))
def test_any_text_has_a_text(text):
    plain(text)


def test_a_tag_that_never_ends_is_text():
    assert plain("a <b>bold</b> <i and so on") == "a bold <i and so on"
    assert plain("x<y") == "x<y"
