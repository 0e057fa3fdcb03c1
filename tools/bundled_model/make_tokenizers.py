"""Trains both tokenizers (2048 tokens each) on captions: work/tokenizer, work/tokenizer_2.

CLIP side: byte-level BPE. T5 side: SentencePiece unigram with lower-casing in its character map.
Needs the `sentencepiece` package (for training only; the product does not).
"""

import json
import random
import tempfile
from pathlib import Path

import sentencepiece
from pool import WORK, build_scenes, draw_captions, load_items
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import CLIPTokenizer, T5TokenizerFast

VOCABULARY = 2048
_CLIP_SPLIT = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)


def corpus(count: int = 120_000) -> list[str]:
    """Captions, plus each name by itself so that rare words get their pieces."""
    items = load_items()
    _, texts = draw_captions(items, build_scenes(items), count, seed=5)
    names = [name for item in items if item["kind"] == "base" for name in item["names"]]
    texts += names * 12
    random.Random(5).shuffle(texts)
    return texts


def clip_tokenizer(texts: list[str]) -> CLIPTokenizer:
    """Byte-level BPE in CLIP's order: 256 bytes, 256 word-final bytes, merges, start, end."""
    trainer_side = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trainer_side.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    trainer_side.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CLIP_SPLIT), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer_side.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            initial_alphabet=alphabet,
            end_of_word_suffix="</w>",
            show_progress=False,
        ),
    )
    learned = json.loads(trainer_side.to_str())["model"]["merges"]
    tokens = alphabet + [letter + "</w>" for letter in alphabet]
    merges: list[tuple[str, str]] = []
    for left, right in (pair if isinstance(pair, list) else pair.split(" ") for pair in learned):
        if len(tokens) == VOCABULARY - 2:
            break
        if left + right not in tokens:
            tokens.append(left + right)
        merges.append((left, right))
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        model_max_length=77,
    )


def train_unigram(texts: list[str], folder: Path) -> sentencepiece_model_pb2.ModelProto:
    """SentencePiece unigram model with T5's special ids and a lower-casing character map."""
    (folder / "corpus.txt").write_text("\n".join(t.replace("\n", " ") for t in texts))
    rules = [f"{ord(c):X}\t{ord(c.lower()):X}" for c in map(chr, range(0x41, 0x5B))]
    accents = "ÀÁÂÃÄÅÇÈÉÊËÌÍÎÏÑÒÓÔÕÖÙÚÛÜÝ"
    plain = "aaaaaaceeeeiiiinooooouuuuy"
    for accent, letter in zip(accents, plain, strict=True):
        rules += [f"{ord(a):X}\t{ord(letter):X}" for a in (accent, accent.lower())]
    rules += [f"{ord(q):X}\t27" for q in "‘’`´"] + [f"{ord(q):X}\t22" for q in "“”"]
    rules += ["2013\t2D", "2014\t2D", "A0\t20", "5F\t20", "2D\t20"]
    (folder / "rules.tsv").write_text("\n".join(rules) + "\n")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "t5"),
        model_type="unigram",
        vocab_size=VOCABULARY,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        pad_piece="<pad>",
        eos_piece="</s>",
        unk_piece="<unk>",
        normalization_rule_tsv=str(folder / "rules.tsv"),
        required_chars="abcdefghijklmnopqrstuvwxyz0123456789.,!?:;'\"()&/#*+=%$@",
        num_threads=2,
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((folder / "t5.model").read_bytes())
    return proto


def t5_tokenizer(texts: list[str]) -> T5TokenizerFast:
    """The unigram model as a T5 tokenizer whose tokenizer.json holds the character map."""
    with tempfile.TemporaryDirectory() as name:
        proto = train_unigram(texts, Path(name))
    return T5TokenizerFast(
        vocab=[(piece.piece, piece.score) for piece in proto.pieces],
        _spm_precompiled_charsmap=proto.normalizer_spec.precompiled_charsmap,
        extra_ids=0,
        model_max_length=512,
    )


def main() -> None:
    """Train, save, load again and compare."""
    texts = corpus()
    probes = ["A Red Apple!!", "please show me a PINATA", "jack-o'-lantern", "日本", "", "é🙂 x"]
    for build, name, cls in (
        (clip_tokenizer, "tokenizer", CLIPTokenizer),
        (t5_tokenizer, "tokenizer_2", T5TokenizerFast),
    ):
        made = build(texts)
        made.save_pretrained(WORK / name)
        loaded = cls.from_pretrained(WORK / name)
        assert len(loaded) == VOCABULARY, f"{name} has {len(loaded)} tokens, wanted {VOCABULARY}"
        for text in probes:
            assert made(text)["input_ids"] == loaded(text)["input_ids"], f"{name}: {text!r}"
            print(name, repr(text), loaded.convert_ids_to_tokens(loaded(text)["input_ids"]))
        lengths = sorted(len(ids) for ids in loaded(texts[:20000])["input_ids"])
        print(
            name, "tokens a caption, median, 99 %, max:", [lengths[i] for i in (10000, 19800, -1)]
        )


if __name__ == "__main__":
    main()
