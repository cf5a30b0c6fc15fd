"""Small tokenizers, trained on a few sentences, in the files of the libraries that read them."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

SENTENCES = ("to be or not to be", "that is the question", "whether it is nobler in the mind to suffer") * 8
END = "<|endoftext|>"


def write_hugging_face(path: Path, vocab_size: int = 300, texts: Iterable[str] = SENTENCES) -> Path:
    """A byte-level BPE with an end of a document, as ``tokenizer.json``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.enable_truncation(max_length=3)  # a file may say so, and no text may be cut
    tokenizer.save(str(path))
    return path


def write_sentencepiece(path: Path, vocab_size: int = 60) -> Path:
    """A unigram model with ``</s>``, as a ``.model``."""
    from sentencepiece import SentencePieceTrainer

    content = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=content,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        minloglevel=3,
    )
    path.write_bytes(content.getvalue())
    return path
