"""Small real tokenizers of the classes that FLUX.1 checkpoints use, the same in every process.

The trainers of the `tokenizers` library break ties by hash order, so two processes would get two
vocabularies; the vocabularies here are counted in a fixed order instead.
"""

import math
from collections import Counter
from typing import Any

CLIP_LENGTH, T5_LENGTH = 77, 512
CLIP_BEGIN, CLIP_END, WORD_END = "<|startoftext|>", "<|endoftext|>", "</w>"
T5_SPECIAL = ("<pad>", "</s>", "<unk>")
TEXTS = (
    "a red apple on a green table beside a small yellow bird",
    "two blue cats and one old dog are sleeping under the big tree",
    "the quick brown fox jumps over the lazy dog while it is raining",
    "please show me a picture of a house near the sea at night, in oil",
    "eine kleine katze, ein großer hund und ein grüner apfel: zwölf äpfel",
    "une pomme rouge très élégante à côté d'un château, numéro 0123456789",
    "красное яблоко и зелёная груша лежат на столе! 赤いりんご 红苹果 🍎",
)


def clip_tiny_tokenizer() -> Any:
    """A `CLIPTokenizer`: byte-level BPE over all 256 bytes, so that any text has ids.

    As in the published one, the end token has the highest id and pads.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    merges = _train_merges(count=200)
    tokens = [*alphabet, *(char + WORD_END for char in alphabet)]
    tokens += [left + right for left, right in merges]
    ids = {token: i for i, token in enumerate(dict.fromkeys([*tokens, CLIP_BEGIN, CLIP_END]))}
    return CLIPTokenizer(vocab=ids, merges=merges, model_max_length=CLIP_LENGTH)


def t5_tiny_tokenizer() -> Any:
    """A `T5TokenizerFast`: a unigram model; characters that it has not seen become `<unk>`."""
    from transformers import T5TokenizerFast

    vocab = [(token, 0.0) for token in T5_SPECIAL] + _count_pieces(pieces=300)
    return T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=T5_LENGTH)


def _train_merges(count: int) -> list[tuple[str, str]]:
    from tokenizers.pre_tokenizers import ByteLevel

    split = ByteLevel(add_prefix_space=False).pre_tokenize_str
    words = [text for line in TEXTS for word in line.split() for text, _ in split(word)]
    spelled = [[*word[:-1], word[-1] + WORD_END] for word in words]
    merges = []
    for _ in range(count):
        pairs = Counter(pair for word in spelled for pair in zip(word, word[1:], strict=False))
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        spelled = [_merge(word, best) for word in spelled]
    return merges


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for token in word:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


def _count_pieces(pieces: int) -> list[tuple[str, float]]:
    """The commonest substrings of up to 4 characters and every single one, as log-probabilities."""
    words = ["▁" + word for line in TEXTS for word in line.split()]
    counts = Counter(
        word[i : i + length]
        for word in words
        for length in range(1, 5)
        for i in range(len(word) - length + 1)
    )
    ranked = sorted(counts, key=lambda piece: (-counts[piece], piece))
    kept = ranked[:pieces] + [piece for piece in ranked[pieces:] if len(piece) == 1]
    total = sum(counts[piece] for piece in kept)
    return [(piece, math.log(counts[piece] / total)) for piece in kept]
