from kvjax.data.wikitext import plain


def test_markup_goes_and_words_stay():
    text = "{{Use|a={{b}}}}\n'''Albedo''' is [[Light|light]] from ''[[Earth]]''.<ref name=x>y</ref>"
    assert plain(text) == "Albedo is light from Earth."


def test_references_end_where_they_end():
    assert plain('a<ref name="x"/>b<ref>one\ntwo</ref>c') == "abc"


def test_templates_nest_to_any_depth():
    assert plain("a" + "{{x|" * 20 + "}}" * 20 + "b") == "ab"


def test_unbalanced_braces_end_and_stay():
    assert plain("{{a {{b}} c") == "{{a  c"


def test_blank_lines_collapse():
    assert plain("a\n\n\n\nb\n") == "a\n\nb"
