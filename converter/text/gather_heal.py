"""The text of a healing run: a corpus to learn from, and held-out documents that it never sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from converter.errors import ConverterError
from converter.families.opened import SourceModel
from converter.text.documents import Corpus, load_corpus
from converter.text.gather import is_embedded_example
from converter.text.stdlib import held_out_documents, training_documents
from converter.text.windows import Document, documents_from_strings, hold_out


@dataclass(frozen=True, eq=False)
class HealTexts:
    """What a run learns from, and what it is measured on."""

    corpus: Corpus
    held_out: list[Document]
    description: str


def gather_heal_texts(
    source: SourceModel, text: Sequence[str | Path], eval_text: Sequence[str | Path], cache: Path
) -> HealTexts:
    """Corpus and held-out documents from the user's files, or from the embedded corpus for its example.

    A tenth of the documents is held out, the same that `converter convert` holds out of the same files, unless
    `eval_text` names others. Tokens are kept in the folder `cache`. Raises ConverterError where there is no text.
    """
    opening, tokenizer = source.opening, source.tokenizer

    def load(texts: Sequence[str | Path]) -> Corpus:
        return load_corpus(texts, tokenizer, vocab_size=source.spec.vocab_size, end_of_text=opening, cache=cache)

    if text:
        corpus = load(text)
        if eval_text:
            held_out, description = documents_of(load(eval_text)), _names(eval_text)
        else:
            learnt, held_out = hold_out(documents_of(corpus))
            corpus, description = _corpus(learnt), f"a held-out tenth of {_names(text)}"
    elif tokenizer is not None and is_embedded_example(source):
        named = {str(number): document for number, document in enumerate(training_documents())}
        corpus = _corpus(documents_from_strings(named, tokenizer, opening))
        held_out = documents_from_strings(held_out_documents(), tokenizer, opening)
        description = "held-out modules of the Python standard library"
    else:
        raise ConverterError(
            "there is no text to learn from",
            fix="Give --text FILE, of the kind that the model was trained on (.txt, .jsonl, .parquet, .npy, .bin)",
        )
    return HealTexts(corpus, held_out, description)


def listed(texts: str | Path | Sequence[str | Path]) -> list[str | Path]:
    """One text or several; a dataset of the Hub is no path."""
    return [texts] if isinstance(texts, (str, Path)) else list(texts)


def documents_of(corpus: Corpus) -> list[Document]:
    """The documents of a corpus; their ids are views of its."""
    return [
        Document(str(number), corpus.ids[start:end])
        for number, (start, end) in enumerate(zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True))
    ]


def _corpus(documents: Sequence[Document]) -> Corpus:
    return Corpus.of([document.ids for document in documents])


def _names(paths: Sequence[str | Path]) -> str:
    return ", ".join(Path(path).name for path in paths)
