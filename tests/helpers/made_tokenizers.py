"""Real small tokenizers of every kind that decoders come with."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.tokenization_python import PythonBackend

from attnscope.inputs.labels import BYTES

LINES = ["the financial bank is located on river bank", "don't stop. 3.14", "def f(x):\n\treturn x\n"]


def byte_level(trim: bool = False, begin: bool = False) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|begin|>", "<|head|>", "<|end|>"]
    lines = [*LINES, "مرحبا مرحبا", "日本 日本"]
    backend.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=specials)
    )
    backend.post_processor = (
        processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
        if begin
        else processors.ByteLevel(trim_offsets=trim)
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>")


def llama(normalizer: normalizers.Normalizer | None = None, begin: bool = True) -> PreTrainedTokenizerFast:
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "b"), ("▁b", "an"), ("a", "n"), ("▁ban", "k")]
    letters = "▁abcdefghijklmnopqrstuvwxyz.,!?'[]/INST0123456789"
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(letters)]
    names += [left + right for left, right in merges]
    merges.sort(key=lambda pair: pair != ("a", "n"))
    backend = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=merges, byte_fallback=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizer, *steps] if normalizer else steps)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if begin:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def wordpiece() -> PreTrainedTokenizerFast:
    names = ["[UNK]", "[CLS]", "[SEP]", "the", "bank", "##ing", "river", ".", "don", "'", "t"]
    backend = Tokenizer(models.WordPiece(vocab={n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]", eos_token="[SEP]"
    )


def bert_words(*words: str) -> BertTokenizer:
    """Of so many words, with the special tokens and token types of a pair of texts."""
    names = dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])
    return BertTokenizer(vocab={name: place for place, name in enumerate(names)})


def single_bytes() -> PreTrainedTokenizerFast:
    """A token for each byte, behind four special ones, as the Byte Latent Transformer's has."""
    letters = {byte: letter for letter, byte in BYTES.items()}
    names = ["<pad>", "<s>", "</s>", "<unk>", *(letters[byte] for byte in range(256))]
    backend = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


class SlowBytes(PythonBackend):
    """A tokenizer in Python without offsets: GPT-2's letters, one token a byte."""

    def __init__(self, **kwargs: object) -> None:
        letters = {byte: letter for letter, byte in BYTES.items()}
        self.letters = [letters[byte] for byte in range(256)]
        super().__init__(bos_token="<s>", eos_token="</s>", unk_token="<unk>", **kwargs)

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {letter: byte for byte, letter in enumerate(self.letters)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: object) -> list[str]:
        return [self.letters[byte] for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return self.letters.index(token)

    def _convert_id_to_token(self, index: int) -> str | None:
        return self.letters[index] if index < 256 else None


class SlowWords(PythonBackend):
    """A tokenizer in Python without offsets: whole words and their ends, the way WordPiece and old BPE write them."""

    def __init__(self, names: list[str], **kwargs: object) -> None:
        self.names = names
        super().__init__(unk_token="<unk>", **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self.names)

    def get_vocab(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: object) -> list[str]:
        return [name for word in text.split() for name in self.names if word in name or name.strip("#@</w>") in word]

    def _convert_token_to_id(self, token: str) -> int:
        return self.names.index(token)

    def _convert_id_to_token(self, index: int) -> str | None:
        return self.names[index] if index < len(self.names) else None


MAKERS = {
    "byte": byte_level,
    "byte-trimmed": lambda: byte_level(trim=True),
    "byte-begin": lambda: byte_level(begin=True),
    "llama": llama,
    "slow": SlowBytes,
    "byt5": ByT5Tokenizer,
}
