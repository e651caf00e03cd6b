"""Real text, prepared by the real script, and small real runs over it."""

import pytest
from training_runs import REPOSITORY, Corpus

from dsgpt.parity.corpus import prepare_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Corpus:
    """The parity suite's: a few of the standard library's files, with a tokenizer of 300 ids trained on them."""
    return Corpus(folder=prepare_corpus(REPOSITORY, tmp_path_factory.mktemp("corpus")).train.parent)
