"""The sets that come from the Hugging Face hub, and how their rows become documents."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from dsgpt.common.errors import UserError


@dataclass(frozen=True, kw_only=True)
class HubSet:
    """Where a set lives and what it is."""

    path: str
    """Name on the hub (or ``parquet``, which reads ``data_files``)."""
    about: str
    """One line for the help."""
    config: str | None = None
    data_files: dict[str, str] | None = None
    splits: dict[str, int] = field(default_factory=dict)
    """Rows of each split that is taken (0: not known), for the progress bar if the hub does not give them."""
    articles: bool = False
    """True if a row is a line, and a heading line begins a document (WikiText)."""

    @property
    def source(self) -> str:
        """The address in words."""
        name = self.data_files["train"].removeprefix("hf://datasets/") if self.data_files else self.path
        return f"{name} ({self.config})" if self.config else name


# The hub's main branch may have a loading script, which `datasets` refuses to run. The Parquet files need none.
_OPENWEBTEXT = "hf://datasets/Skylion007/openwebtext/plain_text/train-*.parquet"

HUB_SETS = {
    "tinystories": HubSet(
        path="roneneldan/TinyStories",
        about="2.1 million short stories in a small child's words, 2 GB; has a validation split",
        splits={"train": 2_119_719, "validation": 21_990},
    ),
    "wikitext-103": HubSet(
        path="Salesforce/wikitext",
        config="wikitext-103-raw-v1",
        about="28,475 good and featured Wikipedia articles, 0.5 GB; has a validation split",
        splits={"train": 1_801_350, "validation": 3_760},
        articles=True,
    ),
    "openwebtext": HubSet(
        path="parquet",
        data_files={"train": _OPENWEBTEXT},
        about="8 million web pages linked from Reddit, 40 GB: the open replication of GPT-2's training text",
        splits={"train": 8_013_769},
    ),
    "webtext": HubSet(
        path="parquet",
        data_files={"train": _OPENWEBTEXT},
        about="OpenAI never published GPT-2's WebText; this name gives OpenWebText, the same as openwebtext",
        splits={"train": 8_013_769},
    ),
    "fineweb-edu": HubSet(
        path="HuggingFaceFW/fineweb-edu",
        config="sample-10BT",
        about="9.7 million educational web pages (the sample of 10 billion tokens), 45 GB",
        splits={"train": 9_672_101},
    ),
}


def hub_rows(hub_set: HubSet, split: str) -> tuple[Iterator[str], int | None]:
    """The texts of the rows of one split, and their number if it is known.

    Rows are streamed from the network; nothing is cached on disk, and no code of the set is run. A row without text
    gives an empty text.

    Raises:
        UserError: the set cannot be reached or read; one line.
    """
    import datasets  # noqa: PLC0415 - takes seconds; --help should not

    try:
        rows = datasets.load_dataset(
            hub_set.path, hub_set.config, data_files=hub_set.data_files, split=split, streaming=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreadable(hub_set, error) from error
    known = rows.info.splits[split].num_examples if rows.info.splits and split in rows.info.splits else None
    return _texts(hub_set, rows), known or hub_set.splits[split] or None


def _texts(hub_set: HubSet, rows: Iterable[Mapping[str, str | None]]) -> Iterator[str]:
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator, None)
        except OSError as error:
            raise _unreadable(hub_set, error) from error
        if row is None:
            return
        yield row["text"] or ""


def _unreadable(hub_set: HubSet, error: Exception) -> UserError:
    reason = re.split(r"\.\s|\n", str(error).strip())[0]
    return UserError(
        f"{hub_set.source}: cannot be read from the hub ({reason}); try again, use python-stdlib, or give your own "
        "files to preprocess.py --input"
    )


def _is_title(line: str) -> bool:
    """True for `` = Title = ``, False for `` = = Section = = ``."""
    return line.startswith(" = ") and not line.startswith(" = = ") and line.rstrip("\n").endswith(" = ")


def join_articles(lines: Iterable[str]) -> Iterator[str]:
    """WikiText's lines, joined into articles; a title between empty lines begins an article.

    The text does not change: the joined articles equal the joined lines.
    """
    article: list[str] = []
    previous_empty = True
    held: str | None = None  # a title, if an empty line follows it
    for line in lines:
        if held is not None:
            if not line.strip() and "".join(article).strip():
                yield "".join(article)
                article = []
            article.append(held)
            held = None
        if previous_empty and _is_title(line):
            held = line
        else:
            article.append(line)
        previous_empty = not line.strip()
    article += [held] if held is not None else []
    if article:
        yield "".join(article)
